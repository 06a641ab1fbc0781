"""Several sessions at one plan, each in a process of its own."""
