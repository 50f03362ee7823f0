"""Fan-out: calls of many experts at once, and the wait for a quorum of answers. Nothing outlives it.

    calls    A ────────────answer
             B ──error  retry──error                 A, C: a quorum for every sample (k_min)
             C ─────────────────answer |             D: cancelled, its rows count as failed
             D ────────────────────────|·····
                                       '── timeout_after_k_min ──'

An answer counts for the samples that are in it, and only as far as `Accept` lets it: an answer of another shape is a
failure of its expert, a row that is not finite is one of that row. If some sample cannot get enough answers any more,
waiting for the others makes sense only if that is no error. Whoever waits also keeps the pauses before retries, so a
mixture has no threads.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from typing import Literal

import torch
from torch import Tensor

from weft.core.errors import listed
from weft.core.rng import waiting
from weft.experts.client.connections import Connections
from weft.experts.client.retry import DirectoryResolver, Retry
from weft.experts.client.stub import ExpertProgress, OpenMiniBatch, RequestBuilder
from weft.experts.errors import (
    AnomalyError,
    CommitError,
    DeadlineError,
    InputsGoneError,
    StepsLostWarning,
    TooFewAnswersError,
    UnreachableError,
    reason_of,
)
from weft.experts.wire import Call, Received
from weft.experts.wire.service import Receipt, read_receipt

_HINT = 30.0  # seconds after which a hint without an answer is dropped
_LISTED = 10  # faults that a message lists; there may be as many as experts

Accept = Callable[[int, Received], Tensor | None]
"""Takes the answer of call i. Returns which of its rows are good (bool), None for all. Raises what is wrong."""
Direction = Literal["forward", "backward", "commit"]


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """One call of one expert, to be answered by ``deadline`` (time of `time.monotonic`).

    ``whole``: to be sent in its place where the server lacks the inputs that the call left out.
    """

    call: Call
    deadline: float
    whole: Call | None = None

    @property
    def uid(self) -> str:
        """Of the expert."""
        return self.call.header.uid


@dataclass(frozen=True)
class AsyncCaller:
    """How a mixture builds and sends calls, without waiting. ``progress``: of the experts that have answered."""

    connections: Connections
    retry: Retry
    requests: RequestBuilder
    progress: dict[str, ExpertProgress] = field(default_factory=dict[str, ExpertProgress])

    def token(self, uid: str) -> int:
        """The fencing token of an expert's owner."""
        return self._resolver(uid).token()

    def begin(self, request: ExpertRequest, attempt: int, last: BaseException | None) -> "Future[Received]":
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

    def takeover_expected(self, request: ExpertRequest, error: BaseException) -> bool:
        """See `Resolver.takeover_expected`: then the attempt does not count."""
        return self._resolver(request.uid).takeover_expected(error)

    def accept(self, uid: str, answer: Received) -> Receipt:
        """Note the progress that an answer bears, and return its receipt. Raises ``NotOwnerError``."""
        progress = self.progress.get(uid)
        if progress is None:
            progress = self.progress.setdefault(uid, ExpertProgress(uid, self._resolver(uid)))
        progress.accept(answer)
        return read_receipt(answer.header.data)

    def discard(self, mini_batches: Mapping[str, OpenMiniBatch]) -> None:
        """Tell the servers to drop these. No answer is waited for: it is a hint."""
        for uid, each in mini_batches.items():
            name = each.give_up()
            if name is not None:
                self.begin(ExpertRequest(self.requests.discard(uid, name), time.monotonic() + _HINT), 0, None)

    def _resolver(self, uid: str) -> DirectoryResolver:
        return DirectoryResolver(uid, self.connections)


@dataclass(frozen=True, slots=True)
class QuorumTimeout:
    """How long to wait: until ``deadline``, or ``after`` seconds from when every sample has enough answers.

    ``lenient``: samples that do not get enough are no error, so the others' answers are waited for all the same.
    """

    deadline: float
    after: float | None
    lenient: bool


@dataclass(slots=True)
class QuorumResult:
    """The number of good answers by sample (int64), and faults by call."""

    counts: Tensor
    faults: dict[int, BaseException] = field(default_factory=dict[int, BaseException])


def fan_out(
    caller: AsyncCaller,
    requests: Sequence[ExpertRequest],
    samples: Sequence[Tensor],
    needed: Tensor,
    timeout: QuorumTimeout,
    accept: Accept,
) -> QuorumResult:
    """Make these calls at once, and wait for a quorum.

    Args:
        samples: for each call the samples that its rows belong to, int64.
        needed: how many answers each sample needs, int64.
        accept: called in this thread, once for each answer.
    """
    running = _FanOut(caller, requests, samples, needed, timeout, accept)
    try:
        with waiting():
            for index in range(len(requests)):
                running.begin(index)
            running.run()
    finally:
        running.cancel()
    return running.result


class _FanOut:
    """The calls of one `fan_out`: those in flight, and those that pause before a retry."""

    def __init__(
        self,
        caller: AsyncCaller,
        requests: Sequence[ExpertRequest],
        samples: Sequence[Tensor],
        needed: Tensor,
        timeout: QuorumTimeout,
        accept: Accept,
    ) -> None:
        self.result = QuorumResult(torch.zeros_like(needed))
        self._caller, self._requests, self._accept = caller, list(requests), accept
        self._samples, self._needed, self._timeout = samples, needed, timeout
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._futures: dict[int, Future[Received]] = {}
        self._pauses: list[tuple[float, int]] = []
        self._attempts = [0] * len(requests)
        self._counted = [0] * len(requests)
        self._last: list[Exception | None] = [None] * len(requests)
        self._possible = torch.zeros_like(needed)  # answers that a sample has or may still get
        for rows in samples:
            self._possible.index_add_(0, rows, torch.ones_like(rows))

    def begin(self, index: int) -> None:
        future = self._caller.begin(self._requests[index], self._attempts[index], self._last[index])
        self._futures[index] = future
        future.add_done_callback(lambda _: self._ended.put(index))

    def run(self) -> None:
        start, end = time.monotonic(), self._timeout.deadline
        enough = False
        while self._futures or self._pauses:
            impossible = self._possible < self._needed
            if not self._timeout.lenient and bool(impossible.any()):
                break
            if not enough and bool(((self.result.counts >= self._needed) | impossible).all()):
                enough = True
                if self._timeout.after is not None:
                    end = min(end, time.monotonic() + self._timeout.after)
            index = self._wait(end)
            if index is not None:
                self._end(index)
            elif time.monotonic() >= end:
                break
        waited = time.monotonic() - start
        for index in [*self._futures, *(index for _, index in self._pauses)]:
            late = DeadlineError(f"no answer within {waited:.3g} s, when the wait ended")
            self.result.faults[index] = self._last[index] or late

    def cancel(self) -> None:
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()

    def _wait(self, end: float) -> int | None:
        """A call that ended; None at ``end``, or when it was time for retries, which are sent here."""
        until = min(end, self._pauses[0][0]) if self._pauses else end
        try:
            return self._ended.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            while self._pauses and self._pauses[0][0] <= time.monotonic():
                self.begin(heappop(self._pauses)[1])
            return None

    def _end(self, index: int) -> None:
        future, rows = self._futures.pop(index), self._samples[index]
        try:
            good = self._accept(index, future.result(timeout=0))
        except StepsLostWarning:  # which the user has turned into an error of the whole call
            raise
        except Exception as error:
            error.__traceback__ = None  # it holds this frame, and with it all tensors of the calls
            if self._retried(index, error):
                return
            self.result.faults[index] = error
            good = torch.zeros_like(rows, dtype=torch.bool)
        ones = torch.ones_like(rows) if good is None else good.to(rows.dtype)
        self.result.counts.index_add_(0, rows, ones)
        if good is not None:
            self._possible.index_add_(0, rows, ones - 1)
            bad = len(rows) - int(ones.sum())
            self.result.faults.setdefault(index, AnomalyError(f"{bad} of {len(rows)} rows are not finite"))

    def _retried(self, index: int, error: Exception) -> bool:
        """Whether a call is sent again; then its pause begins."""
        whole, deadline = self._requests[index].whole, self._requests[index].deadline
        if isinstance(error, InputsGoneError) and whole is not None:
            self._requests[index] = ExpertRequest(whole, deadline)
            self.begin(index)
            return True
        self._attempts[index] += 1
        self._last[index] = error
        takeover = self._caller.takeover_expected(self._requests[index], error)
        self._counted[index] = 1 if takeover else self._counted[index] + 1
        retry = self._caller.retry
        at = time.monotonic() + retry.pause(self._attempts[index])
        if at >= self._timeout.deadline or not retry.again(error, self._counted[index]):
            return False
        heappush(self._pauses, (at, index))
        return True


def too_few_live(living: int, needed: int) -> TooFewAnswersError:
    """The error where every sample needs more answers than there are experts. Nothing was sent."""
    return TooFewAnswersError(
        f"forward of a mixture: every sample needs {needed} answers (k_min), but the directory lists only {living} "
        "living experts of the grid. Start more, need fewer (k_min), or let such samples be zero (allow_zero_outputs)."
    )


def too_few_answers(
    what: str, samples: int, short: int, needed: int, faults: Mapping[str, BaseException], retry: Retry
) -> TooFewAnswersError:
    """The error for ``short`` of ``samples`` that have fewer than ``needed`` answers, under this rule of retries."""
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in list(faults.items())[:_LISTED]]
    lines += [f"and {len(faults) - _LISTED} more"] * (len(faults) > _LISTED)
    head = (
        f"{what}: {short} of {samples} samples have fewer than {needed} answers. Wait longer, call more experts "
        "(k_best), need fewer (k_min), or let such samples be zero (allow_zero_outputs)."
    )
    if any(isinstance(error, CommitError) for error in faults.values()):
        head += " Where a mini-batch has ended, as by a commit that was interrupted, discard() begins a new one."
    away = bool(faults) and all(isinstance(error, UnreachableError) for error in faults.values())
    if away and retry.attempts is not None:
        head += " Where servers are restarting, retry=Retry() waits for them, until the timeout of the call."
    return TooFewAnswersError(listed(f"{head} Failed:", lines) if lines else head, faults)


@dataclass(frozen=True)
class MixtureStatistics:
    """Figures since the mixture was made.

    ``failed`` counts calls without a good answer, and those with bad rows, by `weft.experts.errors.reason_of`.
    ``dropped`` are pairs (sample, expert) beyond the capacity; ``zeroed`` samples with too few answers; ``left_out``
    experts that a commit went on without; ``living`` experts in the directory's last snapshot.

    Example:
        >>> with weft.Connections({}) as connections:
        ...     sizes = {"in_features": 8, "grid_size": [2], "uid_prefix": "ffn"}
        ...     mixture = weft.RemoteMixtureOfExperts(**sizes, connections=connections)
        ...     mixture.statistics().forwards
        0
    """

    forwards: int
    backwards: int
    commits: int
    forward_calls: int
    backward_calls: int
    commit_calls: int
    rows: int
    failed: dict[str, int]
    dropped: int
    zeroed: int
    left_out: int
    living: int


class MixtureCounters:
    """The counters behind `MixtureStatistics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def fanned_out(self, direction: Direction, calls: int, rows: int, faults: Iterable[BaseException]) -> None:
        """Count one fan-out."""
        with self._lock:
            self._counts.update({f"{direction}s": 1, f"{direction}_calls": calls, "rows": rows})
            self._failed.update(reason_of(fault) for fault in faults)

    def count(self, what: Literal["dropped", "zeroed", "left_out"], many: int) -> None:
        """Count pairs, samples or experts."""
        with self._lock:
            self._counts[what] += many

    def statistics(self, living: int) -> MixtureStatistics:
        """All of them."""
        names = {each.name for each in fields(MixtureStatistics)} - {"failed", "living"}
        with self._lock:
            counts = {name: self._counts[name] for name in names}
            return MixtureStatistics(**counts, failed=dict(self._failed), living=living)
