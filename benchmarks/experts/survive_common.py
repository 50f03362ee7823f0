"""Shared by all of `survive`: a verdict, an expert with awkward habits, and a client that sends any bytes.

The expert raises where a sample, or a gradient, begins with `TROUBLE`: a fault of one client inside the user's module.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import grpc
import torch
from torch import Tensor, nn

from benchmarks.table import Row
from torchweft.experts import ExpertBackend, Guards, TensorSpec
from torchweft.experts.client import GrpcTransport
from torchweft.experts.wire import Call, Header, Kind, Received, decode, encode
from torchweft.experts.wire.service import STREAM

WIDTH, ROWS, MOST_ROWS = 16, 4, 64
TROUBLE = 1e6
PATIENCE = 60.0
UID = "awkward"


@dataclass(frozen=True)
class Verdict:
    """One line of the table: the fault, how often, the requirement, and the result."""

    what: str
    times: str
    wanted: str
    seen: str
    holds: bool

    def row(self) -> Row:
        """The cells of the table."""
        return {
            "what": self.what,
            "how often": self.times,
            "required": self.wanted,
            "seen": self.seen,
            "verdict": "holds" if self.holds else "falls short",
        }


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if bool((gradients[0] == TROUBLE).any()):
            raise ArithmeticError("in the middle of backward")
        return gradients[0]


class Awkward(nn.Module):
    """Three layers; when backward raises at the side, the last one has its gradient already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """rows x WIDTH to the same."""
        if bool((x == TROUBLE).any()):
            raise ArithmeticError("in forward")
        hidden = self.first(x).tanh()
        side = cast("Tensor", _RaisesInBackward.apply(self.side(hidden)))
        return self.last(hidden) + side


def awkward(**options: Any) -> ExpertBackend:
    """An expert with Adam and guards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Awkward()
    rows = (TensorSpec((None, WIDTH), torch.float32),)
    adam = partial(torch.optim.Adam, lr=1e-3)
    guards = Guards(max_norm=1e4)
    return ExpertBackend(UID, module, adam, args_schema=rows, guards=guards, max_batch_size=MOST_ROWS, **options)


def rows(seed: int, count: int = ROWS) -> Tensor:
    """Normal numbers, count x WIDTH."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def forward(x: Tensor, uid: str = UID, number: int = 1) -> Call:
    """A call."""
    return Call(Header(kind=Kind.FORWARD, call_id=number, uid=uid), [x])


def backward(x: Tensor, gradient: Tensor, key: str = "") -> Call:
    """A call that steps."""
    return Call(Header(kind=Kind.BACKWARD, call_id=1, uid=UID, client="me", key=key), [x, gradient])


def message(*calls: Call) -> bytes:
    """One frame."""
    return encode(calls)


class Raw:
    """One stream of raw bytes. A context manager that cancels an unfinished call."""

    def __init__(self, channel: Any) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(STREAM)(iter(self._queue.get, None), timeout=PATIENCE)

    def opened(self) -> None:
        """Wait until the server has taken the stream."""
        self._call.initial_metadata()

    def send(self, frame: bytes) -> None:
        """Never waits."""
        self._queue.put(frame)

    def receive(self) -> list[Received]:
        """The answers of the next frame."""
        return decode(next(self._call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._queue.put(None)
        self._call.cancel()


@contextmanager
def connected(address: str) -> Generator[Any]:
    """A channel of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with cast("Any", grpc).insecure_channel(address, options) as channel:
        yield channel


@dataclass
class Beside:
    """Answers to a good client: so often the same bits, and so often something else or none."""

    same: int = 0
    other: int = 0

    @property
    def holds(self) -> bool:
        """It was answered, and never otherwise."""
        return self.same > 0 == self.other

    def __str__(self) -> str:
        return f"{self.same} good answers, {self.other} lost or changed"


@contextmanager
def goes_on(transport: GrpcTransport) -> Generator[Beside]:
    """A good client makes the same call again and again in a thread of its own, until the block ends."""
    call, stop, seen = forward(rows(1)), threading.Event(), Beside()
    (wanted,) = transport.submit(call, PATIENCE).result(PATIENCE).tensors()

    def go_on() -> None:
        while not stop.is_set():
            answer = transport.submit(call, PATIENCE)
            if answer.exception(PATIENCE) is None and torch.equal(answer.result().tensors()[0], wanted):
                seen.same += 1
            else:
                seen.other += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def quantile(seconds: list[float], part: float = 0.99) -> float:
    """The value that so much of all is not above."""
    return sorted(seconds)[min(len(seconds) - 1, int(part * len(seconds)))]


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait for it; whether it came to that."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
