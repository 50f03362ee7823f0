"""Load of other processes during a sample.

    busy time of all cores (/proc/stat)  -  CPU time of this process and its children  =  foreign CPU time

A sample is unreliable if other processes used more than a tenth of a core. Without /proc/stat the foreign load is 0, so
that no sample is rejected.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle and iowait
_OWN = slice(11, 13)  # user and system time, counted from the field after the program's name


class LoadMeter:
    """Measures the load of other processes since `start`. The processes `helpers` do not count as others."""

    def __init__(self, helpers: Iterable[int] = ()) -> None:
        self._helpers = list(helpers)
        self._marks = (0.0, 0.0, 0.0)

    def start(self) -> None:
        self._marks = self._now()

    def foreign(self) -> float:
        """Cores that other processes kept busy since `start`: 0.1 is a tenth of one core.

        The kernel counts in ticks (usually 10 ms), so a sample must be much longer than one tick.
        """
        wall, busy, own = (now - mark for now, mark in zip(self._now(), self._marks, strict=True))
        return max(0.0, busy - own) / wall if wall > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        own = time.process_time() + sum(map(_seconds_of, self._helpers))
        return time.perf_counter(), _busy_seconds(), own


def _busy_seconds() -> float:
    if not STAT.exists():
        return 0.0
    ticks = [int(field) for field in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(count for column, count in enumerate(ticks) if column not in _IDLE) / _TICKS


def _seconds_of(process: int) -> float:
    # The program's name is in brackets and can contain spaces, so split the fields after the last bracket.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[_OWN])) / _TICKS
