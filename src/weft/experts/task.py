"""Task: the request of one client, flat tensors, and the futures that wait for the answer.

    submit ──> waiting ──> taken ──> answered       every waiter gets the results, or the error
                  |
                  +──> cancelled by all its waiters, or expired: it leaves the queue and holds nothing

Usually one future waits. A request with an idempotency key may be repeated while it is under way; then the repetition
joins as one more waiter, and may be cancelled without hurting the first.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from zlib import crc32

import torch
from torch import Tensor

Results = list[Tensor]
Answer = Results | BaseException
"""What became of a task: its flat results, or the error that its author gets."""

BatchKey = tuple[Hashable, ...]
"""What must be equal for two tasks to share a batch."""

REPEATED = "+"
"""What stands behind it in a key tells several backwards of one forward apart; before it, the key of the forward."""

_numbers = count()


@dataclass(eq=False, slots=True)
class CallerStream:
    """The stream that a task came by. ``ended_at`` is a time of `time.monotonic`, None while it is open."""

    ended_at: float | None = None


@dataclass(eq=False, slots=True)
class Task:
    """``tensors`` have ``rows`` rows each; ``deadline`` is a time of `time.monotonic`; ``number`` is unique here.

    ``key`` makes a repetition known, ``mini_batch`` names the sum that its gradient is added to, both within one
    ``client``. Quotas and shares go by ``principal``, which several clients may have. It came by ``stream``. Tasks of
    one ``batch_key`` may share a batch. ``evaluation``: the module runs as after ``eval()``; ``keep``: what its forward
    leaves may be kept, see `weft.experts.graph_cache`.
    """

    tensors: tuple[Tensor, ...]
    rows: int
    batch_key: BatchKey = ()
    deadline: float | None = None
    client: str | None = None
    key: str | None = None
    mini_batch: str | None = None
    evaluation: bool = False
    keep: bool = True
    principal: str | None = None
    stream: CallerStream | None = None
    arrival: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=lambda: next(_numbers))
    waiters: list["Waiter"] = field(default_factory=list["Waiter"])
    taken: bool = False
    _fingerprint: int | None = None

    def fingerprint(self) -> int:
        """What a retry has to repeat exactly, as 64 bits: a checksum of mode, mini-batch and shapes, and one of the
        payload. Computed once, so before anybody writes into the tensors."""
        if self._fingerprint is None:
            shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors]
            form = crc32(repr((self.mini_batch, self.evaluation, shapes)).encode("utf-8", "backslashreplace"))
            payload = 0
            for tensor in self.tensors:
                plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                # Not by way of numpy, which is not needed in a process that only has its own experts.
                payload = crc32((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()), payload)
            self._fingerprint = form << 32 | payload
        return self._fingerprint

    def join(self, deadline: float | None, gave_up: Callable[["Task"], None]) -> "Future[Results]":
        """One more waiter. The task expires when the last of them does.

        ``gave_up`` is called, in the thread that cancels, whenever a waiter does so before the task is taken.
        """
        future = Waiter(self, gave_up)
        if self.waiters and (self.deadline is None or deadline is None):
            self.deadline = None
        elif self.waiters and self.deadline is not None and deadline is not None:
            self.deadline = max(self.deadline, deadline)
        self.waiters.append(future)
        if self.taken:
            future.set_running_or_notify_cancel()
        return future

    def wanted(self) -> bool:
        """Whether anybody still waits. Forgets those who gave up."""
        gone = [waiter for waiter in self.waiters if waiter.cancelled()]
        self.waiters = [waiter for waiter in self.waiters if waiter not in gone]
        for waiter in gone:  # else `concurrent.futures.wait` would go on waiting for it
            waiter.set_running_or_notify_cancel()
            waiter.let_go()
        return bool(self.waiters)

    def take(self) -> bool:
        """Whether somebody still waits; if so nobody can cancel from here on."""
        self.waiters = [waiter for waiter in self.waiters if _still_waits(waiter)]
        self.taken = bool(self.waiters)
        return self.taken

    def expired(self, now: float) -> bool:
        """Whether nobody wants the answer any more at this time."""
        return self.deadline is not None and self.deadline <= now

    def release(self) -> Sequence["Future[Results]"]:
        """The waiters, for the last time: a future that is kept must not keep the task."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.let_go()
        return waiters


class Waiter(Future[Results]):
    """Tells the pool when it is cancelled; a callback would be called for every answer as well."""

    def __init__(self, task: Task, gave_up: Callable[[Task], None]) -> None:
        super().__init__()
        self._waits: tuple[Task, Callable[[Task], None]] | None = (task, gave_up)

    def cancel(self) -> bool:
        """As the library says."""
        done, waits = super().cancel(), self._waits
        if done and waits is not None:
            waits[1](waits[0])
        return done

    def add_done_callback(self, fn: "Callable[[Future[Results]], object]") -> None:
        """As the library says; and nothing that ``fn`` raises ends the thread that answers, which others need too."""
        super().add_done_callback(partial(_call, fn))

    def let_go(self) -> None:
        """Forget the task."""
        self._waits = None


def answer(waiters: Sequence["Future[Results]"], result: Answer) -> None:
    """Give the result to everyone who still waits."""
    for waiter in waiters:
        if not waiter.running() and not _still_waits(waiter):
            continue
        try:
            if isinstance(result, BaseException):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)
        except InvalidStateError:  # its owner has set it, and wants nothing else
            continue


def split_rows(batch: Sequence[Tensor], rows: Sequence[int]) -> list[Results]:
    """The results of every task: views of its own rows."""
    if len(rows) == 1:
        return [list(batch)]
    parts: list[Sequence[Tensor]] = [torch.split(tensor, list(rows)) for tensor in batch]
    return [[part[place] for part in parts] for place in range(len(rows))]


def _still_waits(waiter: "Future[Results]") -> bool:
    """Whether a future is to be answered. Nobody can cancel it from here on."""
    try:
        return waiter.set_running_or_notify_cancel()
    except RuntimeError:  # its owner has set it; the library logs that
        return False


def _call(fn: "Callable[[Future[Results]], object]", future: "Future[Results]") -> None:
    """A callback. The library logs what it raises, but lets through what is no ``Exception``."""
    try:
        fn(future)
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError(f"a callback raised {type(error).__name__}, which ends nothing here") from error
