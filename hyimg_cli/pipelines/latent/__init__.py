"""What videos and edited pictures have in common: conditions encoded once, latents denoised step
by step and saved in between.
"""
