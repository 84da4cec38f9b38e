"""Other programs for the same rounds, each written as its own examples are, in its environment."""
