"""Processes of Python that are spoken to in lines, and none of which outlives the block.

    with Crew(threads) as crew:                       box: (child, "a line"), (child, None) when it has ended
        child = crew.start("server a", MODULE, config)  ──first line──> stdin
        child, words = crew.next(0.1)                   <── stdout, read by a thread for each child

At the end, whatever led there: inputs are closed, on which each child ends by itself; who has not after a while is
killed. Ctrl-C in a terminal goes to this process alone (the children have sessions of their own), which then ends
them. What they complain about goes to files in the folder of the crew, which is removed with it.
"""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import weft

_END = 5.0  # seconds that children have to end by themselves
_HURRY = 1.0  # the same, where the block failed
_JOIN = 5.0
_TAIL = 2000  # characters of what a child complained about


class Child:
    """One process; made by `Crew.start`."""

    def __init__(self, name: str, module: str, environment: dict[str, str], log: Path, box: "Box") -> None:
        self.name = name
        self._log, self._box = log, box
        with log.open("wb") as complaints:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=environment,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"weft-demo-{name}", daemon=True)
        self._reader.start()

    def tell(self, value: Any) -> None:
        """A line of JSON. Who has ended hears nothing; that is seen when its output ends."""
        stdin = self.process.stdin
        assert stdin is not None
        with suppress(OSError, ValueError):
            stdin.write(json.dumps(value) + "\n")
            stdin.flush()

    def kill(self) -> float:
        """SIGKILL. Returns when (`time.monotonic`)."""
        now = time.monotonic()
        self.process.kill()
        return now

    def close_input(self) -> None:
        """Tell it to end."""
        assert self.process.stdin is not None
        with suppress(OSError):  # what could not be written before is not written now either
            self.process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Until it has ended; if that takes longer, it is killed."""
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """After its end: the thread and the pipe."""
        self._reader.join(_JOIN)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def complaints(self) -> str:
        """How it ended, and the end of what it wrote to stderr."""
        code = self.process.poll()
        said = self._log.read_text("utf-8", errors="replace")[-_TAIL:].strip()
        return f"{self.name} (exit code {code}): {said or 'it said nothing'}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):
            for line in self.process.stdout:
                self._box.put((self, line.rstrip("\n")))
        self.process.wait()
        self._box.put((self, None))


Box = SimpleQueue[tuple[Child, str | None]]


class Crew:
    """Children, and a folder for what they share. A context manager."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._temporary = TemporaryDirectory(prefix="weft-demo-")
        self.folder = Path(self._temporary.name)
        self._box: Box = SimpleQueue()
        self._children: list[Child] = []

    def start(self, name: str, module: str, first: Any) -> Child:
        """A new process that runs a module, with the first line of its input."""
        log = self.folder / f"{len(self._children)}.log"
        child = Child(name, module, self._environment(), log, self._box)
        self._children.append(child)
        child.tell(first)
        return child

    def next(self, seconds: float) -> tuple[Child, str | None] | None:
        """The next line of any child, None for its end; None if nothing comes in time."""
        try:
            return self._box.get(timeout=seconds)
        except Empty:
            return None

    def close(self, seconds: float = _END) -> None:
        """End all, and kill who has not ended by itself after so many seconds. May be called twice."""
        end = time.monotonic() + seconds
        try:
            for child in self._children:
                child.close_input()
            for child in self._children:
                child.wait(end - time.monotonic())
        finally:  # a second Ctrl-C does not leave anybody behind
            for child in self._children:
                child.wait(0.0)
            while self._children:
                self._children.pop().close()
            self._temporary.cleanup()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(_END if kind is None else _HURRY)

    def _environment(self) -> dict[str, str]:
        sources = str(Path(weft.__file__).parents[1])
        paths = [sources, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = {name: str(self._threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
