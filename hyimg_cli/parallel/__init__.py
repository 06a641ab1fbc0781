"""One job over processes: VAE tiles, guidance branches, layers of a transformer.

    with RankPool(4) as pool:                                  # ranks.py; starts at first use
        pool.load("vae", VaeOf(folder))                        # every rank loads it from disk
        decoder = PatchParallelDecoder(pool)                   # decode.py; decode, report
        pool.load("transformer", loader, ranks=2, own=mine)    # what rank 0 calls instead
        branches = ParallelBranches(pool, ranks=2)             # branches.py; begin, velocity, end

`tiles.forecast` estimates a decode in advance, without torch. One pool per process. Bits equal one
process's, except for sharded layers (`tensor.py`), which agree within rounding.
"""
