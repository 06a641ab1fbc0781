"""Flow matching without a model: sigmas and timesteps, guidance, the denoise loop."""
