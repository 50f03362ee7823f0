"""Random numbers that do not depend on who runs first.

PyTorch has one default generator per device and process. Two stages that draw from it at the same time mix
their streams: a recomputation then replays other numbers than its forward drew, and dropout gradients are
silently wrong. Here every (stage, micro-batch) draws from a seed of its own, and a stage that draws holds the
generator while it runs:

    caller's generator --one draw--> seed of the step --mix(stage, micro-batch)--> seed of the action

So results are bit-equal between the serial executor, threads and recomputation. A model that draws nothing
leaves the caller's generator as it was, and its stages never wait for each other.

Whether a stage draws is observed, not declared: its first run holds the generator and compares the state
before and after. The verdict is kept per *configuration* of the stage (its `training` flags and every float
and bool attribute of its modules, such as a dropout probability); a new configuration is observed again.
A stage that was seen to draw nothing and then draws all the same (a branch on data, say) is noticed by the
state of the generator; the step is run again with every stage holding it. It goes unnoticed only while another stage
holds the generator. Then that one's numbers are not those of other executors, but a recomputation must not go wrong
in silence: it compares where the generator ends with where it ended in the forward.

A stage may itself contain a pipe. Its workers then take turns inside the hold of that stage, not against it.
A stage that waits for somebody else, such as a remote expert, lets go meanwhile (`waiting`): who answers may be in
this process and draw, or in one that waits for this one.
"""

import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from weft.core.ambient import is_recomputing
from weft.core.errors import RandomnessError

Result = TypeVar("Result")

_MASK = (1 << 64) - 1
_holding = threading.RLock()
_holders = 0  # how often the generator was taken so far; an unchanged count means that nobody held it meanwhile


class _Hold:
    """One turn at the generator. What runs inside it, in whichever thread, takes turns by `inside`."""

    def __init__(self, outer: "_Hold | None", sources: Sequence[torch.Generator]) -> None:
        self.outer = outer
        self.sources = sources
        self.before = _states(sources)
        self.inside = threading.RLock()
        self.over = False
        self.thread = threading.get_ident()


_hold: ContextVar[_Hold | None] = ContextVar("weft_hold", default=None)


def _current_hold() -> _Hold | None:
    """The innermost hold around this call. A worker's context may remember some that are over."""
    hold = _hold.get()
    while hold is not None and hold.over:
        hold = hold.outer
    return hold


@contextmanager
def waiting() -> Generator[None]:
    """Surrounds waiting for somebody else. What this thread holds of the generators, others may take meanwhile.

    Where the stage goes on afterwards, it draws what it would have drawn. A worker of a pipe inside of a stage does
    not let go, since it is not the one who holds.
    """
    global _holders  # noqa: PLW0603 - as below
    hold = _current_hold()
    while hold is not None and hold.outer is not None and not hold.outer.over:
        hold = hold.outer
    if hold is None or hold.thread != threading.get_ident():
        yield
        return
    mine = _states(hold.sources)
    _set(hold.sources, hold.before)
    _holders += 1
    _holding.release()
    try:
        yield
    finally:
        _holding.acquire()
        _holders += 1
        hold.before = _states(hold.sources)
        _set(hold.sources, mine)


def mix(seed: int, *keys: int) -> int:
    """A 63-bit seed out of another and some keys, by the finaliser of splitmix64 (Steele et al., 2014)."""
    for key in keys:
        seed = (seed + (key + 1) * 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed >> 1


def generators(devices: Iterable[torch.device]) -> tuple[torch.Generator, ...]:
    """The default generators that a stage on these devices may draw from: the CPU's, and each device's own."""
    found = [torch.default_generator]
    for device in dict.fromkeys(devices):
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            index = cast("int | None", device.index)
            found.append(module.default_generators[module.current_device() if index is None else index])
    return tuple(found)


def _states(sources: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [source.get_state() for source in sources]


def _set(sources: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for source, state in zip(sources, states, strict=True):
        source.set_state(state)


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def _held(sources: Sequence[torch.Generator], seed: int) -> Generator[list[torch.Tensor]]:
    """Hold the generators, with this seed; their states then. Afterwards they are as they were before."""
    global _holders  # noqa: PLW0603 - one per process, like the generator that it guards
    around = _current_hold()
    with _holding if around is None else around.inside:
        hold = _Hold(around, sources)
        token = _hold.set(hold)
        _holders += around is None
        try:
            for source in sources:
                source.manual_seed(seed)
            yield _states(sources)
        finally:
            _set(sources, hold.before)
            hold.over = True
            _hold.reset(token)
            _holders += around is None


def drawn(
    sources: Sequence[torch.Generator], seed: int, function: Callable[..., Result], *args: Any
) -> tuple[Result, bool]:
    """``function(*args)`` with the numbers of this seed, and whether it drew any. Nobody else's are touched."""
    with _held(sources, seed) as fresh:
        found = function(*args)
        return found, not _same(fresh, _states(sources))


@dataclass
class RandomUse:
    """What is known about one stage: per configuration, whether it draws. Lives as long as the stage."""

    sources: tuple[torch.Generator, ...]
    draws: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])


class Dice:
    """The random numbers of one step (one mini-batch through all stages).

    `scope` surrounds every forward and recomputation of one stage with one micro-batch; it may be left out where
    `quiet` says that no stage is known to draw. `settle`, called once after the forward of the whole step, says
    whether the numbers can be trusted.
    """

    def __init__(self, uses: Sequence[RandomUse], configurations: Sequence[Hashable]) -> None:
        self._uses = uses
        self._configurations = configurations
        self._known = [use.draws.get(seen) for use, seen in zip(uses, configurations, strict=True)]
        self._drew = [False] * len(uses)
        self.quiet = not any(known is not False for known in self._known)
        self._surprised = False
        self._ends: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._sources = list(dict.fromkeys(source for use in uses for source in use.sources))
        self._holders = _holders
        self._before = self._after = _states(self._sources)
        self.seed = 0
        if not self.quiet:
            self.seed = int(torch.randint(1 << 62, (), device="cpu"))
            self._after = _states(self._sources)

    @contextmanager
    def scope(self, stage: int, micro_batch: int) -> Generator[None]:
        """Surround one forward of one stage. Holds the generators unless the stage is known to draw nothing."""
        if self._known[stage] is False:
            yield from self._watched(stage)
        else:
            yield from self._held(stage, micro_batch)

    def _held(self, stage: int, micro_batch: int) -> Generator[None]:
        sources = self._uses[stage].sources
        with _held(sources, mix(self.seed, stage, micro_batch)) as fresh:
            yield
            end = _states(sources)
            if is_recomputing():
                self._check_replay(stage, micro_batch, end, fresh)
            elif not _same(fresh, end):
                self._drew[stage] = True
                self._ends[stage, micro_batch] = end

    def _check_replay(
        self, stage: int, micro_batch: int, end: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]
    ) -> None:
        """Raise if a repetition did not leave the generators where its forward did."""
        if not _same(end, self._ends.get((stage, micro_batch), fresh)):
            for use, seen in zip(self._uses, self._configurations, strict=True):
                use.draws.pop(seen, None)
            raise RandomnessError(
                f"the recomputation of stage {stage}, micro-batch {micro_batch}, did not draw the random numbers of "
                "its forward. Either it does not draw in the same way twice, or something drew from the same generator "
                "meanwhile: a stage that had drawn nothing until now, or a thread of yours. Stages are observed anew "
                "from the next step on; run this one again, or use executor='serial'"
            )

    def _watched(self, stage: int) -> Generator[None]:
        sources = self._uses[stage].sources
        holders, before = _holders, _states(sources)
        yield
        if not _same(before, _states(sources)) and holders == _holders and not holders % 2:
            self._drew[stage] = self._surprised = True

    def settle(self) -> bool:
        """After the forward of the step: record who drew, and put the caller's generator right.

        False means that a stage drew without holding the generator: its numbers cannot be replayed, and the
        step must run again. All stages hold the generator then, so the second run cannot fail in the same way.
        """
        moved = not _same(_states(self._sources), self._after)
        # Where another pipe held the generators meanwhile, nothing can be told from their state.
        unexpected = moved and self.quiet and self._holders == _holders and not _holders % 2
        if self._surprised or unexpected:
            for use, seen, drew in zip(self._uses, self._configurations, self._drew, strict=True):
                use.draws.pop(seen, None)  # to be observed again, unless it is known to draw
                if drew:
                    use.draws[seen] = True
            self._restore()
            return False
        for use, seen, drew in zip(self._uses, self._configurations, self._drew, strict=True):
            use.draws[seen] = use.draws.get(seen, False) or drew
        if not self.quiet and not moved and not any(self._drew):
            self._restore()
        return True

    def _restore(self) -> None:
        _set(self._sources, self._before)


class Silence:
    """In place of `Dice`, for a step in the caller's thread whose kind drew nothing before: it only listens.

    Then nothing has to be known of the stages beforehand; what they draw would show in the generators' states.
    """

    quiet = True

    def __init__(self, uses: Sequence[RandomUse]) -> None:
        self._sources = list(dict.fromkeys(source for use in uses for source in use.sources))
        self._before = _states(self._sources)

    def broken(self) -> bool:
        """Whether something drew after all. Then the generators are put back: the step has to run again."""
        if _same(self._before, _states(self._sources)):
            return False
        _set(self._sources, self._before)
        return True
