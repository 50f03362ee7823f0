"""Fan-out: concurrent calls of many experts, and the wait for a quorum of answers.

    calls    A ────────────answer
             B ──error  retry──error                 A, C: a quorum for every sample (k_min)
             C ─────────────────answer |             D: cancelled, its rows count as failed
             D ────────────────────────|·····
                                       '── timeout_after_k_min ──'

An answer counts for its samples, unless ``accept`` of its call rejects it: an answer of another shape is a failure of
the expert, a row that is not finite a failure of that row. A pool with one blocking call per thread would need as many
threads as experts, and could not cancel the late ones.
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

from torchweft.core.errors import UsageError, escape, join_faults
from torchweft.core.rng import lock_released
from torchweft.core.validation import Validator, is_whole
from torchweft.experts import errors
from torchweft.experts.client.remote_function import RecomputeCache
from torchweft.experts.client.retry import LOOK, DirectoryResolver, Retry, RetryState
from torchweft.experts.client.stub import ExpertProgress, IdempotencyKey, PendingCommit, RequestBuilder, Signature
from torchweft.experts.client.transport import Connections
from torchweft.experts.discovery import Snapshot
from torchweft.experts.mixture.routing import Grid, LiveExperts, RowSpan
from torchweft.experts.wire import Call, Received
from torchweft.experts.wire.service import Description, StepReceipt, read_description, read_receipt

_DESCRIBED = 8  # experts whose description is requested at once, at different addresses if possible
_DISCARD_TIMEOUT = 30.0  # seconds after which a discard without an answer is abandoned
_LISTED = 10  # most faults in a message; there can be as many as experts
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
        if self.allow_zero_outputs or self.backward_k_min == 0:
            return 0
        # If backward needs all answers, a commit without one of the experts would be another step.
        return touched if self.backward_k_min == self.k_best else min(1, touched)

    def check(self, check: Validator, places: int | None = None) -> None:
        most = self.k_best if check.count("k_best", self.k_best) else None
        for name in ("k_min", "backward_k_min"):
            value = getattr(self, name)
            valid = is_whole(value) and value >= 0 and (most is None or value <= most)
            if check.require(valid, f"{name} is {value!r}, wanted an int from 0 to k_best ({self.k_best!r})"):
                fits = name != "k_min" or places is None or value <= places
                check.require(fits, f"k_min is {value}, but the grid has only {places} experts")
        check.seconds("forward_timeout", self.forward_timeout)
        check.seconds("backward_timeout", self.backward_timeout)
        check.seconds("timeout_after_k_min", self.timeout_after_k_min, zero=True, optional=True)
        check.boolean("detect_anomalies", self.detect_anomalies)
        check.boolean("allow_zero_outputs", self.allow_zero_outputs)


class MixtureSignature(Signature):
    """A signature with outputs that can be averaged. Raises ``UsageError`` that lists all others."""

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        faults = [
            f"{name} is of {spec.dtype}, wanted floating-point or complex numbers for the weighted mean"
            for name, spec in zip(self.outputs.names, self.outputs.specs, strict=True)
            if not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        ]
        if faults:
            raise UsageError(join_faults(f"expert {description.name!r} cannot be part of a mixture:", faults))

    def output_sizes(self, inputs: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
        """Each output's sizes beyond the batch axis, or None if they are not known."""
        # Free sizes are those of the first input with an equal shape in the schema.
        shapes = {spec.shape: tuple(x.shape) for spec, x in reversed([*zip(self.inputs.specs, inputs, strict=True)])}
        sizes: list[tuple[int, ...] | None] = []
        for spec in self.outputs.specs:
            fixed = tuple(size for size in spec.shape[1:] if size is not None)
            like = shapes.get(spec.shape)
            is_fixed = len(fixed) == len(spec.shape) - 1
            sizes.append((fixed if is_fixed else None) if like is None else like[1:])
        return sizes


@dataclass(frozen=True)
class CachedCall:
    """A forward that will be recomputed: the ``chosen`` (samples x k) of the ``live`` experts, a mask of those that
    answered (``alive``: samples x k, bool), their ``answers`` (each samples x k x ...), and the keys of the calls."""

    live: LiveExperts
    chosen: Tensor
    alive: Tensor
    answers: Sequence[Tensor]
    keys: dict[RowSpan, IdempotencyKey]


@dataclass(frozen=True)
class MixtureCall:
    """One call of a mixture before routing: the experts to choose from, and the forward that it recomputes."""

    signature: MixtureSignature
    live: LiveExperts
    deadline: float
    cached: CachedCall | None


class ExpertPool:
    """The experts of a grid in the directory, and calls to them. Copies of a mixture share it. Thread-safe."""

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
        return DirectoryResolver(uid, self.connections)

    def start_call(self, call: Call, deadline: float, attempts: RetryState) -> "Future[Received]":
        try:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise errors.DeadlineError(f"no time was left to call expert {call.header.uid!r}")
            attempt_seconds = self.retry.attempt_seconds
            seconds = remaining if attempt_seconds is None else min(remaining, attempt_seconds)
            return attempts.submit(call, seconds, self.resolver(call.header.uid))
        except Exception as error:
            failed: Future[Received] = Future()
            failed.set_exception(error)
            return failed

    def accept(self, uid: str, answer: Received) -> StepReceipt:
        progress = self.progress.get(uid)
        if progress is None:  # `setdefault`, so that threads which get here together use the same object
            progress = self.progress.setdefault(uid, ExpertProgress(uid, self.resolver(uid)))
        progress.accept(answer)
        return read_receipt(answer.header.data)

    def discard(self, mini_batches: Mapping[str, PendingCommit]) -> None:
        # Without waiting for answers: a server also drops mini-batches by itself, after a while.
        for uid, mini_batch in mini_batches.items():
            request = self.requests.discard(uid, mini_batch.name)
            self.start_call(request, time.monotonic() + _DISCARD_TIMEOUT, RetryState())

    def live_experts(self) -> LiveExperts:
        # Snapshot and experts are cached as one tuple, so that threads without a lock never see parts of two.
        snapshot, known = self.connections.snapshot(), self._known
        if known is None or known[0] is not snapshot:
            known = (snapshot, self.grid.live_experts(snapshot))
            self._known = known
        return known[1]

    def signature(self, live: LiveExperts, deadline: float) -> MixtureSignature:
        # The same for all experts of a grid. The first call requests it from several of them.
        if self._signature is None:
            if not len(live):
                raise self.no_experts_error()
            self._signature = MixtureSignature(self._fetch_description(live, deadline))
        return self._signature

    def no_experts_error(self) -> errors.NoExpertsError:
        listed, sizes = self.connections.snapshot().uids, " x ".join(map(str, self.grid.sizes))
        names = ", ".join(escape(uid) for uid in listed[:_LISTED]) + ", ..." * (len(listed) > _LISTED)
        example = self.grid.uid([0] * len(self.grid.sizes))
        return errors.NoExpertsError(
            f"the directory lists no living expert of the grid {self.grid.prefix}* ({sizes}), such as {example!r}; it "
            f"lists {names or 'no expert at all'}. Check uid_prefix and grid_size, or start a server of these experts"
        )

    def __deepcopy__(self, memo: object) -> "ExpertPool":
        return self

    def __reduce__(self) -> Never:
        raise UsageError("a remote mixture holds connections, which cannot be pickled: save its state_dict()")

    def _fetch_description(self, live: LiveExperts, deadline: float) -> Description:
        snapshot, descriptions = self.connections.snapshot(), list[Description]()
        by_address = {snapshot.addresses(uid)[:1]: uid for uid in reversed(live.uids)}
        uids = list(dict.fromkeys([*by_address.values(), *live.uids[:_DESCRIBED]]))[:_DESCRIBED]

        def accept(answer: Received) -> None:
            descriptions.append(read_description(answer.header.data))

        sample = torch.zeros(1, dtype=torch.int64, device="cpu")
        calls = [ExpertCall(self.requests.info(uid), sample, accept) for uid in uids]
        FanOut(self, calls, torch.ones_like(sample), deadline=deadline, after=0.0).run()
        if not descriptions:
            action = f"{len(uids)} experts of a mixture were asked for their description"
            raise too_few_answers(action, 1, 1, 1, faults_of(calls), self.retry)
        return descriptions[0]


@dataclass(eq=False, slots=True)
class ExpertCall:
    """One call of a fan-out. ``fault``: the error of the call, or of some of its rows."""

    # ``samples``: the sample of each row, int64. ``accept`` receives the answer, returns a mask of valid rows (bool,
    # None for all), and raises if all are invalid. ``complete_call``: with inputs, for a server that does not hold them
    # any more.
    call: Call
    samples: Tensor
    accept: Callable[[Received], Tensor | None]
    complete_call: Call | None = None
    fault: BaseException | None = None
    attempts: RetryState = field(default_factory=RetryState)

    def record_fault(self, error: BaseException) -> None:
        self.fault = self.fault or error

    def include_inputs(self) -> bool:
        """Replace the call by the complete one. Returns False if that was done before."""
        if self.complete_call is None:
            return False
        self.call, self.complete_call = self.complete_call, None
        return True


def faults_of(calls: Iterable[ExpertCall]) -> dict[str, BaseException]:
    return {call.call.header.uid: call.fault for call in calls if call.fault is not None}


class FanOut:
    """Concurrent calls of many experts. `run` fills ``counts`` (valid answers by sample) and the calls' faults."""

    # ``needed``: answers that each sample needs, int64. ``after``: seconds to wait after every sample has enough.
    # ``lenient``: continue to wait for other samples although some can no longer get enough answers.
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
        self._pauses: dict[ExpertCall, float] = {}  # when to send a call again
        self._possible = torch.zeros_like(needed)  # answers that a sample has or can still get
        for call in calls:
            self._possible.index_add_(0, call.samples, torch.ones_like(call.samples))

    def run(self) -> "FanOut":
        try:
            with lock_released():
                for call in self._calls:
                    self._start(call)
                self._wait_for_quorum()
        finally:  # also after Ctrl-C: no call and no future outlives the fan-out
            for future in self._futures.values():
                future.cancel()
            self._futures.clear()
        return self

    def _start(self, call: ExpertCall) -> None:
        future = self._futures[call] = self._client.start_call(call.call, self._deadline, call.attempts)
        attempt = call.attempts.count
        # The callback runs in a thread of the transport, so it only passes the call on to the waiting thread.
        future.add_done_callback(lambda _: self._ended.put((call, attempt)))

    def _wait_for_quorum(self) -> None:
        start, end = time.monotonic(), self._deadline
        has_quorum = False
        while self._futures or self._pauses:
            impossible = self._possible < self._needed
            # Without this, a call whose error is certain would wait for the slowest expert.
            if not self._lenient and bool(impossible.any()):
                break
            if not has_quorum and bool(((self.counts >= self._needed) | impossible).all()):
                has_quorum = True
                if self._after is not None:
                    end = min(end, time.monotonic() + self._after)
            call = self._next_ended(end)
            if call is not None:
                self._handle_outcome(call)
            elif time.monotonic() >= end:
                break
        waited = time.monotonic() - start
        for call in [*self._futures, *self._pauses]:
            late = errors.DeadlineError(f"no answer within {waited:.3g} s, when the wait ended")
            call.record_fault(call.attempts.last or late)

    def _next_ended(self, end: float) -> ExpertCall | None:
        now = time.monotonic()
        until = min(end, now + LOOK, min(self._pauses.values(), default=end))
        try:
            call, attempt = self._ended.get(timeout=max(0.0, until - now))
            # An attempt that `_follow_owners` cancelled has been handled: the call has been sent again, or has failed.
            return call if call in self._futures and attempt == call.attempts.count else None
        except Empty:
            for call in [call for call, at in self._pauses.items() if at <= time.monotonic()]:
                del self._pauses[call]
                self._start(call)
            self._follow_owners()
            return None

    def _follow_owners(self) -> None:
        # Calls of experts that have a new owner end here, so that they are sent there.
        for call, future in list(self._futures.items()):
            try:
                call.attempts.check_owner(call.call, self._client.resolver(call.call.header.uid))
            except errors.LostError as error:
                if not future.done():
                    future.cancel()
                    self._handle_outcome(call, error)

    def _handle_outcome(self, call: ExpertCall, fault: Exception | None = None) -> None:
        future, rows = self._futures.pop(call), call.samples
        try:
            if fault is not None:
                raise fault
            valid = call.accept(future.result(timeout=0))
        except errors.StepsLostWarning:  # the user's filter has turned it into an error, which ends the whole fan-out
            raise
        except Exception as error:
            error.__traceback__ = None  # holds this frame, and with it all tensors of the calls
            if self._schedule_retry(call, error):
                return
            call.record_fault(error)
            valid = torch.zeros_like(rows, dtype=torch.bool)
        ones = torch.ones_like(rows) if valid is None else valid.to(rows.dtype)
        # By `index_add_`, because a sample can occur in several calls, one for each of its experts.
        self.counts.index_add_(0, rows, ones)
        if valid is not None:
            self._possible.index_add_(0, rows, ones - 1)
            invalid = len(rows) - int(ones.sum())
            call.record_fault(errors.AnomalyError(f"{invalid} of {len(rows)} rows are not finite"))

    def _schedule_retry(self, call: ExpertCall, error: Exception) -> bool:
        """Send a call again, at once with its inputs or after a pause. Returns False if it is not sent again."""
        if isinstance(error, errors.InputsGoneError) and call.include_inputs():
            self._start(call)
            return True
        resolver = self._client.resolver(call.call.header.uid)
        pause = call.attempts.record_failure(error, self._client.retry, resolver, self._deadline)
        if pause is None:
            return False
        self._pauses[call] = time.monotonic() + pause
        return True


def too_few_answers(
    action: str, samples: int, short: int, needed: int, faults: Mapping[str, BaseException], retry: Retry
) -> errors.TooFewAnswersError:
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in list(faults.items())[:_LISTED]]
    lines += [f"and {len(faults) - _LISTED} more"] * (len(faults) > _LISTED)
    head = (
        f"{action}: {short} of {samples} samples have fewer than {needed} answers. Wait longer, call more experts "
        "(k_best), need fewer (k_min), or let such samples be zero (allow_zero_outputs)."
    )
    if any(isinstance(error, errors.CommitError) for error in faults.values()):
        head += " If a mini-batch has ended, e.g. by an interrupted commit, discard() begins a new one."
    unreachable = bool(faults) and all(isinstance(error, errors.UnreachableError) for error in faults.values())
    if unreachable and retry.attempts is not None:
        head += " If servers are restarting, retry=Retry() waits for them, until the timeout of the call."
    return errors.TooFewAnswersError(join_faults(f"{head} Failed:", lines) if lines else head, faults)


@dataclass(frozen=True)
class MixtureStatistics:
    """Counts since the mixture was made.

    ``dropped``: pairs (sample, expert) beyond the capacity. ``zeroed``: samples with too few answers. ``left_out``:
    experts that were missing from a commit. ``living``: experts in the directory's last snapshot.

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
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def add_fan_out(self, direction: Direction, calls: Sequence[ExpertCall]) -> None:
        rows = 0 if direction == "commit" else sum(len(call.samples) for call in calls)
        with self._lock:
            self._counts.update({f"{direction}s": 1, f"{direction}_calls": len(calls), "rows": rows})
            self._failed.update(errors.reason_of(call.fault) for call in calls if call.fault is not None)

    def add(self, name: Literal["dropped", "zeroed", "left_out"], number: int) -> None:
        with self._lock:
            self._counts[name] += number

    def statistics(self, living: int) -> MixtureStatistics:
        names = {entry.name for entry in fields(MixtureStatistics)} - {"failed", "living"}
        with self._lock:
            counts = {name: self._counts[name] for name in names}
            return MixtureStatistics(**counts, failed=dict(self._failed), living=living)
