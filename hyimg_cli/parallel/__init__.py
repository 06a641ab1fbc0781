"""One job spread over processes: tiles of a VAE, branches of guidance; every bit the same."""
