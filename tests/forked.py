"""A child of this process, for what must hold after a fork."""

import gc
import os
import signal
from collections.abc import Callable

import pytest

only_with_fork = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def forked(work: Callable[[], object]) -> bool:
    """Whether ``work`` returned something true in a child. A child that hangs is ended after 20 s, and is false."""
    gc.collect()  # what earlier tests left must not be collected in the child, where their threads are gone
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0
