"""Expert that counts its steps: each key has one weight, and every step for that key subtracts 1 from it.

w[i]   0: never applied    -1: applied once    -2: applied twice, which is an error
Each task is one batch, so that the number of steps is minus the sum of all weights.
"""

import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from torchweft.experts import ExpertBackend, IdempotencyOptions, TensorSpec
from torchweft.experts.client import GrpcTransport, TransportStatistics
from torchweft.experts.client.calls import FixedResolver, RetryingCaller
from torchweft.experts.client.retry import Retry
from torchweft.experts.client.transport import Transport
from torchweft.experts.wire import Call, Header, Kind, Received
from torchweft.experts.wire.service import StepReceipt, read_receipt

UID = "marks"
RETRY = Retry(attempts=100_000, first=0.002, longest=0.05)


def marks(keys: int) -> ExpertBackend:
    """Expert with one weight for each key, initially 0."""
    module = nn.Embedding(keys, 1)
    nn.init.zeros_(module.weight)
    return ExpertBackend(
        UID,
        module,
        partial(torch.optim.SGD, lr=1.0),
        args_schema=(TensorSpec((None,), torch.int64),),
        max_batch_size=1,
        idempotency=IdempotencyOptions(max_keys=2000),
    )


@dataclass
class Applied:
    """Answer for key ``number``, with the step of the answer, which can be later than that of the key."""

    number: int
    step: int
    receipt: StepReceipt


@dataclass
class Trainers:
    """Threads that send one key after another until `stop`, or until ``most`` keys are sent.

    ``seconds``: timeout of a call with all its retries. ``allowed``: errors that are counted in ``failed``. Any other
    error ends its thread. ``latest``: largest delay of a call after its deadline.
    """

    transport: Transport
    threads: int
    most: int
    seconds: float = 30.0
    retry: Retry = RETRY
    allowed: tuple[type[Exception], ...] = ()
    heard: list[Applied] = field(default_factory=list[Applied])
    failed: Counter[str] = field(default_factory=Counter[str])
    faults: list[BaseException] = field(default_factory=list[BaseException])
    latest: float = float("-inf")
    _next: int = 0

    def __post_init__(self) -> None:
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._caller = RetryingCaller(FixedResolver(self.transport), self.retry)
        self._threads = [threading.Thread(target=self._run) for _ in range(self.threads)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all threads."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Start no more calls, and wait for pending ones."""
        self._stop.set()
        self.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                number = self._next
                self._next += 1
            if number >= self.most:
                return
            start = time.monotonic()
            try:
                answer = self._caller.call(step_call(number), self.seconds)
                self.heard.append(Applied(number, answer.header.step, read_receipt(answer.header.data)))
            except self.allowed as error:
                with self._lock:
                    self.failed[type(error).__name__] += 1
            except BaseException as error:
                self.faults.append(error)
                return
            with self._lock:
                self.latest = max(self.latest, time.monotonic() - start - self.seconds)

    def missing(self, weight: Tensor) -> int:
        """Number of answered keys that did not take exactly one step."""
        return sum(bool(weight[applied.number] != -1) for applied in self.heard)


class WrappedTransport:
    """Base class of transports that wrap `inner` and override `submit`."""

    def __init__(self, inner: GrpcTransport) -> None:
        self.inner = inner

    @property
    def address(self) -> str:
        """See `Transport.address`."""
        return self.inner.address

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        return self.inner.submit(call, timeout)

    def close(self) -> None:
        """See `Transport.close`."""
        self.inner.close()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`."""
        return self.inner.statistics()


def step_call(number: int) -> Call:
    """Backward call with this key."""
    header = Header(kind=Kind.BACKWARD, call_id=0, uid=UID, client="me", key=f"key-{number}")
    return Call(header, [torch.tensor([number]), torch.ones(1, 1)])


@dataclass(frozen=True)
class Count:
    """Number of keys that were applied more than once, and of steps without a key."""

    repeated: int
    unexplained: int

    @property
    def good(self) -> bool:
        """Whether every step belongs to a key, and no key has two."""
        return self.repeated == 0 == self.unexplained


def counted(weight: Tensor, steps: int) -> Count:
    """Count errors in the weights of `marks` after `steps` steps."""
    return Count(int((weight < -1).sum()), steps + round(float(weight.sum())))
