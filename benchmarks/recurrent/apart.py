"""A job in a fresh process: for peaks of memory, and for work that happens once per process.

    this process  --job, arguments-->  a new Python    (spawned: it shares nothing)
                  <--what it returns--

Its load counts as ours: when it has ended, the kernel knows the CPU time of it and of the compilers that it ran.
"""

import multiprocessing
import resource
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.load import LoadMeter

DEADLINE = 600.0
"""Seconds after which a job counts as hung."""


class Found(NamedTuple):
    """The result of a job, and the number of cores that other processes kept busy."""

    value: Any
    foreign: float


def in_a_fresh_process(job: Callable[..., Any], *arguments: Any) -> Found:
    """Call a function of a module there; arguments and result travel by pickle. Raises RuntimeError if it fails."""
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe(duplex=False)
    meter, before, begun = LoadMeter(), _seconds_of_children(), time.perf_counter()
    meter.start()
    process = context.Process(target=_serve, args=(theirs, job, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not line.poll(DEADLINE):
            raise RuntimeError(f"{job.__name__}{arguments} did not end within {DEADLINE:.0f} s")
        fault, value = line.recv()
    except EOFError:
        raise RuntimeError(f"{job.__name__}{arguments} ended without a result; its own words are above") from None
    finally:
        line.close()
        process.join(10)
        process.kill()
        process.join()
    if fault:
        raise RuntimeError(f"{job.__name__}{arguments} failed in its process:\n{fault}")
    own = (_seconds_of_children() - before) / (time.perf_counter() - begun)
    return Found(value, max(0.0, meter.foreign() - own))


def _seconds_of_children() -> float:
    """CPU seconds of all processes that were started here and have ended, and of those that they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _serve(line: Connection, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        line.send((None, job(*arguments)))
    except Exception:
        line.send((traceback.format_exc(), None))
    finally:
        line.close()
