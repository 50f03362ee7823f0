"""Begins all calls of one direction, and waits for their answers as long as it is worth it. Nothing outlives it.

    calls    A ────────────answer
             B ──error  again──error                 A, C: enough for every sample (k_min)
             C ─────────────────answer |             D: cancelled, its rows count as failed
             D ────────────────────────|·····
                                       '── timeout_after_k_min ──'

An answer counts for the samples that are in it, and only as far as `accept` lets it: an answer that has another
shape is a failure of its expert, a row that is not finite is one of that row. If some sample cannot get enough
answers any more, waiting for the others makes sense only if that is no error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from weft.core.errors import listed
from weft.core.turns import waiting
from weft.experts.client.retry import Retry
from weft.experts.errors import (
    AnomalyError,
    CommitError,
    InputsGoneError,
    StepsLostWarning,
    TooFewAnswersError,
    UnreachableError,
)
from weft.experts.mixture.calls import Calls, Request
from weft.experts.wire import DeadlineError, Received

Accept = Callable[[int, Received], Tensor | None]
"""Takes the answer of call i in. Returns which of its rows are good (bool), None for all. Raises what is wrong."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait: until ``deadline``, or ``after`` seconds from when every sample has enough answers.

    ``lenient``: samples that do not get enough are no error, so the others' answers are waited for all the same.
    """

    deadline: float
    after: float | None
    lenient: bool


@dataclass(slots=True)
class Gathered:
    """What came: good answers by sample (int64), and by call what went wrong."""

    counts: Tensor
    faults: dict[int, BaseException] = field(default_factory=dict[int, BaseException])


def gather(
    calls: Calls,
    requests: Sequence[Request],
    samples: Sequence[Tensor],
    needed: Tensor,
    patience: Patience,
    accept: Accept,
) -> Gathered:
    """Make these calls at once, and wait.

    Args:
        samples: for each call the samples that its rows belong to, int64.
        needed: how many answers each sample needs, int64.
        accept: called in this thread, once for each answer.
    """
    wait = _Wait(calls, requests, samples, needed, patience, accept)
    try:
        with waiting():
            for index in range(len(requests)):
                wait.begin(index)
            wait.run()
    finally:
        wait.cancel()
    return wait.gathered


class _Wait:
    """The calls of one `gather`: those that are under way, and those that pause before they are sent again."""

    def __init__(
        self,
        calls: Calls,
        requests: Sequence[Request],
        samples: Sequence[Tensor],
        needed: Tensor,
        patience: Patience,
        accept: Accept,
    ) -> None:
        self.gathered = Gathered(torch.zeros_like(needed))
        self._calls, self._requests, self._accept = calls, list(requests), accept
        self._samples, self._needed, self._patience = samples, needed, patience
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._futures: dict[int, Future[Received]] = {}
        self._pauses: list[tuple[float, int]] = []
        self._attempts = [0] * len(requests)
        self._counted = [0] * len(requests)
        self._last: list[Exception | None] = [None] * len(requests)
        self._hopes = torch.zeros_like(needed)
        for rows in samples:
            self._hopes.index_add_(0, rows, torch.ones_like(rows))

    def begin(self, index: int) -> None:
        future = self._calls.begin(self._requests[index], self._attempts[index], self._last[index])
        self._futures[index] = future
        future.add_done_callback(lambda _: self._ended.put(index))

    def run(self) -> None:
        start, end = time.monotonic(), self._patience.deadline
        enough = False
        while self._futures or self._pauses:
            if not self._patience.lenient and bool(self._hopeless().any()):
                break
            if not enough and self._satisfied():
                enough = True
                if self._patience.after is not None:
                    end = min(end, time.monotonic() + self._patience.after)
            index = self._wait(end)
            if index is not None:
                self._end(index)
            elif time.monotonic() >= end:
                break
        waited = time.monotonic() - start
        for index in [*self._futures, *(index for _, index in self._pauses)]:
            late = DeadlineError(f"no answer within {waited:.3g} s, and it was waited for no longer")
            self.gathered.faults[index] = self._last[index] or late

    def cancel(self) -> None:
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()

    def _wait(self, end: float) -> int | None:
        """A call that ended; None if it is time for something else, also to send a call again, which is done here."""
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
        except StepsLostWarning:  # which the caller has turned into an error of the whole call
            raise
        except Exception as error:
            error.__traceback__ = None  # it holds this frame, and with it all tensors of the calls
            if self._again(index, error):
                return
            self.gathered.faults[index] = error
            good = torch.zeros_like(rows, dtype=torch.bool)
        ones = torch.ones_like(rows) if good is None else good.to(rows.dtype)
        self.gathered.counts.index_add_(0, rows, ones)
        if good is not None:
            self._hopes.index_add_(0, rows, ones - 1)
            bad = len(rows) - int(ones.sum())
            self.gathered.faults.setdefault(index, AnomalyError(f"{bad} of {len(rows)} rows are not finite"))

    def _again(self, index: int, error: Exception) -> bool:
        """Whether a call is to be sent again; then its pause begins. All calls here may be repeated."""
        whole, deadline = self._requests[index].whole, self._requests[index].deadline
        if isinstance(error, InputsGoneError) and whole is not None:
            self._requests[index] = Request(whole, deadline)
            self.begin(index)
            return True
        self._attempts[index] += 1
        self._last[index] = error
        hopeful = self._calls.takeover_expected(self._requests[index], error)
        self._counted[index] = 1 if hopeful else self._counted[index] + 1
        retry = self._calls.retry
        at = time.monotonic() + retry.pause(self._attempts[index])
        if at >= self._patience.deadline or not retry.again(error, self._counted[index]):
            return False
        heappush(self._pauses, (at, index))
        return True

    def _satisfied(self) -> bool:
        """Whether every sample has what it needs, or cannot get it any more."""
        return bool(((self.gathered.counts >= self._needed) | self._hopeless()).all())

    def _hopeless(self) -> Tensor:
        return self._hopes < self._needed


_LISTED = 10  # faults that a message names; there may be as many as experts


def few_live(living: int, needed: int) -> TooFewAnswersError:
    """The error where every sample needs more answers than there are experts. Nobody was asked."""
    return TooFewAnswersError(
        f"forward of a mixture: every sample needs {needed} answers (k_min), but the directory knows only {living} "
        "living experts of the grid. Start more, need fewer (k_min), or let such samples be zero (allow_zero_outputs)."
    )


def too_few(
    what: str, samples: int, short: int, needed: int, faults: Mapping[str, BaseException], retry: Retry
) -> TooFewAnswersError:
    """The error for ``short`` of ``samples`` that have fewer than ``needed`` answers, asked for by this rule."""
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in list(faults.items())[:_LISTED]]
    lines += [f"and {len(faults) - _LISTED} more"] * (len(faults) > _LISTED)
    head = (
        f"{what}: {short} of {samples} samples have fewer than {needed} answers. Wait longer, ask more experts "
        "(k_best), need fewer (k_min), or let such samples be zero (allow_zero_outputs)."
    )
    if any(isinstance(error, CommitError) for error in faults.values()):
        head += " Where a mini-batch has ended, as by a commit that was interrupted, discard() begins a new one."
    away = bool(faults) and all(isinstance(error, UnreachableError) for error in faults.values())
    if away and retry.attempts is not None:
        head += " Where servers are being started again, retry=Retry() waits for them, until the timeout of the call."
    return TooFewAnswersError(listed(f"{head} Who failed:", lines) if lines else head, faults)
