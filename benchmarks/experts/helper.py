"""A process of our own that is asked by words; see processes/words.py.

    this process  --question-->  python program.py     each line is JSON; every answer has a deadline
                  <--answer----

Its children count as ours, and end with it: it leads a process group, which is killed if it does not end by itself.
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
"""Seconds that the first answer may take, and every other beyond what was asked for."""
_END = 10.0


class HelperLost(RuntimeError):
    """A helper ended, or did not answer in time; says its last words."""


class Helper:
    """A program of `processes`, running. A context manager. ``python`` is which one runs it."""

    def __init__(self, program: str, given: dict[str, Any], *, python: str) -> None:
        self.name = program
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (closed at the end)
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [python, str(PROGRAMS / f"{program}.py"), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    @property
    def processes(self) -> list[int]:
        """The numbers of it and all its descendants, as of now."""
        return family(self._process.pid)

    def ask(self, question: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        """Its answer, within `DEADLINE` and so many seconds more. Raises ``HelperLost``."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        return self.hear(seconds)

    def hear(self, seconds: float = 0.0) -> dict[str, Any]:
        """The next thing that it says; the first comes unasked. Raises ``HelperLost``."""
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], DEADLINE + seconds)
        line = out.readline() if ready else b""
        if not line:
            why = "ended" if ready else f"did not answer within {DEADLINE + seconds:.0f} s"
            raise HelperLost(f"{self.name} {why}: {self._last_words()}")
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
        with suppress(ProcessLookupError):  # whoever it has left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._words.close()

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def family(process: int) -> list[int]:
    """A process and all its descendants, as of now. Only itself without a /proc."""
    parents = {int(each.name): _parent(each) for each in _folders()}
    found, size = {process}, 0
    while size < len(found):
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return sorted(found)


def _folders() -> Iterable[Path]:
    proc = Path("/proc")
    return [each for each in proc.iterdir() if each.name.isdecimal()] if proc.exists() else []


def _parent(folder: Path) -> int | None:
    try:  # the name of the program stands in brackets and may hold spaces
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has just ended
        return None
