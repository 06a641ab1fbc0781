"""Pictures at work: the stages of one job, groups of them, and the crew that a session asks."""
