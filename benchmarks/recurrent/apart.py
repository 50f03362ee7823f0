"""A job in a fresh process, to measure peaks of memory and work that is done once per process.

    this process  --job, arguments-->  a new Python    (spawned, so that it shares no memory)
                  <-----result-------

The CPU time of the job is not foreign load. The kernel reports it once the job and its compilers have ended.
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
    """Run `job`, a function of a module, in a spawned process. Raises RuntimeError if it fails.

    Arguments and result are pickled.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    meter, before, begun = LoadMeter(), _seconds_of_children(), time.perf_counter()
    meter.start()
    process = context.Process(target=_serve, args=(sender, job, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(DEADLINE):
            raise RuntimeError(f"{job.__name__}{arguments} did not end within {DEADLINE:.0f} s")
        fault, value = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{job.__name__}{arguments} ended without a result; its output is above") from None
    finally:
        receiver.close()
        process.join(10)
        process.kill()
        process.join()
    if fault:
        raise RuntimeError(f"{job.__name__}{arguments} failed in its process:\n{fault}")
    job_load = (_seconds_of_children() - before) / (time.perf_counter() - begun)
    return Found(value, max(0.0, meter.foreign() - job_load))


def _seconds_of_children() -> float:
    """CPU seconds of all ended child processes and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _serve(sender: Connection, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send((None, job(*arguments)))
    except Exception:
        sender.send((traceback.format_exc(), None))
    finally:
        sender.close()
