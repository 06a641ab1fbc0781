"""BAGEL-7B-MoT: one decoder that writes and draws, with two sets of weights."""
