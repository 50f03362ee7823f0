"""The calls of a mixture: begun at once, watched by whoever waits, and sent again by the one rule of all clients.

    Request ── route ──> transport ── submit ──> Future ──┬── answer
       ^                                                  └── error ── again? ── after a pause ──┐
       '─────────────────────────────────────────────────────────────────────────────────────────┘

Nothing here waits: pauses are kept by the one who waits for the answers (`gathering.py`), so a mixture has no threads.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from weft.core.errors import UsageError
from weft.experts.client.connections import Connections
from weft.experts.client.retry import Retry
from weft.experts.client.route import DirectoryRoute
from weft.experts.compression import Compression, Policy, Role
from weft.experts.wire import Call, DeadlineError, Header, Kind, Received


@dataclass(frozen=True, slots=True)
class Request:
    """One call of one expert, to be answered by ``deadline`` (time of `time.monotonic`)."""

    call: Call
    deadline: float

    @property
    def uid(self) -> str:
        """Which expert."""
        return self.call.header.uid


@dataclass(frozen=True)
class Calls:
    """How the calls of a mixture are made and sent again."""

    connections: Connections
    retry: Retry
    compression: Policy

    def info(self, uid: str, deadline: float) -> Request:
        """What the expert takes and returns."""
        return Request(Call(Header(kind=Kind.INFO, call_id=0, uid=uid)), deadline)

    def forward(self, uid: str, inputs: Sequence[Tensor], outputs: int, deadline: float) -> Request:
        """Flat inputs, answered by so many flat outputs."""
        header = Header(kind=Kind.FORWARD, call_id=0, uid=uid, reply=self._reply("outputs", outputs))
        return Request(Call(header, list(inputs), self.compression.choose("inputs", len(inputs))), deadline)

    def backward(
        self, uid: str, inputs: Sequence[Tensor], gradients: Sequence[Tensor], key: str, deadline: float
    ) -> Request:
        """Flat inputs and one gradient per flat output, answered by one gradient per flat input."""
        reply = self._reply("input_gradients", len(inputs))
        header = Header(kind=Kind.BACKWARD, call_id=0, uid=uid, key=key, reply=reply)
        how = self.compression.choose("inputs", len(inputs))
        how = [*how, *self.compression.choose("output_gradients", len(gradients))]
        return Request(Call(header, [*inputs, *gradients], how), deadline)

    def begin(self, request: Request, attempt: int, last: BaseException | None) -> "Future[Received]":
        """Send it. What goes wrong, also at once, comes as the future's error."""
        try:
            left = request.deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"expert {request.uid!r} found no time to be asked")
            seconds = left if self.retry.attempt_seconds is None else min(left, self.retry.attempt_seconds)
            transport = DirectoryRoute(request.uid, self.connections).transport(attempt, last)
            return transport.submit(request.call, seconds)
        except Exception as error:
            failed: Future[Received] = Future()
            failed.set_exception(error)
            return failed

    def _reply(self, role: Role, count: int) -> Compression:
        chosen = set(self.compression.choose(role, count))
        if len(chosen) > 1:
            raise UsageError(f"a mixture asks for all {role} in one compression, and the policy names {len(chosen)}")
        return chosen.pop() if chosen else Compression.NONE
