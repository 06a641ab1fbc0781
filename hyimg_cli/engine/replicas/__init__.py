"""Several sessions that share one plan, each in its own process."""
