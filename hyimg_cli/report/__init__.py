"""Pages to look at and to pass on: a run's, and a comparison's."""
