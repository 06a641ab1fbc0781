"""One job spread over processes: tiles of a VAE, branches of guidance, layers of a transformer.

    with RankPool(4) as pool:                                  # ranks.py; starts at first use
        pool.load("vae", VaeOf(folder))                        # every rank loads it from disk
        decoder = PatchParallelDecoder(pool)                   # decode.py; decode, report
        pool.load("transformer", loader, ranks=2, own=mine)    # what rank 0 calls instead
        branches = ParallelBranches(pool, ranks=2)             # branches.py; begin, velocity, end

`tiles.forecast` says beforehand, without torch, what a decode will take. One pool a process.
Bits are those of one process, but for sharded layers (`tensor.py`), which agree within rounding.
"""
