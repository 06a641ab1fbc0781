"""Video jobs: the stages of one job, and the pipeline that a session uses."""
