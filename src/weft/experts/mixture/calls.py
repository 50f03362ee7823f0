"""The calls of a mixture: begun at once, watched by whoever waits, and sent again by the one rule of all clients.

    Request ── route ──> transport ── submit ──> Future ──┬── answer
       ^                                                  └── error ── again? ── after a pause ──┐
       '─────────────────────────────────────────────────────────────────────────────────────────┘

What steps an expert bears a fencing token, and no answer of an owner that was replaced is taken; see
`weft.experts.client.stub`. Nothing here waits: pauses are kept by the one who waits for the answers
(`gathering.py`), so a mixture has no threads.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from weft.experts.client.connections import Connections, DirectoryResolver
from weft.experts.client.retry import Retry
from weft.experts.client.stub import ExpertProgress, OpenMiniBatch, RequestBuilder
from weft.experts.errors import DeadlineError
from weft.experts.wire import Call, Received
from weft.experts.wire.service import Receipt, read_receipt

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
    """How the calls of a mixture are built, sent and retried. ``progress``: of the experts that have answered."""

    connections: Connections
    retry: Retry
    requests: RequestBuilder
    progress: dict[str, ExpertProgress] = field(default_factory=dict[str, ExpertProgress])

    def token(self, uid: str) -> int:
        """The fencing token of an expert's owner."""
        return self._resolver(uid).token()

    def discard(self, mini_batches: Mapping[str, OpenMiniBatch]) -> None:
        """Tell the servers to drop these. No answer is waited for: it is a hint."""
        for uid, each in mini_batches.items():
            name = each.give_up()
            if name is not None:
                self.begin(Request(self.requests.discard(uid, name), time.monotonic() + _HINT), 0, None)

    def begin(self, request: Request, attempt: int, last: BaseException | None) -> "Future[Received]":
        """Send it. What fails, also at once, is the future's error."""
        try:
            left = request.deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"no time was left to call expert {request.uid!r}")
            seconds = left if self.retry.attempt_seconds is None else min(left, self.retry.attempt_seconds)
            return self._resolver(request.uid).transport(attempt, last).submit(request.call, seconds)
        except Exception as error:
            failed: Future[Received] = Future()
            failed.set_exception(error)
            return failed

    def takeover_expected(self, request: Request, error: BaseException) -> bool:
        """See `Resolver.takeover_expected`: then the attempt does not count."""
        return self._resolver(request.uid).takeover_expected(error)

    def accept(self, uid: str, answer: Received) -> Receipt:
        """Note the progress that an answer tells, and return its receipt. Raises ``NotOwnerError``."""
        progress = self.progress.get(uid)
        if progress is None:
            progress = self.progress.setdefault(uid, ExpertProgress(uid, self._resolver(uid)))
        progress.accept(answer)
        return read_receipt(answer.header.data)

    def _resolver(self, uid: str) -> DirectoryResolver:
        return DirectoryResolver(uid, self.connections)
