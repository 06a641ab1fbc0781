"""Replicas killed and stopped at random while a real manifest runs: nothing lost, nothing twice,
the pixels and keys of one process. On processes of this machine, or on two Ray nodes (`--ray`).

    python benchmarks/killed_replicas.py --faults 30 --jobs 60 --out FILE
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hyimg_cli.engine.replicas.cluster import RayCluster
from hyimg_cli.engine.replicas.local import LocalProcesses
from hyimg_cli.engine.replicas.run import Replicas
from hyimg_cli.engine.runner import ResumePolicy, accept, sift
from hyimg_cli.engine.session import Session
from hyimg_cli.errors import MachineError
from hyimg_cli.journal.journal import RunFolder
from hyimg_cli.journal.provenance import hardware
from hyimg_cli.manifest.manifest import read_manifest
from hyimg_cli.manifest.planner import make_plan
from hyimg_cli.models import registry
from hyimg_cli.parallel.watch import Limits
from hyimg_cli.settings.precedence import settle
from hyimg_cli.spec.events import JobDone, ReplicaDied
from hyimg_cli.spec.run import ModelChoice, OutputConfig, ParallelConfig, RunConfig

# A stopped replica is to be noticed within a trial's patience, not within a minute.
_LIMITS, _BEAT_S = Limits(silence_s=6.0), 0.5
