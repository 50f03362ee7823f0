"""Random numbers that do not depend on who runs first, drawn from the process-wide generators.

PyTorch has one default generator per device and process. Two stages that draw from it at the same time mix their
streams: a recomputation then replays other numbers than its forward drew, and dropout gradients are silently wrong.
Here every (layer, micro-batch) draws from a seed of its own, and a stage holds the generators' lock while it runs:

    caller's generator --one draw--> seed of the step --mix(layer, micro-batch)--> seed of a layer's call

    thread A   --[ lock: seed, draw, seed, draw, restore ]--------------[ lock ...
    thread B           (waits)                         [ lock: ... ]

So results are bit-equal between the serial executor, threads and recomputation, and however layers make stages. A pipe
inside of a stage locks inside the lock of that stage, which its workers know by a context variable that executors carry
along. A stage that waits for another party, such as a remote expert, releases the lock meanwhile (`waiting`).

Whether a stage draws is observed, not declared, once per *configuration* (its `training` flags and every float and bool
attribute of its modules, such as a dropout probability): its first run holds the lock, and the state before is compared
with the one after. A model that draws nothing leaves the caller's generator as it was, and its stages never wait for
each other. A stage that was seen to draw nothing and then draws all the same (a branch on data, say) is noticed by the
state of the generator, and the step runs again under locks. It goes unnoticed only while another stage holds the lock.
Then that one's numbers are not those of other executors, but a recomputation must not go wrong in silence: it compares
where the generator ends with where it ended in the forward. That also fails where a thread of the user's drew
meanwhile, without the lock; so the recomputation is made again before it counts as a failure.

Layers that checkpoint themselves (`torch.utils.checkpoint`) run again inside of a backward: the first hook that unpacks
sets the generators to the state of the forward. No state of a generator tells of it afterwards, so the graph is
searched for such hooks.
"""

import os
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from weft.core.context import is_recomputing
from weft.core.errors import RandomnessError, UsageError
from weft.core.segment import children_first


class _ProcessLock:
    """The lock of one process. A forked child, which has no thread to release it, starts with a new one."""

    here: ClassVar["_ProcessLock"]

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changes = 0
        """How often it was taken or released; odd while it is held."""

    @classmethod
    def begin(cls) -> None:
        cls.here = cls()


_ProcessLock.begin()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ProcessLock.begin)


class GeneratorLock:
    """One holding of the lock, taken with the generators in the states `before`. What runs inside of it, in whichever
    thread, is kept apart by `inside`."""

    def __init__(
        self, process: _ProcessLock, outer: "GeneratorLock | None", sources: Sequence[torch.Generator]
    ) -> None:
        self.process = process
        self.outer = outer
        self.sources = sources
        self.before = states(sources)
        self.inside = threading.RLock()
        self.over = False
        self.thread = threading.get_ident()

    @property
    def lasts(self) -> bool:
        return not self.over and self.process is _ProcessLock.here


_held: ContextVar[GeneratorLock | None] = ContextVar("weft_generator_lock", default=None)


def _innermost() -> GeneratorLock | None:
    """The innermost lock that is held around this call. A worker's context may remember some that were released."""
    held = _held.get()
    while held is not None and not held.lasts:
        held = held.outer
    return held


def carry_lock() -> Callable[[], object]:
    """A call for the thread, or the context, where work goes on: makes it run inside the lock that is held here."""
    return partial(_held.set, _innermost())


@contextmanager
def lock_generators(sources: Sequence[torch.Generator]) -> Generator[GeneratorLock]:
    """Hold the generators' lock. A holder may lock again inside."""
    outer, process = _innermost(), _ProcessLock.here
    with process.lock if outer is None else outer.inside:
        held = GeneratorLock(process, outer, sources)
        token = _held.set(held)
        process.changes += outer is None
        try:
            yield held
        finally:
            held.over = True
            _held.reset(token)
            process.changes += outer is None


@contextmanager
def seeded(sources: Sequence[torch.Generator], seed: int) -> Generator[list[Tensor]]:
    """Hold the lock with this seed; gives the states then. Afterwards the generators are as they were before."""
    with lock_generators(sources) as held:
        try:
            for source in sources:
                source.manual_seed(seed)
            yield states(sources)
        finally:
            restore(sources, held.before)


@contextmanager
def waiting() -> Generator[None]:
    """Surround waiting for another party. If this thread holds the lock, it is released meanwhile.

    Where the stage goes on afterwards, it draws what it would have drawn. A worker of a pipe inside of a stage does
    not release it, since the lock is not its own.
    """
    held = _innermost()
    while held is not None and held.outer is not None and held.outer.lasts:
        held = held.outer
    if held is None or held.thread != threading.get_ident():
        yield
        return
    mine = states(held.sources)
    restore(held.sources, held.before)
    held.process.changes += 1
    held.process.lock.release()
    token = _held.set(None)  # this thread has none meanwhile
    try:
        yield
    finally:
        _held.reset(token)
        held.process.lock.acquire()
        held.process.changes += 1
        held.before = states(held.sources)
        restore(held.sources, mine)


class GeneratorWatch:
    """Detects that generators move without their lock. While another thread holds it, nothing can be told."""

    def __init__(self, sources: Sequence[torch.Generator]) -> None:
        self.sources = sources
        self._process = _ProcessLock.here
        self._changes = self._process.changes
        self.before = states(sources)

    def moved(self) -> bool:
        """Whether they were moved since, as far as can be told."""
        moved = not same(self.before, states(self.sources))
        return moved and self._changes == self._process.changes and not self._changes % 2

    def put_back(self) -> None:
        """The generators as they were."""
        with lock_generators(self.sources):
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


def repeats_layers(roots: Sequence[Node]) -> bool:
    """Whether the backward of the graph that begins at `roots` asks hooks for what was saved, as a layer that
    checkpoints itself makes it do. Looks at every node once; the graph must not have been walked yet."""
    return any(not isinstance(data, Tensor | None) for node in children_first(roots) for data in _saved(node))


def _saved(node: Node) -> Iterator[Any]:
    """What the node saved: tensors, or what hooks have made of them."""
    for name in _names(type(node)):
        found = getattr(node, name)
        several = cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)
        yield from (getattr(each, "data", None) for each in several)


@lru_cache(1024)
def _names(kind: type[Node]) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


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
    """The default generators that a stage on these devices may draw from: the CPU's, and each CUDA device's own."""
    found = [torch.default_generator]
    for device in dict.fromkeys(devices):
        require_supported(device)
        if device.type == "cuda":
            torch.cuda.init()  # PyTorch makes the generators of CUDA devices only then
            index = cast("int | None", device.index)
            found.append(torch.cuda.default_generators[torch.cuda.current_device() if index is None else index])
    return tuple(found)


def require_supported(device: torch.device) -> None:
    """Raise UsageError for a device of a type that weft was not tested on."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise UsageError(f"device {str(device)!r} is not supported: nothing was tested there; use 'cpu' or 'cuda'")


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


class DrawnSeed(NamedTuple):
    """A seed out of the caller's generators, with their states `before` and `after` it was drawn."""

    seed: int
    before: list[Tensor]
    after: list[Tensor]


def draw_seed(sources: Sequence[torch.Generator]) -> DrawnSeed:
    """Draw the seed of a step as `RngStreams` does, but leave the generators as they were."""
    with lock_generators(sources):
        before = states(sources)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        after = states(sources)
        restore(sources, before)
    return DrawnSeed(seed, before, after)


NextLayer = Callable[[int], None] | None
"""What a stage calls before each layer, with the layer's number in the model; None where it draws nothing."""


class RngStreams:
    """The random numbers of one step (one mini-batch through all stages).

    `scope` surrounds every forward and recomputation of one stage with one micro-batch; it may be left out where
    `quiet` says that no stage is known to draw. `backward` surrounds a walk back. `settle`, called once after the
    forward of the whole step, says whether the numbers can be trusted.
    """

    def __init__(
        self,
        uses: Mapping[int, RandomUse],
        configurations: Mapping[int, Hashable],
        agreed: DrawnSeed | None = None,
    ) -> None:
        """`uses` and `configurations` are those of the stages that run here, by stage. The seed is drawn from the
        caller's generator, unless all processes of a step have `agreed` on one."""
        self._uses = uses
        self._configurations = configurations
        self._known = {stage: use.draws.get(configurations[stage]) for stage, use in uses.items()}
        self._repeats: dict[int, bool] = {}
        self._drew: set[int] = set()
        self.quiet = not any(known is not False for known in self._known.values())
        self._surprised = False
        self._ends: dict[tuple[int, int], list[Tensor]] = {}
        self._failures: dict[tuple[int, int], int] = {}
        sources = list(dict.fromkeys(source for use in uses.values() for source in use.sources))
        self.seed = 0
        self._agreed = agreed
        with nullcontext() if self.quiet else lock_generators(sources):
            self._watch = GeneratorWatch(sources)
            if agreed is not None:
                self.seed = agreed.seed
            elif not self.quiet:
                self.seed = int(torch.randint(1 << 62, (), device="cpu"))
                self._after = states(sources)

    @contextmanager
    def scope(self, stage: int, micro_batch: int) -> Generator[NextLayer]:
        """Surround one forward of one stage: the generators locked and seeded, unless it is known to draw nothing.

        Gives what is to be called before each layer, with the layer's number in the model, which seeds it.
        """
        sources = self._uses[stage].sources
        if self._known[stage] is False:
            watch = GeneratorWatch(sources)
            yield None
            if watch.moved():
                self._drew.add(stage)
                self._surprised = True
            return
        ends: list[Tensor] = []  # the states after each layer

        def next_layer(layer: int) -> None:
            ends.extend(states(sources))
            seed = mix(self.seed, layer, micro_batch)
            for source in sources:
                source.manual_seed(seed)
            fresh.extend(states(sources))

        with seeded(sources, mix(self.seed, stage, micro_batch)) as fresh:
            yield next_layer
            ends += states(sources)
        if is_recomputing():
            if not same(ends, self._ends.get((stage, micro_batch), fresh)):
                self._fail(stage, micro_batch)
        elif not same(fresh, ends):
            self._drew.add(stage)
            self._ends[stage, micro_batch] = ends

    def _fail(self, stage: int, micro_batch: int) -> None:
        """A repetition did not leave the generators where its forward did."""
        failures = self._failures[stage, micro_batch] = self._failures.get((stage, micro_batch), 0) + 1
        if failures >= TRIES:
            for number, use in self._uses.items():
                use.draws.pop(self._configurations[number], None)
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
        in their forward: then they are locked. A step that is `quiet` needs none.
        """
        repeats = self._repeats.get(stage)
        if repeats is None:
            use, seen = self._uses[stage], self._configurations[stage]
            if seen not in use.repeats:
                use.repeats[seen] = repeats_layers(roots())
            repeats = self._repeats[stage] = use.repeats[seen]
        return lock_generators(self._uses[stage].sources) if repeats else _FREE

    def vote(self) -> "RngVote":
        """After the forward of the step: what was seen of its stages here."""
        return RngVote(bool(self._drew), self._surprised or (self.quiet and self._watch.moved()))

    def settle(self, vote: "RngVote | None" = None) -> bool:
        """Record which stages drew, and put the caller's generator right, by a `vote` on all stages.

        Default: that on the stages here. False means that a stage drew without the lock: its numbers cannot be
        replayed, and the step must run again. All stages lock then, so the second run cannot fail in the same way.
        """
        vote = vote or self.vote()
        if vote.surprised:
            for stage, use in self._uses.items():
                seen = self._configurations[stage]
                use.draws.pop(seen, None)  # to be observed again, unless it is known to draw
                if stage in self._drew:
                    use.draws[seen] = True
            self._watch.put_back()
            return False
        for stage, use in self._uses.items():
            seen = self._configurations[stage]
            use.draws[seen] = use.draws.get(seen, False) or stage in self._drew
        if self._agreed is not None:
            # A process whose own stages draw nothing advances too, so that the generators of all of them stay alike.
            with lock_generators(self._watch.sources):
                restore(self._watch.sources, self._agreed.after if vote.drew else self._agreed.before)
        elif not self.quiet and not vote.drew:
            with lock_generators(self._watch.sources):
                if same(states(self._watch.sources), self._after):
                    restore(self._watch.sources, self._watch.before)
        return True


class RngVote(NamedTuple):
    """What is seen of the random numbers of a step: whether any were drawn, and whether some were without the lock."""

    drew: bool
    surprised: bool

    @staticmethod
    def of(votes: Sequence["RngVote"]) -> "RngVote":
        """One for all, out of those of several processes."""
        return RngVote(any(each.drew for each in votes), any(each.surprised for each in votes))


class RngProbe:
    """In place of `RngStreams`, for a step in the caller's thread whose kind drew nothing before: it only listens. What
    the stages draw would show in the generators' states."""

    quiet = True

    def __init__(self, uses: Sequence[RandomUse]) -> None:
        self._watch = GeneratorWatch(list(dict.fromkeys(source for use in uses for source in use.sources)))

    def broken(self) -> bool:
        """Whether something drew after all. Then the generators are put back: the step has to run again."""
        if not self._watch.moved():
            return False
        self._watch.put_back()
        return True
