"""HunyuanVideo-1.5 and Wan in diffusers' layout, with its networks, encoders and schedulers.

Not with its modular blocks, which editors run. Tried with 0.42.1 (tiny checkpoints, CPU, float32):
Wan's text block fails without guidance or ftfy, the default of Wan 2.2's second guider differs, and
no block keeps a job's state between steps or runs a guidance branch in another process. Where they
run (HunyuanVideo-1.5, Wan 2.1 with guidance), latents are equal.
"""
