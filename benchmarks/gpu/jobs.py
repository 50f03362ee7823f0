"""Subprocesses with deadlines. Each check has its own, because a device-side assert ends a CUDA context."""

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
    """Exit code of a job (None if it was killed at its deadline), its output and its duration in seconds."""

    code: int | None
    output: str
    seconds: float

    @property
    def verdict(self) -> str:
        """One of ok, skipped, FAILED."""
        return {0: "ok", SKIPPED: "skipped"}.get(-1 if self.code is None else self.code, "FAILED")

    def last_lines(self, count: int = 6) -> str:
        """End of the output, with a line about the deadline or the signal that killed the job."""
        lines = [line.rstrip() for line in self.output.splitlines() if line.strip()][-count:]
        if self.code is None:
            lines.append(f"killed at its deadline, after {self.seconds:.0f} s")
        elif self.code < 0:
            lines.append(f"killed by {signal.Signals(-self.code).name}")
        return "\n".join(lines)


def run_job(argv: Sequence[str], seconds: float, **variables: str) -> Outcome:
    """Run Python with ``argv`` in the repository for at most ``seconds``. Kill its children at the end."""
    if seconds <= 1:
        return Outcome(SKIPPED, "the time limit of this section was reached", 0.0)
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
            start_new_session=True,  # so that the whole process group can be killed
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
