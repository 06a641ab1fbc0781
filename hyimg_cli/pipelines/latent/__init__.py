"""Shared code for videos and edited pictures.

Conditions are encoded once, then latents are denoised step by step and saved in between.
"""
