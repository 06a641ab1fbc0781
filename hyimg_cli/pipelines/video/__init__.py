"""Videos at work: the stages of one job, and the pipeline that a session asks."""
