"""Panels of the help."""

RUN, MODEL, SAMPLING, VIDEO = "Run", "Model", "Sampling defaults", "Video (t2v, i2v)"
OUTSIDE = "Edits that keep their source outside"
