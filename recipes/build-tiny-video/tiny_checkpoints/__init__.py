"""Tiny text-to-video checkpoints in the official diffusers layout, every byte from a fixed seed."""
