"""`python -m fedexact`."""

from fedexact.cli import main

main()
