"""Mini-batch of a mixture: for each expert that was called, the gradients that wait for `commit`; and the commit.

    backward ── A: added   B: added ────┐
    backward ── A: added   C: failed ───┼── commit: A and B step at once; C lacks rows, and is never applied
    backward ── raised ─────────────────┘── then none of it is whole: discard, and run it again

    touched ── whole? ──┬── yes ── commit, retried by the rule ──┬── stepped
                        └── no: never applied                    └── failed
    too few whole, or too few stepped ──> MixtureCommitError, which lists all that did not

The sum of each expert has a name of its own, and lives at its server, which is told of those that are given up. A
commit bears that name as its idempotency key: sent again, it steps no second time. What follows from gradients that are
missing is documented at `RemoteMixtureOfExperts.commit`.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.core.errors import listed
from weft.experts.client.stub import OpenMiniBatch
from weft.experts.errors import CommitError, GradientError, MixtureCommitError, StepError
from weft.experts.mixture.fanout import AsyncCaller, ExpertRequest, MixtureCounters, QuorumTimeout, fan_out
from weft.experts.mixture.mixture_options import MixtureOptions
from weft.experts.wire import Received

_GONE = (CommitError, GradientError, StepError)
"""After these the server has the sum no more."""


class MixtureMiniBatch:
    """The open mini-batches of a mixture's experts. Thread-safe: its micro-batches may come from several threads.

    ``broken``: what a backward raised; then all sums lack what it would have added. A copy of the mixture begins with
    none.
    """

    def __init__(self, accumulates: bool) -> None:
        self.accumulates = accumulates
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._open: dict[str, OpenMiniBatch] = {}

    def contribution(self) -> "Contribution":
        """For the calls of one backward."""
        return Contribution(self)

    def open(self, uid: str) -> OpenMiniBatch:
        """The mini-batch of an expert, which from now on is touched."""
        with self._lock:
            if uid not in self._open:
                self._open[uid] = OpenMiniBatch(uid)
            return self._open[uid]

    def touched(self) -> dict[str, OpenMiniBatch]:
        """The mini-batches that a commit would apply, by expert."""
        with self._lock:
            return dict(self._open)

    def fail(self, error: BaseException) -> None:
        """A backward raised."""
        with self._lock:
            self.broken = self.broken or error

    def end(self, ended: Mapping[str, OpenMiniBatch]) -> None:
        """These were committed, or are given up."""
        with self._lock:
            for uid, each in ended.items():
                if self._open.get(uid) is each:
                    del self._open[uid]

    def discard(self) -> dict[str, OpenMiniBatch]:
        """Give all up, and return them."""
        with self._lock:
            given_up, self._open, self.broken = self._open, {}, None
            return given_up

    def __deepcopy__(self, memo: object) -> "MixtureMiniBatch":
        return MixtureMiniBatch(self.accumulates)


class Contribution:
    """The gradients of one backward, as a context manager: an error out of it breaks the mini-batch.

    Without accumulation, calls step by themselves; but several calls of one expert add to a mini-batch of their own, in
    ``parts`` by expert, which is to be committed when they are all answered.
    """

    def __init__(self, batch: MixtureMiniBatch) -> None:
        self.parts: dict[str, OpenMiniBatch] = {}
        self._batch = batch
        self._by_call: list[OpenMiniBatch | None] = []
        self._added: set[int] = set()

    def begin(self, uid: str, *, split: bool = False) -> str:
        """The name for the next call, one of several of its expert if ``split``; empty: the expert is to step."""
        one = None
        if self._batch.accumulates:
            one = self._batch.open(uid)
        elif split:
            one = self.parts.setdefault(uid, OpenMiniBatch(uid))
        self._by_call.append(one)
        return "" if one is None else one.name

    def added(self, index: int, incarnation: int) -> None:
        """Call ``index`` was answered: its gradient was added at this incarnation of the server."""
        one = self._by_call[index]
        if one is not None:
            one.added(one.name, incarnation)
            self._added.add(index)

    def failed(self, faults: Mapping[int, BaseException]) -> None:
        """These calls failed. Of a call that was answered, the gradient was added: only its answer was of no use."""
        for index, fault in faults.items():
            one = self._by_call[index]
            if one is not None and index not in self._added:
                one.failed(one.name, fault)

    def __enter__(self) -> "Contribution":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._batch.accumulates:
            self._batch.fail(error)


@dataclass(frozen=True)
class Committer:
    """Commits of a mixture, sent to all experts at once under one deadline."""

    caller: AsyncCaller
    options: MixtureOptions
    counters: MixtureCounters
    batch: MixtureMiniBatch

    def commit(self) -> dict[str, bool]:
        """See `RemoteMixtureOfExperts.commit`."""
        touched, broken = self.batch.touched(), self.batch.broken
        wanted = self.options.steps_wanted(len(touched))
        whole, incomplete = _parted(touched)
        if broken is not None or len(whole) < wanted:
            raise _not_whole(len(touched), incomplete, broken) from broken
        failed = self._send(whole)
        for uid, fault in failed.items():
            if isinstance(fault, _GONE):
                touched[uid].failed(whole[uid][0], fault)
        faults = {**incomplete, **failed}
        stepped = {uid: each for uid, each in touched.items() if uid not in faults}
        self.batch.end(stepped)
        if len(stepped) < wanted:
            raise _not_stepped(len(touched), faults)
        self.batch.end(touched)
        self.caller.discard({uid: touched[uid] for uid in faults})
        self.counters.count("left_out", len(faults))
        return {uid: uid in stepped for uid in touched}

    def commit_parts(self, parts: Mapping[str, OpenMiniBatch]) -> None:
        """One step of each expert that was called several times in a backward which does not accumulate.

        One that lacks a part does not step, as one whose only call failed. Raises ``MixtureCommitError`` for one that
        does not step although it has all parts.
        """
        whole, incomplete = _parted(parts)
        failed = self._send(whole)
        self.caller.discard({uid: parts[uid] for uid in (*incomplete, *failed)})
        if failed:
            head = f"backward of a mixture, sent in parts: {len(failed)} experts are not known to have stepped with it:"
            raise MixtureCommitError(_with_faults(head, failed), failed)

    def _send(self, whole: Mapping[str, tuple[str, int]]) -> dict[str, BaseException]:
        """Commit these names, at these incarnations. Returns faults by expert."""
        if not whole:
            return {}
        uids, deadline = list(whole), time.monotonic() + self.options.backward_timeout
        requests = [
            ExpertRequest(self.caller.requests.commit(uid, *whole[uid], self.caller.token(uid)), deadline)
            for uid in uids
        ]

        def accept(index: int, answer: Received) -> None:
            self.caller.accept(uids[index], answer)

        samples = [torch.tensor([index], device="cpu") for index in range(len(uids))]  # each call has its own sample
        needed = torch.ones(len(uids), dtype=torch.int64, device="cpu")
        timeout = QuorumTimeout(deadline, None, lenient=True)
        result = fan_out(self.caller, requests, samples, needed, timeout, accept)
        self.counters.fanned_out("commit", len(uids), 0, result.faults.values())
        return {uids[index]: fault for index, fault in result.faults.items()}


def _parted(touched: Mapping[str, OpenMiniBatch]) -> tuple[dict[str, tuple[str, int]], dict[str, BaseException]]:
    """The names and incarnations of the mini-batches that are whole, and what is wrong with the others."""
    whole: dict[str, tuple[str, int]] = {}
    incomplete: dict[str, BaseException] = {}
    for uid, each in touched.items():
        why = each.fault
        ready = None if why is not None else each.ready()
        if ready is None:
            incomplete[uid] = CommitError(why or "its backward has not come to an end")
        else:
            whole[uid] = ready
    return whole, incomplete


def _not_whole(
    touched: int, incomplete: Mapping[str, BaseException], broken: BaseException | None
) -> MixtureCommitError:
    why = "" if broken is None else f" A backward of it ended with {type(broken).__name__}."
    head = (
        f"a mini-batch of a mixture is not whole, and no expert was told to step.{why} Of {touched} experts "
        f"{len(incomplete)} lack a part of their gradients. Call discard(), and run the mini-batch again."
    )
    return MixtureCommitError(_with_faults(head, incomplete), incomplete)


def _not_stepped(touched: int, faults: Mapping[str, BaseException]) -> MixtureCommitError:
    again = "Call commit() again, which commits only those, and steps none of them twice; or discard(), to"
    advice = "Call discard(), to" if all(isinstance(each, _GONE) for each in faults.values()) else again
    head = (
        f"commit of a mixture: {len(faults)} of {touched} experts are not known to have stepped. {advice} go on "
        "without them."
    )
    return MixtureCommitError(_with_faults(head, faults), faults)


def _with_faults(head: str, faults: Mapping[str, BaseException]) -> str:
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in faults.items()]
    return listed(head, lines) if lines else head
