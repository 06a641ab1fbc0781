"""A finished file made again from what it says about itself, and whether it came out equal."""
