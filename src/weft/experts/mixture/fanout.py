"""Fan-out: calls of many experts at once, and the wait for a quorum of answers. Nothing outlives it.

    calls    A ────────────answer
             B ──error  retry──error                 A, C: a quorum for every sample (k_min)
             C ─────────────────answer |             D: cancelled, its rows count as failed
             D ────────────────────────|·····
                                       '── timeout_after_k_min ──'

An answer counts for the samples that are in it, as far as ``accept`` of its call lets it: one of another shape is a
failure of its expert, a row that is not finite is one of that row. Whoever waits also keeps the pauses before retries,
so a mixture has no threads.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from queue import Empty, SimpleQueue
from typing import Literal, Never

import torch
from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.core.rng import waiting
from weft.core.validation import Validator, is_whole
from weft.experts.client.remote_function import RecomputeCache
from weft.experts.client.retry import LOOK, DirectoryResolver, Retry, RetryState
from weft.experts.client.stub import ExpertProgress, IdempotencyKey, PendingCommit, RequestBuilder, Signature
from weft.experts.client.transport import Connections
from weft.experts.discovery import Snapshot
from weft.experts.errors import (
    AnomalyError,
    CommitError,
    DeadlineError,
    InputsGoneError,
    LostError,
    NoExpertsError,
    StepsLostWarning,
    TooFewAnswersError,
    UnreachableError,
    reason_of,
)
from weft.experts.mixture.routing import Grid, LiveExperts, RowSpan
from weft.experts.wire import Call, Received
from weft.experts.wire.service import Description, Receipt, read_description, read_receipt

_ASKED = 8  # experts that are asked for their description at the same time, at different addresses if possible
_HINT = 30.0  # seconds after which a hint without an answer is dropped
_LISTED = 10  # faults that a message lists; there may be as many as experts
Direction = Literal["forward", "backward", "commit"]


@dataclass(frozen=True)
class MixtureOptions:
    """See `RemoteMixtureOfExperts`. Seconds and counts."""

    k_best: int
    k_min: int
    backward_k_min: int
    forward_timeout: float
    backward_timeout: float
    timeout_after_k_min: float | None
    detect_anomalies: bool
    allow_zero_outputs: bool

    def steps_wanted(self, touched: int) -> int:
        """How many of so many experts must step at a commit: all, if none may be missing in backward; else one."""
        if self.allow_zero_outputs or self.backward_k_min == 0:
            return 0
        return touched if self.backward_k_min == self.k_best else min(1, touched)

    def check(self, check: Validator, places: int | None = None) -> None:
        """Check them, for a grid of so many places."""
        most = self.k_best if check.count("k_best", self.k_best) else None
        for name in ("k_min", "backward_k_min"):
            value = getattr(self, name)
            valid = is_whole(value) and value >= 0 and (most is None or value <= most)
            if check.that(valid, f"{name} is {value!r}, wanted an int from 0 to k_best ({self.k_best!r})"):
                fits = name != "k_min" or places is None or value <= places
                check.that(fits, f"k_min is {value}, but the grid has only {places} experts")
        check.seconds("forward_timeout", self.forward_timeout)
        check.seconds("backward_timeout", self.backward_timeout)
        check.seconds("timeout_after_k_min", self.timeout_after_k_min, zero=True, optional=True)
        check.boolean("detect_anomalies", self.detect_anomalies)
        check.boolean("allow_zero_outputs", self.allow_zero_outputs)


class MixtureSignature(Signature):
    """A signature whose outputs can be averaged. Raises ``UsageError`` that lists those that cannot."""

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        faults = [
            f"{name} is of {spec.dtype}, wanted floating-point or complex numbers, which have a weighted mean"
            for name, spec in zip(self.outputs.names, self.outputs.specs, strict=True)
            if not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        ]
        if faults:
            raise UsageError(listed(f"expert {description.name!r} cannot be part of a mixture:", faults))

    def output_sizes(self, inputs: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
        """Each output's sizes beyond the batch axis; free ones from the first input of such a spec, else None."""
        shapes = {spec.shape: tuple(x.shape) for spec, x in reversed([*zip(self.inputs.specs, inputs, strict=True)])}
        found: list[tuple[int, ...] | None] = []
        for spec in self.outputs.specs:
            inner = [size for size in spec.shape[1:] if size is not None]
            like = shapes.get(spec.shape)
            known = tuple(inner) if len(inner) == len(spec.shape) - 1 else None
            found.append(known if like is None else like[1:])
        return found


@dataclass(frozen=True)
class CachedCall:
    """A forward that will be recomputed: ``chosen`` (samples x k) of the ``live`` experts, which of them answered
    (``alive``: samples x k, bool), their ``answers`` (each samples x k x ...), and the keys of the calls."""

    live: LiveExperts
    chosen: Tensor
    alive: Tensor
    answers: Sequence[Tensor]
    keys: dict[RowSpan, IdempotencyKey]


@dataclass(frozen=True)
class MixtureCall:
    """One call of a mixture, before it is routed: the experts to choose from, and the forward that it recomputes."""

    signature: MixtureSignature
    live: LiveExperts
    deadline: float
    cached: CachedCall | None


class ExpertPool:
    """The experts of a grid, as the directory knows them, and the calls to them; shared by copies. Thread-safe."""

    def __init__(
        self, grid: Grid, connections: Connections, retry: Retry, requests: RequestBuilder, options: MixtureOptions
    ) -> None:
        self.grid, self.connections, self.options = grid, connections, options
        self.retry, self.requests = retry, requests
        self.progress: dict[str, ExpertProgress] = {}
        self.counters, self.cache = MixtureCounters(), RecomputeCache[CachedCall]()
        self._known: tuple[Snapshot, LiveExperts] | None = None
        self._signature: MixtureSignature | None = None

    def resolver(self, uid: str) -> DirectoryResolver:
        """How the expert is reached."""
        return DirectoryResolver(uid, self.connections)

    def begin(self, call: Call, deadline: float, attempts: RetryState) -> "Future[Received]":
        """Send it, to be answered by ``deadline``. What fails, also at once, is the future's error."""
        try:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"no time was left to call expert {call.header.uid!r}")
            seconds = left if self.retry.attempt_seconds is None else min(left, self.retry.attempt_seconds)
            return attempts.submit(call, seconds, self.resolver(call.header.uid))
        except Exception as error:
            failed: Future[Received] = Future()
            failed.set_exception(error)
            return failed

    def accept(self, uid: str, answer: Received) -> Receipt:
        """Note the progress that an answer bears, and return its receipt. Raises ``NotOwnerError``."""
        progress = self.progress.get(uid)
        if progress is None:
            progress = self.progress.setdefault(uid, ExpertProgress(uid, self.resolver(uid)))
        progress.accept(answer)
        return read_receipt(answer.header.data)

    def discard(self, mini_batches: Mapping[str, PendingCommit]) -> None:
        """Tell the servers to drop these. No answer is waited for: it is a hint."""
        for uid, each in mini_batches.items():
            self.begin(self.requests.discard(uid, each.name), time.monotonic() + _HINT, RetryState())

    def live(self) -> LiveExperts:
        """The living experts, as far as is known. Calls none of them."""
        snapshot, known = self.connections.snapshot(), self._known
        if known is None or known[0] is not snapshot:
            known = (snapshot, self.grid.live(snapshot))
            self._known = known
        return known[1]

    def signature(self, live: LiveExperts, deadline: float) -> MixtureSignature:
        """What the experts take and return; all of a grid are alike. The first call takes the first answer of some."""
        if self._signature is None:
            if not len(live):
                raise self.no_experts()
            self._signature = MixtureSignature(self._described(live, deadline))
        return self._signature

    def no_experts(self) -> NoExpertsError:
        """The error for a grid without experts."""
        return NoExpertsError(f"the directory lists no living expert of the grid {self.grid.prefix}*")

    def __deepcopy__(self, memo: object) -> "ExpertPool":
        return self

    def __reduce__(self) -> Never:
        raise UsageError("a remote mixture holds connections, which cannot be pickled: save its state_dict()")

    def _described(self, live: LiveExperts, deadline: float) -> Description:
        snapshot, found = self.connections.snapshot(), list[Description]()
        by_address = {snapshot.addresses(uid)[:1]: uid for uid in reversed(live.uids)}
        uids = list(dict.fromkeys([*by_address.values(), *live.uids[:_ASKED]]))[:_ASKED]

        def accept(answer: Received) -> None:
            found.append(read_description(answer.header.data))

        sample = torch.zeros(1, dtype=torch.int64, device="cpu")
        calls = [ExpertCall(self.requests.info(uid), sample, accept) for uid in uids]
        FanOut(self, calls, torch.ones_like(sample), deadline=deadline, after=0.0).run()
        if not found:
            what = f"{len(uids)} experts of a mixture were asked for their description"
            raise too_few_answers(what, 1, 1, 1, faults_of(calls), self.retry)
        return found[0]


@dataclass(eq=False, slots=True)
class ExpertCall:
    """One call of a fan-out. ``fault``: what became of it, where it or some of its rows failed.

    Args:
        samples: that its rows belong to, int64.
        accept: takes the answer. Returns which of its rows are good (bool), None for all. Raises what is wrong.
        whole: what to send in its place where the server lacks the inputs that the call left out.
    """

    call: Call
    samples: Tensor
    accept: Callable[[Received], Tensor | None]
    whole: Call | None = None
    fault: BaseException | None = None
    attempts: RetryState = field(default_factory=RetryState)


def faults_of(calls: Iterable[ExpertCall]) -> dict[str, BaseException]:
    """Of the calls that failed, by expert."""
    return {each.call.header.uid: each.fault for each in calls if each.fault is not None}


class FanOut:
    """Calls of many experts at once. After `run`: ``counts`` of good answers by sample (int64), and the calls' faults.

    Args:
        needed: how many answers each sample needs, int64.
        deadline: until when to wait, as a time of `time.monotonic`.
        after: seconds to wait from when every sample has enough answers; None: until the deadline.
        lenient: samples that do not get enough are no error, so the others' answers are waited for all the same.
    """

    def __init__(
        self,
        client: ExpertPool,
        calls: Sequence[ExpertCall],
        needed: Tensor,
        *,
        deadline: float,
        after: float | None = None,
        lenient: bool = True,
    ) -> None:
        self.counts = torch.zeros_like(needed)
        self._client, self._calls, self._needed = client, calls, needed
        self._deadline, self._after, self._lenient = deadline, after, lenient
        self._ended: SimpleQueue[tuple[ExpertCall, int]] = SimpleQueue()  # with the number of the attempt
        self._futures: dict[ExpertCall, Future[Received]] = {}
        self._pauses: dict[ExpertCall, float] = {}  # calls that will be sent again, and when
        self._possible = torch.zeros_like(needed)  # answers that a sample has or may still get
        for each in calls:
            self._possible.index_add_(0, each.samples, torch.ones_like(each.samples))

    def run(self) -> "FanOut":
        """Make the calls, and wait for a quorum."""
        try:
            with waiting():
                for each in self._calls:
                    self._begin(each)
                self._wait_for_quorum()
        finally:
            for future in self._futures.values():
                future.cancel()
            self._futures.clear()
        return self

    def _begin(self, call: ExpertCall) -> None:
        future = self._futures[call] = self._client.begin(call.call, self._deadline, call.attempts)
        attempt = call.attempts.count
        future.add_done_callback(lambda _: self._ended.put((call, attempt)))

    def _wait_for_quorum(self) -> None:
        start, end = time.monotonic(), self._deadline
        enough = False
        while self._futures or self._pauses:
            impossible = self._possible < self._needed
            if not self._lenient and bool(impossible.any()):
                break
            if not enough and bool(((self.counts >= self._needed) | impossible).all()):
                enough = True
                if self._after is not None:
                    end = min(end, time.monotonic() + self._after)
            call = self._wait(end)
            if call is not None:
                self._end(call)
            elif time.monotonic() >= end:
                break
        waited = time.monotonic() - start
        for call in [*self._futures, *self._pauses]:
            late = DeadlineError(f"no answer within {waited:.3g} s, when the wait ended")
            call.fault = call.attempts.last or late

    def _wait(self, end: float) -> ExpertCall | None:
        """A call that ended; None at ``end``, or when it was time for retries, which are sent here."""
        now = time.monotonic()
        until = min(end, now + LOOK, min(self._pauses.values(), default=end))
        try:
            call, attempt = self._ended.get(timeout=max(0.0, until - now))
            # An attempt that `_follow_owners` cancelled has ended before. The call has gone on since, or has failed.
            return call if call in self._futures and attempt == call.attempts.count else None
        except Empty:
            self._send_due(time.monotonic())
            self._follow_owners()
            return None

    def _send_due(self, now: float) -> None:
        for call in [call for call, at in self._pauses.items() if at <= now]:
            del self._pauses[call]
            self._begin(call)

    def _follow_owners(self) -> None:
        """End the calls whose expert has another owner by now; they are sent again, to that one."""
        for call, future in list(self._futures.items()):
            try:
                call.attempts.check_owner(call.call, self._client.resolver(call.call.header.uid))
            except LostError as error:
                if not future.done():
                    future.cancel()
                    self._end(call, error)

    def _end(self, call: ExpertCall, fault: Exception | None = None) -> None:
        """Take the answer of a call, or its error, or this ``fault``."""
        future, rows = self._futures.pop(call), call.samples
        try:
            if fault is not None:
                raise fault
            good = call.accept(future.result(timeout=0))
        except StepsLostWarning:  # which the user has turned into an error of the whole call
            raise
        except Exception as error:
            error.__traceback__ = None  # it holds this frame, and with it all tensors of the calls
            if self._retried(call, error):
                return
            call.fault = error
            good = torch.zeros_like(rows, dtype=torch.bool)
        ones = torch.ones_like(rows) if good is None else good.to(rows.dtype)
        self.counts.index_add_(0, rows, ones)
        if good is not None:
            self._possible.index_add_(0, rows, ones - 1)
            bad = len(rows) - int(ones.sum())
            call.fault = call.fault or AnomalyError(f"{bad} of {len(rows)} rows are not finite")

    def _retried(self, call: ExpertCall, error: Exception) -> bool:
        """Whether a call is sent again: at once with its inputs, or after a pause."""
        if isinstance(error, InputsGoneError) and call.whole is not None:
            call.call, call.whole = call.whole, None
            self._begin(call)
            return True
        resolver = self._client.resolver(call.call.header.uid)
        pause = call.attempts.failed(error, self._client.retry, resolver, self._deadline)
        if pause is None:
            return False
        self._pauses[call] = time.monotonic() + pause
        return True


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

    ``failed`` counts calls without a good answer, and those with bad rows, by reason. ``dropped`` are pairs (sample,
    expert) beyond the capacity; ``zeroed`` samples with too few answers; ``left_out`` experts that a commit went on
    without; ``living`` experts in the directory's last snapshot.

    Example:
        >>> sizes = {"in_features": 8, "grid_size": [2], "uid_prefix": "ffn"}
        >>> weft.RemoteMixtureOfExperts(**sizes, connections=weft.Connections({})).statistics().forwards
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

    def fanned_out(self, direction: Direction, calls: Sequence[ExpertCall]) -> None:
        """Count one fan-out."""
        rows = 0 if direction == "commit" else sum(len(each.samples) for each in calls)
        with self._lock:
            self._counts.update({f"{direction}s": 1, f"{direction}_calls": len(calls), "rows": rows})
            self._failed.update(reason_of(each.fault) for each in calls if each.fault is not None)

    def count(self, what: Literal["dropped", "zeroed", "left_out"], many: int) -> None:
        """Count pairs, samples or experts."""
        with self._lock:
            self._counts[what] += many

    def statistics(self, living: int) -> MixtureStatistics:
        """All of them, where so many experts live."""
        names = {each.name for each in fields(MixtureStatistics)} - {"failed", "living"}
        with self._lock:
            counts = {name: self._counts[name] for name in names}
            return MixtureStatistics(**counts, failed=dict(self._failed), living=living)
