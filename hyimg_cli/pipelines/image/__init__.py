"""Image jobs: the stages of one job, continuous batches, and the pipeline."""
