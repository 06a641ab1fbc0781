"""The parts of `real_shape.py`: what it builds and runs, and how it times and counts."""
