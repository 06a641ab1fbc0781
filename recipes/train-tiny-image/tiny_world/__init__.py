"""A small world of coloured shapes: what the embedded checkpoint is trained on and judged by."""
