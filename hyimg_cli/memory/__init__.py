"""Whether a run fits into memory: what is needed, what there is, what would make it fit."""
