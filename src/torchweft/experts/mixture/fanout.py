"""Fan-out: concurrent calls of many experts, and the wait for a quorum of answers.

    calls    A ────────────answer
             B ──error  retry──error                 A, C: a quorum for every sample (k_min)
             C ─────────────────answer |             D: cancelled, its rows count as failed
             D ────────────────────────|·····
                                       '── timeout_after_k_min ──'

An answer counts for its samples, unless ``accept`` of its call rejects it: an answer of another shape is a failure of
the expert, a row that is not finite a failure of that row. `weft.experts.client.calls` drives the calls.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, Never

import torch
from torch import Tensor

from torchweft.core.errors import UsageError, escape, join_faults
from torchweft.core.rng import lock_released
from torchweft.core.validation import Validator, is_whole
from torchweft.experts import errors
from torchweft.experts.client.calls import CallLoop, RemoteCall, RetryingCaller
from torchweft.experts.client.connections import Connections, DirectoryResolver
from torchweft.experts.client.layer import RecomputeCache
from torchweft.experts.client.retry import Retry
from torchweft.experts.client.stub import (
    CallOptions,
    ExpertProgress,
    ExpertStub,
    IdempotencyKey,
    PendingCommit,
    RequestBuilder,
    Signature,
)
from torchweft.experts.discovery import Snapshot
from torchweft.experts.mixture.routing import Grid, LiveExperts, RowSpan
from torchweft.experts.wire import Received
from torchweft.experts.wire.service import Description, read_description

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
        self.stubs: dict[str, ExpertStub] = {}
        self.counters, self.cache = MixtureCounters(), RecomputeCache[CachedCall]()
        self._known: tuple[Snapshot, LiveExperts] | None = None
        self._signature: MixtureSignature | None = None

    def stub(self, uid: str) -> ExpertStub:
        if uid not in self.stubs:  # `setdefault`, so that threads which get here together use the same object
            caller = RetryingCaller(DirectoryResolver(uid, self.connections), self.retry)
            options = CallOptions(self.options.backward_timeout)
            self.stubs.setdefault(uid, ExpertStub(uid, caller, options, self.requests))
        return self.stubs[uid]

    def progress(self) -> dict[str, ExpertProgress]:
        """That of the experts that have answered."""
        progress = {uid: stub.progress for uid, stub in self.stubs.copy().items()}
        return {uid: one for uid, one in progress.items() if one.receipt is not None}

    def discard(self, mini_batches: Mapping[str, PendingCommit]) -> None:
        # Without waiting for answers: a server also drops mini-batches by itself, after a while.
        for uid, mini_batch in mini_batches.items():
            self.stub(uid).caller.send(self.requests.discard(uid, mini_batch.name), _DISCARD_TIMEOUT)

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
        calls = [
            FanOutCall(RemoteCall(self.requests.info(uid), self.stub(uid).caller, deadline, accept), sample)
            for uid in uids
        ]
        FanOut(calls, torch.ones_like(sample), deadline=deadline, after=0.0).run()
        if not descriptions:
            action = f"{len(uids)} experts of a mixture were asked for their description"
            raise too_few_answers(action, 1, 1, 1, faults_of(calls), self.retry)
        return descriptions[0]


@dataclass(eq=False, slots=True)
class FanOutCall:
    """One call of a fan-out. ``fault``: the error of the call, or of some of its rows."""

    # ``samples``: the sample of each row, int64. ``remote``: its value is a mask of valid rows (bool, None for all).
    remote: RemoteCall
    samples: Tensor
    fault: BaseException | None = None

    @property
    def uid(self) -> str:
        return self.remote.call.header.uid

    def record_fault(self, error: BaseException) -> None:
        self.fault = self.fault or error


def faults_of(calls: Iterable[FanOutCall]) -> dict[str, BaseException]:
    return {call.uid: call.fault for call in calls if call.fault is not None}


class FanOut:
    """Concurrent calls of many experts. `run` fills ``counts`` (valid answers by sample) and the calls' faults."""

    # ``needed``: answers that each sample needs, int64. ``after``: seconds to wait after every sample has enough.
    # ``lenient``: continue to wait for other samples although some can no longer get enough answers.
    def __init__(
        self,
        calls: Sequence[FanOutCall],
        needed: Tensor,
        *,
        deadline: float,
        after: float | None = None,
        lenient: bool = True,
    ) -> None:
        self.counts = torch.zeros_like(needed)
        self._calls, self._needed = calls, needed
        self._deadline, self._after, self._lenient = deadline, after, lenient
        self._open = dict.fromkeys(calls)  # without an outcome
        self._possible = torch.zeros_like(needed)  # answers that a sample has or can still get
        for call in calls:
            self._possible.index_add_(0, call.samples, torch.ones_like(call.samples))

    def run(self) -> "FanOut":
        loop = CallLoop()
        try:
            with lock_released():
                for call in self._calls:
                    call.remote.on_end = partial(self._note_outcome, call)
                    loop.start(call.remote)
                self._wait_for_quorum(loop)
        finally:  # also after Ctrl-C: no call and no future outlives the fan-out
            for call in self._open:
                loop.cancel(call.remote)
        return self

    def _wait_for_quorum(self, loop: CallLoop) -> None:
        start, end = time.monotonic(), self._deadline
        has_quorum = False
        while self._open:
            impossible = self._possible < self._needed
            # Without this, a call whose error is certain would wait for the slowest expert.
            if not self._lenient and bool(impossible.any()):
                break
            if not has_quorum and bool(((self.counts >= self._needed) | impossible).all()):
                has_quorum = True
                if self._after is not None:
                    end = min(end, time.monotonic() + self._after)
            if not loop.drive(end):
                break
        waited = time.monotonic() - start
        for call in self._open:
            late = errors.DeadlineError(f"no answer within {waited:.3g} s, when the wait ended")
            call.record_fault(call.remote.attempts.last or late)

    def _note_outcome(self, call: FanOutCall, remote: RemoteCall) -> None:
        del self._open[call]
        rows, valid, error = call.samples, remote.value, remote.error
        remote.error = None  # its traceback can hold this frame: a cycle
        if isinstance(error, errors.StepsLostWarning):  # the user's filter has turned it into an error
            raise error
        if error is not None:
            call.record_fault(error)
            valid = torch.zeros_like(rows, dtype=torch.bool)
        ones = torch.ones_like(rows) if valid is None else valid.to(rows.dtype)
        # By `index_add_`, because a sample can occur in several calls, one for each of its experts.
        self.counts.index_add_(0, rows, ones)
        if valid is not None:
            self._possible.index_add_(0, rows, ones - 1)
            invalid = len(rows) - int(ones.sum())
            call.record_fault(errors.AnomalyError(f"{invalid} of {len(rows)} rows are not finite"))


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

    def add_fan_out(self, direction: Direction, calls: int, faults: Iterable[BaseException], rows: int = 0) -> None:
        with self._lock:
            self._counts.update({f"{direction}s": 1, f"{direction}_calls": calls, "rows": rows})
            self._failed.update(map(errors.reason_of, faults))

    def add(self, name: Literal["dropped", "zeroed", "left_out"], number: int) -> None:
        with self._lock:
            self._counts[name] += number

    def statistics(self, living: int) -> MixtureStatistics:
        names = {entry.name for entry in fields(MixtureStatistics)} - {"failed", "living"}
        with self._lock:
            counts = {name: self._counts[name] for name in names}
            return MixtureStatistics(**counts, failed=dict(self._failed), living=living)
