"""HunyuanVideo-1.5 and Wan in diffusers' layout, with its networks and schedulers."""
