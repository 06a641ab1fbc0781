"""Pictures at work: the stages of one job, groups of them, and the pipeline that a session asks."""
