"""BAGEL-7B-MoT: one decoder with two sets of weights, by kind of token, that writes and draws."""
