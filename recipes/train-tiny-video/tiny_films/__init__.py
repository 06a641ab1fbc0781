"""A small world of films for the embedded video checkpoint: drawn, described, learnt, judged."""
