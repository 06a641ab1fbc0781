"""A process that ends with the one that started it; this is all that is imported before it does."""

import ctypes
import os
import signal
import sys


def tie_to(parent: int) -> None:
    """Have the system end this process with process `parent`, which started it, even where it is
    stopped and reads no line. On Linux alone.
    """
    if sys.platform == "linux" and parent:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
