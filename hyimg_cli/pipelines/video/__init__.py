"""Videos at work: the stages of one job, and the crew that a session asks."""
