"""The parts of `real_shape.py`: what is built, what is run, how it is timed and counted."""
