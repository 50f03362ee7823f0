"""A helper process that answers questions over pipes; see processes/words.py.

    this process  --question-->  python program.py     each line is JSON; every answer has a deadline
                  <--answer----

The helper leads a process group. The group is killed at the end, so that no child of the helper outlives it.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "processes"
DEADLINE = 120.0
"""Seconds allowed for the first answer, and for each later one beyond the requested duration."""
_END = 10.0


class HelperLost(RuntimeError):
    """A helper ended or did not answer in time. The message has the last line of its stderr."""


class Helper:
    """A running program of `processes`, as a context manager. ``python`` is its interpreter."""

    def __init__(self, program: str, options: dict[str, Any], *, python: str) -> None:
        self.name = program
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed at the end)
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [python, str(PROGRAMS / f"{program}.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    @property
    def process(self) -> int:
        """Process id of the helper."""
        return self._process.pid

    @property
    def processes(self) -> list[int]:
        """Process ids of the helper and its current descendants."""
        return family(self._process.pid)

    def ask(self, question: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        """Return the answer, which can take `DEADLINE` and `seconds` more. Raises ``HelperLost``."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        return self.hear(seconds)

    def hear(self, seconds: float = 0.0) -> dict[str, Any]:
        """Return the next message. The helper sends the first one without a question. Raises ``HelperLost``."""
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], DEADLINE + seconds)
        line = out.readline() if ready else b""
        if not line:
            why = "ended" if ready else f"did not answer within {DEADLINE + seconds:.0f} s"
            raise HelperLost(f"{self.name} {why}: {self._last_error()}")
        answer: dict[str, Any] = json.loads(line)
        if "fault" in answer:
            raise HelperLost(f"{self.name}: {answer['fault']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        with suppress(ProcessLookupError):  # the group has no process left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def _last_error(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def family(process: int) -> list[int]:
    """A process and its current descendants. Without /proc, the process alone."""
    parents = {int(folder.name): _parent(folder) for folder in _process_folders()}
    members, size = {process}, 0
    while size < len(members):
        size = len(members)
        members |= {child for child, parent in parents.items() if parent in members}
    return sorted(members)


def _process_folders() -> Iterable[Path]:
    proc = Path("/proc")
    return [folder for folder in proc.iterdir() if folder.name.isdecimal()] if proc.exists() else []


def _parent(folder: Path) -> int | None:
    try:  # the program's name is in brackets and can contain spaces
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # the process has just ended
        return None
