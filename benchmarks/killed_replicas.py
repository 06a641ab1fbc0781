"""Replicas killed and stopped at random while a real manifest runs: nothing lost, nothing twice,
the pixels and keys of one process. On processes of this machine, or on two Ray nodes (`--ray`).

    python benchmarks/killed_replicas.py --faults 30 --jobs 60 --out FILE
"""

from hyimg_cli.parallel.watch import Limits

# A stopped replica is to be noticed within a trial's patience, not within a minute.
_LIMITS, _BEAT_S = Limits(silence_s=6.0), 0.5
