"""A small world of coloured shapes, for training and judging the embedded checkpoint."""
