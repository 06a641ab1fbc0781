"""How long work takes: what runs have taken, what a plan will take, what is left of a run."""
