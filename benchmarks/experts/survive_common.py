"""Shared code of `survive`: a verdict, an expert that can raise, and a client that sends raw bytes.

The expert raises if an input or a gradient contains `TROUBLE`. This simulates an error in the user's module that the
data of one client causes.
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
    """One row of the table: the fault, its count, the requirement and the result."""

    fault: str
    times: str
    required: str
    measured: str
    holds: bool

    def row(self) -> Row:
        """Cells of the table."""
        return {
            "fault": self.fault,
            "times": self.times,
            "required": self.required,
            "measured": self.measured,
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
    """Three layers. When the backward of `side` raises, `last` already has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map rows x WIDTH to rows x WIDTH."""
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
    """Random numbers, count x WIDTH."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def forward(x: Tensor, uid: str = UID, number: int = 1) -> Call:
    """A forward call."""
    return Call(Header(kind=Kind.FORWARD, call_id=number, uid=uid), [x])


def backward(x: Tensor, gradient: Tensor, key: str = "") -> Call:
    """A backward call, which takes an optimizer step."""
    return Call(Header(kind=Kind.BACKWARD, call_id=1, uid=UID, client="me", key=key), [x, gradient])


def message(*calls: Call) -> bytes:
    """Encode calls as one frame."""
    return encode(calls)


class Raw:
    """Stream of raw bytes. The context manager cancels it if it is not finished."""

    def __init__(self, channel: Any) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(STREAM)(iter(self._queue.get, None), timeout=PATIENCE)

    def opened(self) -> None:
        """Wait until the server has accepted the stream."""
        self._call.initial_metadata()

    def send(self, frame: bytes) -> None:
        """Queue a frame without waiting."""
        self._queue.put(frame)

    def receive(self) -> list[Received]:
        """Answers of the next frame."""
        return decode(next(self._call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._queue.put(None)
        self._call.cancel()


@contextmanager
def connected(address: str) -> Generator[Any]:
    """Channel that shares no connection with other channels."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with cast("Any", grpc).insecure_channel(address, options) as channel:
        yield channel


@dataclass
class Answers:
    """Numbers of bit-equal answers to a valid client, and of lost or different ones."""

    same: int = 0
    other: int = 0

    @property
    def holds(self) -> bool:
        """Whether there were answers, all of them bit-equal."""
        return self.same > 0 == self.other

    def __str__(self) -> str:
        return f"{self.same} correct answers, {self.other} lost or changed"


@contextmanager
def repeated_calls(transport: GrpcTransport) -> Generator[Answers]:
    """Repeat a valid call in a thread during the block, and compare its answers."""
    call, stop, answers = forward(rows(1)), threading.Event(), Answers()
    (expected,) = transport.submit(call, PATIENCE).result(PATIENCE).tensors()

    def repeat() -> None:
        while not stop.is_set():
            answer = transport.submit(call, PATIENCE)
            if answer.exception(PATIENCE) is None and torch.equal(answer.result().tensors()[0], expected):
                answers.same += 1
            else:
                answers.other += 1

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def quantile(seconds: list[float], fraction: float = 0.99) -> float:
    """Quantile of `seconds`, the 99th percentile by default."""
    return sorted(seconds)[min(len(seconds) - 1, int(fraction * len(seconds)))]


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait until `condition` holds. Return False on timeout."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
