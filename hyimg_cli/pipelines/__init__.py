"""Pipelines: a loaded model that takes one kind of job from manifest line to pixels."""
