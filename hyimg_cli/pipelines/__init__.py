"""A loaded model at work on one kind of job, from line to pixels."""
