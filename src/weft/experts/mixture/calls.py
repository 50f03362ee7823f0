"""The calls of a mixture: begun at once, watched by whoever waits, and sent again by the one rule of all clients.

    Request ── route ──> transport ── submit ──> Future ──┬── answer
       ^                                                  └── error ── again? ── after a pause ──┐
       '─────────────────────────────────────────────────────────────────────────────────────────┘

What steps an expert bears a fencing token, and no answer of an owner that was replaced is taken; see
`weft.experts.client.fencing`. Nothing here waits: pauses are kept by the one who waits for the answers
(`gathering.py`), so a mixture has no threads.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.core.errors import UsageError
from weft.experts.client.accumulation import Accumulation
from weft.experts.client.connections import Connections
from weft.experts.client.fencing import fence, fenced
from weft.experts.client.key import Key
from weft.experts.client.progress import Progress
from weft.experts.client.retry import Retry
from weft.experts.client.route import DirectoryRoute
from weft.experts.compression import Compression, Policy, Role
from weft.experts.wire import Call, DeadlineError, Header, Kind, Received
from weft.experts.wire.service import Receipt

_HINT = 30.0  # seconds after which a hint that had no answer is forgotten


@dataclass(frozen=True, slots=True)
class Request:
    """One call of one expert, to be answered by ``deadline`` (time of `time.monotonic`).

    ``whole``: to be sent in its place where the server lacks the inputs that the call left out.
    """

    call: Call
    deadline: float
    whole: Call | None = None

    @property
    def uid(self) -> str:
        """Which expert."""
        return self.call.header.uid


@dataclass(frozen=True)
class Calls:
    """How the calls of a mixture are made and sent again. ``progress`` is what their answers told, by expert."""

    connections: Connections
    retry: Retry
    compression: Policy
    client: str
    progress: dict[str, Progress] = field(default_factory=dict[str, Progress])

    def info(self, uid: str, deadline: float) -> Request:
        """What the expert takes and returns."""
        return Request(Call(self._header(Kind.INFO, uid)), deadline)

    def forward(self, uid: str, inputs: Sequence[Tensor], outputs: int, key: Key, deadline: float) -> Request:
        """Flat inputs, answered by so many flat outputs."""
        header = key.forward(self._header(Kind.FORWARD, uid, reply=self._reply("outputs", outputs)))
        return Request(Call(header, list(inputs), self.compression.choose("inputs", len(inputs))), deadline)

    def backward(
        self,
        uid: str,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        key: Key,
        mini_batch: str,
        deadline: float,
    ) -> Request:
        """Flat inputs and one gradient per flat output, answered by one gradient per flat input.

        The expert steps, once for this key; or adds to its ``mini_batch``, if that has a name.
        """
        header = self._header(
            Kind.BACKWARD,
            uid,
            mini_batch=mini_batch,
            reply=self._reply("input_gradients", len(inputs)),
            data=fence(self._route(uid)),
        )
        call, whole = key.backward(header, inputs, gradients, self.compression)
        return Request(call, deadline, whole)

    def commit(self, uid: str, mini_batch: str, incarnation: int, deadline: float) -> Request:
        """One step with the sum of this mini-batch, which the server has if it is still of this incarnation."""
        data = fence(self._route(uid), incarnation)
        return Request(Call(self._header(Kind.COMMIT, uid, key=mini_batch, mini_batch=mini_batch, data=data)), deadline)

    def discard(self, sums: Mapping[str, Accumulation]) -> None:
        """Tell the servers that these are not wanted any more. No answer is waited for: it is a hint."""
        for uid, each in sums.items():
            name = each.give_up()
            if name is not None:
                header = self._header(Kind.DISCARD, uid, mini_batch=name)
                self.begin(Request(Call(header), time.monotonic() + _HINT), 0, None)

    def begin(self, request: Request, attempt: int, last: BaseException | None) -> "Future[Received]":
        """Send it. What goes wrong, also at once, comes as the future's error."""
        try:
            left = request.deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"expert {request.uid!r} found no time to be asked")
            seconds = left if self.retry.attempt_seconds is None else min(left, self.retry.attempt_seconds)
            return self._route(request.uid).transport(attempt, last).submit(request.call, seconds)
        except Exception as error:
            failed: Future[Received] = Future()
            failed.set_exception(error)
            return failed

    def hopeful(self, request: Request, error: BaseException) -> bool:
        """Whether, after this error, somebody is sure to answer soon: then the attempt does not count."""
        return self._route(request.uid).hopeful(error)

    def heard(self, uid: str, answer: Received) -> Receipt:
        """What an answer says beside its tensors, which is kept. Raises ``NotOwnerError``; see `fenced`."""
        route = self._route(uid)
        receipt = fenced(uid, route, answer)
        progress = self.progress.get(uid)
        if progress is None:
            progress = self.progress.setdefault(uid, Progress(uid, lambda: route.transport(0, None).address))
        progress.heard(answer.header.step, receipt)
        return receipt

    def _route(self, uid: str) -> DirectoryRoute:
        return DirectoryRoute(uid, self.connections)

    def _header(self, kind: Kind, uid: str, **more: Any) -> Header:
        return Header(kind=kind, call_id=0, uid=uid, client=self.client, **more)

    def _reply(self, role: Role, count: int) -> Compression:
        chosen = set(self.compression.choose(role, count))
        if len(chosen) > 1:
            raise UsageError(f"a mixture asks for all {role} in one compression, and the policy names {len(chosen)}")
        return chosen.pop() if chosen else Compression.NONE
