"""Decode latents tile by tile, in one process or over ranks."""
