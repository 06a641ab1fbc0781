"""Parts that decoders with a K/V cache and span masks share; families build on them."""
