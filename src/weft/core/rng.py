"""Random numbers that do not depend on who runs first.

PyTorch has one default generator per device and process. Two stages that draw from it at the same time mix
their streams: a recomputation then replays other numbers than its forward drew, and dropout gradients are
silently wrong. Here every (stage, micro-batch) draws from a seed of its own, and a stage that draws has a turn at the
generator while it runs (see `weft.core.turns`):

    caller's generator --one draw--> seed of the step --mix(stage, micro-batch)--> seed of the action

So results are bit-equal between the serial executor, threads and recomputation. A model that draws nothing
leaves the caller's generator as it was, and its stages never wait for each other.

Whether a stage draws is observed, not declared: in its first run it has a turn, and the state before is compared with
the one after. The verdict is kept per *configuration* of the stage (its `training` flags and every float
and bool attribute of its modules, such as a dropout probability); a new configuration is observed again.
A stage that was seen to draw nothing and then draws all the same (a branch on data, say) is noticed by the
state of the generator; the step is run again, all stages by turns. It goes unnoticed only while another stage
has its turn. Then that one's numbers are not those of other executors, but a recomputation must not go wrong
in silence: it compares where the generator ends with where it ended in the forward. That also fails where a thread
of the user's drew meanwhile, who takes no turns; so the recomputation is made again before it counts as a failure.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from weft.core.ambient import is_recomputing
from weft.core.errors import RandomnessError
from weft.core.repeats import repeats_layers
from weft.core.turns import Watch, restore, same, seeded, states, turn_at

Result = TypeVar("Result")

TRIES = 3
"""How often a recomputation is made at most, until its random numbers are those of its forward."""

_MASK = (1 << 64) - 1
_FREE = nullcontext()


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


def drawn(
    sources: Sequence[torch.Generator], seed: int, function: Callable[..., Result], *args: Any
) -> tuple[Result, bool]:
    """``function(*args)`` with the numbers of this seed, and whether it drew any. Nobody else's are touched."""
    with seeded(sources, seed) as fresh:
        found = function(*args)
        return found, not same(fresh, states(sources))


@dataclass
class RandomUse:
    """What is known about one stage, per configuration: whether it draws, and whether its backward runs layers again.
    Lives as long as the stage."""

    sources: tuple[torch.Generator, ...]
    draws: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])
    repeats: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])


class Dice:
    """The random numbers of one step (one mini-batch through all stages).

    `scope` surrounds every forward and recomputation of one stage with one micro-batch; it may be left out where
    `quiet` says that no stage is known to draw. `backward` surrounds a walk back. `settle`, called once after the
    forward of the whole step, says whether the numbers can be trusted.
    """

    def __init__(self, uses: Sequence[RandomUse], configurations: Sequence[Hashable]) -> None:
        self._uses = uses
        self._configurations = configurations
        self._known = [use.draws.get(seen) for use, seen in zip(uses, configurations, strict=True)]
        self._repeats: list[bool | None] = [None] * len(uses)
        self._drew = [False] * len(uses)
        self.quiet = not any(known is not False for known in self._known)
        self._surprised = False
        self._ends: dict[tuple[int, int], list[Tensor]] = {}
        self._failures: dict[tuple[int, int], int] = {}
        sources = list(dict.fromkeys(source for use in uses for source in use.sources))
        self.seed = 0
        with nullcontext() if self.quiet else turn_at(sources):
            self._watch = Watch(sources)
            if not self.quiet:
                self.seed = int(torch.randint(1 << 62, (), device="cpu"))
                self._after = states(sources)

    @contextmanager
    def scope(self, stage: int, micro_batch: int) -> Generator[None]:
        """Surround one forward of one stage: a turn at the generators, unless it is known to draw nothing."""
        use = self._uses[stage]
        if self._known[stage] is False:
            watch = Watch(use.sources)
            yield
            if watch.moved():
                self._drew[stage] = self._surprised = True
            return
        with seeded(use.sources, mix(self.seed, stage, micro_batch)) as fresh:
            yield
            end = states(use.sources)
        if is_recomputing():
            if not same(end, self._ends.get((stage, micro_batch), fresh)):
                self._fail(stage, micro_batch)
        elif not same(fresh, end):
            self._drew[stage] = True
            self._ends[stage, micro_batch] = end

    def _fail(self, stage: int, micro_batch: int) -> None:
        """A repetition did not leave the generators where its forward did."""
        failures = self._failures[stage, micro_batch] = self._failures.get((stage, micro_batch), 0) + 1
        if failures >= TRIES:
            for use, seen in zip(self._uses, self._configurations, strict=True):
                use.draws.pop(seen, None)
        raise RandomnessError(
            f"the recomputation of stage {stage}, micro-batch {micro_batch}, did not draw the random numbers of its "
            "forward. Either the stage does not draw in the same way twice. Or a thread of yours draws from PyTorch's "
            "default generator, even if the stage itself draws nothing: give that thread a torch.Generator of its "
            "own. Or a stage began to draw that had drawn nothing until now: stages are observed anew from the next "
            "step on, so run this one again. With checkpoint='never' nothing has to be drawn twice"
        )

    def backward(self, stage: int, roots: Callable[[], Sequence[Node]]) -> AbstractContextManager[Any]:
        """Surround one walk back through the graph of a stage that begins at `roots`.

        Where layers run again in it (`torch.utils.checkpoint` in a layer), they set the generators to what they were
        in their forward: then it takes a turn, if there is anybody in the step whom that would disturb.
        """
        if self.quiet:
            return _FREE
        repeats = self._repeats[stage]
        if repeats is None:
            use, seen = self._uses[stage], self._configurations[stage]
            if seen not in use.repeats:
                use.repeats[seen] = repeats_layers(roots())
            repeats = self._repeats[stage] = use.repeats[seen]
        return turn_at(self._uses[stage].sources) if repeats else _FREE

    def settle(self) -> bool:
        """After the forward of the step: record who drew, and put the caller's generator right.

        False means that a stage drew without a turn: its numbers cannot be replayed, and the step must run again.
        All stages take turns then, so the second run cannot fail in the same way.
        """
        uses = list(zip(self._uses, self._configurations, self._drew, strict=True))
        if self._surprised or (self.quiet and self._watch.moved()):
            for use, seen, drew in uses:
                use.draws.pop(seen, None)  # to be observed again, unless it is known to draw
                if drew:
                    use.draws[seen] = True
            self._watch.put_back()
            return False
        for use, seen, drew in uses:
            use.draws[seen] = use.draws.get(seen, False) or drew
        if not self.quiet and not any(self._drew):
            with turn_at(self._watch.sources):
                if same(states(self._watch.sources), self._after):
                    restore(self._watch.sources, self._watch.before)
        return True


class Silence:
    """In place of `Dice`, for a step in the caller's thread whose kind drew nothing before: it only listens.

    Then nothing has to be known of the stages beforehand; what they draw would show in the generators' states.
    """

    quiet = True

    def __init__(self, uses: Sequence[RandomUse]) -> None:
        self._watch = Watch(list(dict.fromkeys(source for use in uses for source in use.sources)))

    def broken(self) -> bool:
        """Whether something drew after all. Then the generators are put back: the step has to run again."""
        if not self._watch.moved():
            return False
        self._watch.put_back()
        return True
