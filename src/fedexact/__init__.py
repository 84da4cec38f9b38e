"""fedexact"""
