"""HunyuanVideo-1.5 and Wan as diffusers lays them out, networks and schedulers diffusers' own."""
