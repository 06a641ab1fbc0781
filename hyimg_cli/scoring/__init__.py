"""Score candidates, each scorer in a process of its own, and pick the best of them."""
