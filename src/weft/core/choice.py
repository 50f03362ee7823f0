"""Choosing between ways of running the same step by measuring them on the user's own steps.

Threads pay when the operators are long and cost when they are short: under the interpreter lock, two threads
that both launch operators of 10 us run slower than one. No property of a model tells which it is, so the
first steps of each kind try the candidates in turn, and the fastest is kept:

    step      1        2        3        4        ...      11       12       13     ...
    runs      serial   threads  serial   threads  ...      serial   threads  the faster one
              warm-up  warm-up  '------------ measured -------------'

All candidates give the same numbers, so nobody notices but the clock. Afterwards one step of eight is timed. When five
of these in a row took half as long again as the winner did when it was chosen, all is measured anew.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.boundary import Journey

_WARM_UP = 1
_SAMPLES = 5
_WORTH = 0.95
"""A candidate must be that much faster than one before it: a wrong choice for threads costs more than one against
them."""
_EVERY = 8
_SLOWER = 1.5


@dataclass
class _Trial:
    """The times of one kind of step: per candidate, in seconds, of whole steps (forward, and backward if any)."""

    seconds: list[list[float]]
    best: int | None = None
    expected: float = 0.0  # seconds of the best one when it was chosen
    steps: int = 0  # since then
    slow: int = 0  # of those that were timed, how many in a row took clearly longer


@dataclass
class Choice:
    """Which of `candidates` to use for each kind of step. The first is the simplest."""

    candidates: int
    fixed: int | None = None
    _trials: dict[Hashable, _Trial] = field(default_factory=dict[Hashable, _Trial])

    def pick(self, kind: Hashable) -> int:
        """The candidate for the next step of this kind: the `fixed` one, if any."""
        if self.fixed is not None:
            return self.fixed
        trial = self._trial(kind)
        if trial.best is not None:
            return trial.best
        counts = [len(times) for times in trial.seconds]
        return counts.index(min(counts))

    def report(self, kind: Hashable, candidate: int, seconds: float) -> None:
        """A step of this kind took so long with that candidate."""
        trial = self._trial(kind)
        if trial.best is not None:
            if candidate == trial.best:
                trial.slow = trial.slow + 1 if seconds > _SLOWER * trial.expected else 0
                if trial.slow == _SAMPLES:
                    del self._trials[kind]
            return
        trial.seconds[candidate].append(seconds)
        if all(len(times) >= _WARM_UP + _SAMPLES for times in trial.seconds):
            # The least time of each: what else the machine does can only add to it.
            least = [min(times[_WARM_UP:]) for times in trial.seconds]
            trial.best = 0
            for other in range(1, self.candidates):
                if least[other] < _WORTH * least[trial.best]:
                    trial.best = other
            trial.expected = least[trial.best]

    def rule_out(self, kind: Hashable, candidate: int) -> None:
        """This candidate cannot run this kind of step."""
        trial = self._trial(kind)
        if trial.best is None:
            trial.seconds[candidate] = [math.inf] * (_WARM_UP + _SAMPLES)

    def times(self, kind: Hashable) -> bool:
        """Whether the next step of this kind is to be timed: each until the decision, then one of eight."""
        if self.fixed is not None:
            return False
        trial = self._trial(kind)
        trial.steps += trial.best is not None
        return trial.best is None or trial.steps % _EVERY == 0

    def decisions(self) -> dict[Hashable, int]:
        """The winner for every kind of step that has one; the others are still being measured."""
        return {kind: trial.best for kind, trial in self._trials.items() if trial.best is not None}

    def _trial(self, kind: Hashable) -> _Trial:
        return self._trials.setdefault(kind, _Trial([[] for _ in range(self.candidates)]))


class TimedJourney:
    """A journey that reports what its forward and first backward took together, or its forward if that is all."""

    def __init__(
        self, journey: Journey, choice: Choice, kind: Hashable, candidate: int, *, with_backward: bool
    ) -> None:
        self._journey = journey
        self._report: tuple[Choice, Hashable, int] | None = (choice, kind, candidate)
        self._with_backward = with_backward
        self._seconds = 0.0

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """See `Journey.forward`."""
        start = perf_counter()
        result = self._journey.forward()
        self._seconds = perf_counter() - start
        if not self._with_backward:
            self._done()
        return result

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `Journey.backward`."""
        start = perf_counter()
        result = self._journey.backward(gradients, retain=retain)
        self._seconds += perf_counter() - start
        self._done()
        return result

    def _done(self) -> None:
        if self._report is not None:  # a retained graph may go back again
            choice, kind, candidate = self._report
            choice.report(kind, candidate, self._seconds)
        self._report = None


def time_graph(outputs: Sequence[Tensor], seconds: float, choice: Choice, kind: Hashable, candidate: int) -> None:
    """Report a step whose backward is left to autograd: its forward took so long, its first backward is timed here.

    That goes from the first of its outputs to the end of all that autograd does then, which may be more than the step.
    """
    nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    begun: list[float] = []

    def begins(_: object) -> None:
        if not begun:
            begun.append(perf_counter())
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(ends)

    def ends() -> None:
        choice.report(kind, candidate, seconds + perf_counter() - begun[0])

    if not nodes:
        choice.report(kind, candidate, seconds)
    for node in nodes:
        node.register_prehook(begins)
