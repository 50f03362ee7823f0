"""Ranks for tests: processes of one group on this host, which run functions of test modules.

    def work(step: int) -> float: ...            a function of a module, which runs on every rank

    ranks(2).run(work, 3)                        the results by rank, or a failed test if any rank raised
    ranks(2).outcomes(work, 3)                   for each rank its result or its error, or None if it died
    with fresh_ranks(2) as two: two.run(...)     ranks of this test alone, which it can kill

Ranks that many tests share are started as torchrun does it: each is a new interpreter with a hash seed of its own, so
that sets of strings have another order on each rank. Ranks of one test are forked from a server that has imported torch
and torchweft, so that a start takes milliseconds. Both have the environment of torchrun. The store lives in the test
process, so no port is guessed. Every wait has a deadline, after which all ranks are killed and their stacks are shown.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

GROUP_SECONDS = 60.0
_forks, _spawns = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
# All that a rank would import, which takes seconds. An optimizer imports torch._dynamo.
_PRELOADED = ["torch._dynamo", "torchweft.pipeline.processes.links", "torchweft.checkpoint"]


class Outcome(NamedTuple):
    """The result of one rank, or the error that it raised with its traceback."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""


class Ranks:
    """Processes of one group. They run one function after another until they are closed, or one of them dies. With
    `spawned`, each has its own hash seed."""

    def __init__(self, size: int, timeout: float = GROUP_SECONDS, *, spawned: bool = False) -> None:
        self.size, self.broken = size, False
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="torchweft-ranks-", ignore_cleanup_errors=True)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        _forks.set_forkserver_preload(_PRELOADED)
        context: Any = _spawns if spawned else _forks
        for rank in range(size):
            mine, theirs = context.Pipe()
            arguments = (rank, size, self._store.port, timeout, theirs, self._stacks.name)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            with _hash_seed(rank + 1):
                process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, work: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
        """The results of ``work(*args)`` by rank. Raises AssertionError with the tracebacks of all failed ranks."""
        outcomes = self.outcomes(work, *args, seconds=seconds)
        texts = [
            f"rank {rank}: {'its process died' if outcome is None else outcome.text}"
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome.text
        ]
        assert not texts, "\n".join(texts)
        return [outcome.result for outcome in outcomes if outcome]

    def outcomes(
        self, work: Callable[..., Any], *args: Any, seconds: float = 60.0, without: tuple[int, ...] = ()
    ) -> list[Outcome | None]:
        """The outcome of each rank, or None if it died. Ranks in `without` are not waited for, and have None too."""
        self.start(work, *args)
        return self.collect(seconds, without)

    def run_without(self, lost: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of all ranks but one, which does not come back. Raises AssertionError as `run` does."""
        outcomes = self.outcomes(work, *args, without=(lost,))
        others = [outcome for rank, outcome in enumerate(outcomes) if rank != lost]
        assert all(outcome and not outcome.text for outcome in others), others
        return [outcome.result for outcome in others if outcome]

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        """Start ``work(*args)`` on all ranks."""
        for pipe in self._pipes:
            pipe.send((work, args))

    def collect(self, seconds: float = 60.0, without: tuple[int, ...] = ()) -> list[Outcome | None]:
        """Wait for the outcomes of the last `start`."""
        outcomes: list[Outcome | None] = [None] * self.size
        waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in without}
        self.broken = self.broken or bool(without)
        deadline = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks_of(sorted(waiting.values()))
                self.close()
                raise AssertionError(
                    f"no answer after {seconds:g} s from the ranks {sorted(waiting.values())}:\n{stacks}"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    outcomes[rank] = Outcome(*pipe.recv())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.broken = True
        return outcomes

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank."""
        os.kill(self._processes[rank].pid, number)

    def _stacks_of(self, ranks: list[int]) -> str:
        for rank in ranks:
            self.signal(rank, signal.SIGUSR1)
        time.sleep(0.5)
        files = [(rank, Path(self._stacks.name) / str(rank)) for rank in ranks]
        return "\n".join(f"rank {rank}:\n{file.read_text() if file.exists() else ''}" for rank, file in files)

    def close(self) -> None:
        """Kill all ranks, and their children."""
        self.broken = True
        for process in self._processes:
            with suppress(ProcessLookupError):  # a rank that has not started yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10.0)
            pipe.close()
        self._stacks.cleanup()


@contextmanager
def _hash_seed(seed: int) -> Iterator[None]:
    """Let interpreters that start inside have this seed of string hashes."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(seed)
    try:
        yield
    finally:
        del os.environ["PYTHONHASHSEED"]
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


@contextmanager
def fresh_ranks(size: int, timeout: float = GROUP_SECONDS) -> Iterator[Ranks]:
    """Ranks for one test. `timeout` is the timeout of their group, in seconds."""
    ranks = Ranks(size, timeout)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, size: int, port: int, timeout: float, pipe: Connection, stacks: str) -> None:
    """Main loop of a rank."""
    os.setsid()  # so that `close` can kill its children too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = (Path(stacks) / str(rank)).open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1",
    )  # fmt: skip
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (work(*args), None, "")
        except BaseException as error:  # including interrupts, which the test checks
            answer = (None, error, traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:  # an error or result that cannot be pickled
            pipe.send((None, None, answer[2] or traceback.format_exc()))
        # The traceback of an error refers to the pipe of a failed test, which the next one would find alive.
        del answer
