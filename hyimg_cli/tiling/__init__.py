"""Latents decoded tile by tile, alone or over ranks."""
