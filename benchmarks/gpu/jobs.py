"""Subprocesses with deadlines. A device-side assert ends the CUDA context of its process, so each check has its own."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SKIPPED = 77
"""Exit code of a job that cannot run on this machine."""


class Outcome(NamedTuple):
    """Exit code of a job (None: it was killed at its deadline), its output, and seconds."""

    code: int | None
    output: str
    seconds: float

    @property
    def verdict(self) -> str:
        """One of ok, skipped, FAILED."""
        return {0: "ok", SKIPPED: "skipped"}.get(-1 if self.code is None else self.code, "FAILED")

    def last_lines(self, count: int = 6) -> str:
        """The end of the output, and the way the process ended if the output cannot tell it."""
        lines = [line.rstrip() for line in self.output.splitlines() if line.strip()][-count:]
        if self.code is None:
            lines.append(f"killed at its deadline, after {self.seconds:.0f} s")
        elif self.code < 0:
            lines.append(f"killed by {signal.Signals(-self.code).name}")
        return "\n".join(lines)


def run_job(argv: Sequence[str], seconds: float, **variables: str) -> Outcome:
    """Run a program of Python in the repository, for at most so many seconds. Its children are killed with it."""
    if seconds <= 1:
        return Outcome(SKIPPED, "the time of this section is used up", 0.0)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        job = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its process group can be killed as a whole
        )
        try:
            code: int | None = job.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        output.seek(0)
        return Outcome(code, output.read(), time.monotonic() - begun)
