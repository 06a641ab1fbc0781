"""LingBot-World fast: image-to-video along a camera path, chunk by chunk over one K/V cache."""
