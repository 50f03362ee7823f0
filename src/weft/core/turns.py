"""Who may draw: turns at the random generators of the process.

PyTorch has one default generator per device and process. Whoever needs numbers of his own takes a turn:

    thread A   ──[ turn: seed, draw, put back ]─────────────────[ turn ...
    thread B            (waits)                [ turn: ... ]

A stage may itself contain a pipe. Its workers then take turns inside the turn of that stage, not against it, so a
turn is known to what runs inside of it in whichever thread: by a context variable, which executors carry along.
A stage that waits for somebody else, such as a remote expert, lets go meanwhile (`waiting`): who answers may be in
this process and draw, or in one that waits for this one.

Threads that are not weft's take no turns. `Watch` and `weft.core.rng` say what is noticed of them.
"""

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor


class _Turns:
    """The turns of one process. A forked child begins anew: who has a turn in the parent is not there to end it."""

    here: ClassVar["_Turns"]

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changes = 0
        """How often a turn has begun or ended; odd while one lasts."""

    @classmethod
    def begin(cls) -> None:
        cls.here = cls()


_Turns.begin()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Turns.begin)


class Turn:
    """One turn, which began with the generators in the states `before`.

    What runs inside it, in whichever thread, takes turns by `inside`.
    """

    def __init__(self, turns: _Turns, around: "Turn | None", sources: Sequence[torch.Generator]) -> None:
        self.turns = turns
        self.around = around
        self.sources = sources
        self.before = states(sources)
        self.inside = threading.RLock()
        self.over = False
        self.thread = threading.get_ident()

    @property
    def lasts(self) -> bool:
        return not self.over and self.turns is _Turns.here


_turn: ContextVar[Turn | None] = ContextVar("weft_turn", default=None)


def _present() -> Turn | None:
    """The innermost turn around this call. A worker's context may remember some that are over."""
    turn = _turn.get()
    while turn is not None and not turn.lasts:
        turn = turn.around
    return turn


def carry() -> Callable[[], object]:
    """To be called in the thread, or the context, where work goes on: then it is inside the turn that this call is."""
    return partial(_turn.set, _present())


@contextmanager
def turn_at(sources: Sequence[torch.Generator]) -> Generator[Turn]:
    """Nobody else has a turn meanwhile; but whoever has one already may take further ones inside."""
    around, turns = _present(), _Turns.here
    with turns.lock if around is None else around.inside:
        turn = Turn(turns, around, sources)
        token = _turn.set(turn)
        turns.changes += around is None
        try:
            yield turn
        finally:
            turn.over = True
            _turn.reset(token)
            turns.changes += around is None


@contextmanager
def seeded(sources: Sequence[torch.Generator], seed: int) -> Generator[list[Tensor]]:
    """A turn with this seed; gives the states then. Afterwards the generators are as they were before."""
    with turn_at(sources) as turn:
        try:
            for source in sources:
                source.manual_seed(seed)
            yield states(sources)
        finally:
            restore(sources, turn.before)


@contextmanager
def waiting() -> Generator[None]:
    """Surrounds waiting for somebody else. If this thread has a turn, others may take theirs meanwhile.

    Where the stage goes on afterwards, it draws what it would have drawn. A worker of a pipe inside of a stage does
    not let go, since the turn is not its own.
    """
    turn = _present()
    while turn is not None and turn.around is not None and turn.around.lasts:
        turn = turn.around
    if turn is None or turn.thread != threading.get_ident():
        yield
        return
    mine = states(turn.sources)
    restore(turn.sources, turn.before)
    turn.turns.changes += 1
    turn.turns.lock.release()
    token = _turn.set(None)  # this thread has none meanwhile
    try:
        yield
    finally:
        _turn.reset(token)
        turn.turns.lock.acquire()
        turn.turns.changes += 1
        turn.before = states(turn.sources)
        restore(turn.sources, mine)


class Watch:
    """Sees whether the generators move without a turn. Where somebody has a turn meanwhile, nothing can be told."""

    def __init__(self, sources: Sequence[torch.Generator]) -> None:
        self.sources = sources
        self._turns = _Turns.here
        self._changes = self._turns.changes
        self.before = states(sources)

    def moved(self) -> bool:
        """Whether they were moved since, as far as can be told."""
        moved = not same(self.before, states(self.sources))
        return moved and self._changes == self._turns.changes and not self._changes % 2

    def put_back(self) -> None:
        """The generators as they were."""
        with turn_at(self.sources):
            restore(self.sources, self.before)


def states(sources: Sequence[torch.Generator]) -> list[Tensor]:
    """The state of each generator, a uint8 tensor."""
    return [source.get_state() for source in sources]


def restore(sources: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Put each generator into its state."""
    for source, state in zip(sources, states, strict=True):
        source.set_state(state)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether these are the same states."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
