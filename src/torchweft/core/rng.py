"""Random numbers that do not depend on thread timing, drawn from PyTorch's process-wide generators.

PyTorch has one default generator per device and process. Two stages that draw from it at the same time mix their
streams: a recomputation then replays other numbers than its forward drew, and dropout gradients are silently wrong. A
`torch.Generator` per stage does not help, because `nn.Dropout` and most operators of layers accept none. Instead, every
(layer, micro-batch) gets its own seed, and a stage holds the lock of the generators while it runs:

    caller's generator --one draw--> seed of the step --mix(layer, micro-batch)--> seed of a layer's call

    thread A   --[ lock: seed, draw, seed, draw, restore ]--------------[ lock ...
    thread B           (waits)                         [ lock: ... ]

Results are therefore bit-equal between the serial executor, threads and recomputation, wherever the model is cut. A
pipe inside a stage locks within the lock of that stage, which its workers find through a context variable. A stage that
waits for another party, e.g. a remote expert, releases the lock (`lock_released`).

Drawing is observed, not declared, once per *configuration*: the `training` flags and every float and bool attribute of
the modules, e.g. a dropout probability. The first run of a stage holds the lock and compares the generator states
before and after it. A model that draws nothing leaves the caller's generator unchanged, and its stages never wait.

If a stage that drew nothing so far suddenly draws (e.g. in a data-dependent branch), the changed generator state
reveals it, and the step is repeated under locks. This check fails only while another stage holds the lock. Then the
numbers differ from those of other executors, but a recomputation still cannot go wrong silently: it compares the final
generator state with that of the forward. That comparison also fails if a thread of the application drew without the
lock, so the recomputation is repeated before it counts as a failure.

Layers that checkpoint themselves (`torch.utils.checkpoint`) run again during backward. Their hooks set the generators
to the states of the forward and restore them, so the states reveal nothing. The graph is searched for such hooks.
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

from torchweft.core.context import is_recomputing
from torchweft.core.errors import RandomnessError, UsageError
from torchweft.core.segment import children_first


class _ProcessLock:
    """Lock of the generators of one process, with a count of its transitions."""

    current: ClassVar["_ProcessLock"]

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.changes = 0  # number of acquisitions and releases, which is odd while it is held

    def acquire(self) -> None:
        self._lock.acquire()
        self.changes += 1  # here and below while the lock is held, so that no two threads write it at once

    def release(self) -> None:
        self.changes += 1
        self._lock.release()

    @classmethod
    def replace(cls) -> None:
        """Start with a new lock. A forked child needs one: the thread that holds the old one does not exist there."""
        cls.current = cls()


_ProcessLock.replace()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ProcessLock.replace)


class GeneratorLock:
    """One acquisition of the lock by `lock_generators`, with the generator states `before` it."""

    def __init__(self, outer: "GeneratorLock | None", sources: Sequence[torch.Generator]) -> None:
        self.outer = outer
        self.before = get_states(sources)
        # Serialises the locks taken within this one. It cannot be the process lock, because that belongs to the thread
        # of the stage, and the workers of a pipe inside that stage are other threads.
        self.inner = threading.RLock()
        self._process = _ProcessLock.current
        self._sources = sources
        self._ended = False
        self._thread = threading.get_ident()

    @property
    def is_held(self) -> bool:
        # A forked child inherits the object, but not the lock that it stands for.
        return not self._ended and self._process is _ProcessLock.current

    def end(self) -> None:
        self._ended = True

    @contextmanager
    def released(self) -> Generator[None]:
        """Release the lock for a while, with the generators as they were before it."""
        if self._thread != threading.get_ident():  # only the thread that acquired the lock can release it
            yield
            return
        own = get_states(self._sources)
        set_states(self._sources, self.before)
        self._process.release()
        token = _held.set(None)
        try:
            yield
        finally:
            _held.reset(token)
            self._process.acquire()
            # Other threads have drawn since. Their states are those to restore at the end, not the earlier ones.
            self.before = get_states(self._sources)
            set_states(self._sources, own)


_held: ContextVar[GeneratorLock | None] = ContextVar("torchweft_generator_lock", default=None)


def _innermost() -> GeneratorLock | None:
    """The innermost lock held around this call. The context of a worker can still contain locks that have ended."""
    held = _held.get()
    while held is not None and not held.is_held:
        held = held.outer
    return held


def carry_lock() -> Callable[[], object]:
    """Return a callback that makes another thread or context run within the lock that is held here."""
    return partial(_held.set, _innermost())


@contextmanager
def lock_generators(sources: Sequence[torch.Generator]) -> Generator[GeneratorLock]:
    """Hold the lock of the generators. It can be nested."""
    outer = _innermost()
    lock = _ProcessLock.current if outer is None else outer.inner
    lock.acquire()
    try:
        held = GeneratorLock(outer, sources)
        token = _held.set(held)
        try:
            yield held
        finally:
            held.end()
            _held.reset(token)
    finally:
        lock.release()


@contextmanager
def seed_generators(sources: Sequence[torch.Generator], seed: int) -> Generator[list[Tensor]]:
    """Hold the lock with the generators seeded, and yield their states. At the end, the earlier states return."""
    with lock_generators(sources) as held:
        try:
            for source in sources:
                source.manual_seed(seed)
            yield get_states(sources)
        finally:
            set_states(sources, held.before)


@contextmanager
def lock_released() -> Generator[None]:
    """Surround a wait for another party. If this thread holds the lock, the lock is released during the wait."""
    # Afterwards the stage continues with the numbers that it would have drawn without the wait. A worker of a pipe
    # inside a stage does not release the lock, because the lock belongs to the thread of that stage.
    held = _innermost()
    while held is not None and held.outer is not None and held.outer.is_held:
        held = held.outer
    with nullcontext() if held is None else held.released():
        yield


class GeneratorWatch:
    """Detects draws without the lock. It detects nothing while another thread holds the lock."""

    def __init__(self, sources: Sequence[torch.Generator]) -> None:
        self.sources = sources
        self._process = _ProcessLock.current
        self._changes = self._process.changes
        self.before = get_states(sources)

    def moved(self) -> bool:
        """Whether the generators advanced since, as far as can be detected."""
        moved = not same(self.before, get_states(self.sources))
        # A changed or odd count means that a lock holder may have advanced them. That is legitimate.
        return moved and self._changes == self._process.changes and not self._changes % 2

    def put_back(self) -> None:
        """Restore the generators to their states at the start of the watch."""
        with lock_generators(self.sources):
            set_states(self.sources, self.before)


def get_states(sources: Sequence[torch.Generator]) -> list[Tensor]:
    return [source.get_state() for source in sources]


def set_states(sources: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for source, state in zip(sources, states, strict=True):
        source.set_state(state)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def repeats_layers(roots: Sequence[Node]) -> bool:
    """Whether the backward of this graph calls hooks to unpack saved tensors, as self-checkpointing layers do."""
    # Visits every node once. The graph must not have been walked yet, because a walk frees the saved tensors.
    return any(not isinstance(data, Tensor | None) for node in children_first(roots) for data in _saved_data(node))


def _saved_data(node: Node) -> Iterator[Any]:
    """The saved tensors of the node, or the objects into which hooks have packed them."""
    for name in _saved_names(type(node)):
        value = getattr(node, name)
        saved_values = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
        yield from (getattr(saved, "data", None) for saved in saved_values)


@lru_cache(1024)
def _saved_names(kind: type[Node]) -> list[str]:
    # `_saved_x` would call the unpack hook, i.e. recompute the layer. `_raw_saved_x` only looks at the packed object.
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


Result = TypeVar("Result")

# Maximum number of times that a recomputation runs until its random numbers are those of its forward.
MAX_RECOMPUTATIONS = 3

_MASK = (1 << 64) - 1
_FREE = nullcontext()


def derive_seed(seed: int, *keys: int) -> int:
    """Derive a 63-bit seed from another seed and some keys, by the finaliser of splitmix64 (Steele et al., 2014)."""
    for key in keys:
        # Key + 1, because otherwise key 0 would map seed 0 to 0.
        seed = (seed + (key + 1) * 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed >> 1


def new_seed() -> int:
    """Draw a seed from the caller's CPU generator, which advances by one draw."""
    return int(torch.randint(1 << 62, (), device="cpu"))  # not on the default device of the caller


def generators_of(devices: Iterable[torch.device]) -> tuple[torch.Generator, ...]:
    """The default generators that a stage on these devices can draw from: that of the CPU and of each CUDA device."""
    sources = [torch.default_generator]
    for device in dict.fromkeys(devices):
        require_supported(device)
        if device.type == "cuda":
            torch.cuda.init()  # PyTorch creates the generators of CUDA devices at this point
            index = cast("int | None", device.index)
            sources.append(torch.cuda.default_generators[torch.cuda.current_device() if index is None else index])
    return tuple(sources)


def require_supported(device: torch.device) -> None:
    """Raise UsageError for a device of a type that torchweft was not tested on."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise UsageError(f"device {str(device)!r} is not supported: nothing was tested there; use 'cpu' or 'cuda'")


def call_with_seed(
    sources: Sequence[torch.Generator], seed: int, function: Callable[..., Result], *args: Any
) -> tuple[Result, bool]:
    """Call ``function(*args)`` with the numbers of this seed. Return its result, and whether it drew any."""
    with seed_generators(sources, seed) as fresh:
        result = function(*args)
        return result, not same(fresh, get_states(sources))


@dataclass
class RandomUse:
    """Observations of one stage by configuration: whether it draws, and whether its backward runs layers again."""

    sources: tuple[torch.Generator, ...]
    draws: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])
    repeats: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])


class DrawnSeed(NamedTuple):
    """A seed from the caller's generators, with their states `before` and `after` it was drawn."""

    seed: int
    before: list[Tensor]
    after: list[Tensor]


def draw_seed(sources: Sequence[torch.Generator]) -> DrawnSeed:
    """Draw the seed of a step as `RngStreams` does, but leave the generators unchanged."""
    with lock_generators(sources):
        before = get_states(sources)
        seed = new_seed()
        after = get_states(sources)
        set_states(sources, before)
    return DrawnSeed(seed, before, after)


# Callback of a stage before each layer, with the layer's number in the model. None if the stage draws nothing.
NextLayer = Callable[[int], None] | None


class RngStreams:
    """Random numbers of one step (one mini-batch through all stages).

    `scope` surrounds every forward and recomputation of one stage with one micro-batch. It can be left out if `quiet`
    says that no stage is known to draw. `backward` surrounds a walk back. `commit_draws`, called once after the forward
    of the whole step, returns whether the numbers are reproducible.
    """

    def __init__(
        self, uses: Mapping[int, RandomUse], configurations: Mapping[int, Hashable], agreed: DrawnSeed | None = None
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
                self.seed = new_seed()
                self._after = get_states(sources)

    @contextmanager
    def scope(self, stage: int, micro_batch: int) -> Generator[NextLayer]:
        """Surround one forward of one stage: locks and seeds the generators, unless the stage is known not to draw."""
        # Yields the callback that seeds each layer.
        sources = self._uses[stage].sources
        if self._known[stage] is False:
            watch = GeneratorWatch(sources)
            yield None
            if watch.moved():
                self._drew.add(stage)
                self._surprised = True
            return
        ends: list[Tensor] = []

        def next_layer(layer: int) -> None:
            ends.extend(get_states(sources))
            seed = derive_seed(self.seed, layer, micro_batch)
            for source in sources:
                source.manual_seed(seed)
            fresh.extend(get_states(sources))

        # `fresh` has the states at the start of the scope and of each layer, `ends` those at their ends. They differ
        # exactly if something drew. Comparing only first and last would miss it, because each layer sets a new seed.
        with seed_generators(sources, derive_seed(self.seed, stage, micro_batch)) as fresh:
            yield next_layer
            ends += get_states(sources)
        if is_recomputing():
            # A stage without recorded ends drew nothing in its forward, so it must end where it began.
            if not same(ends, self._ends.get((stage, micro_batch), fresh)):
                self._fail(stage, micro_batch)
        elif not same(fresh, ends):
            self._drew.add(stage)
            self._ends[stage, micro_batch] = ends

    def _fail(self, stage: int, micro_batch: int) -> None:
        """Reject a recomputation that did not leave the generators where its forward left them."""
        failures = self._failures[stage, micro_batch] = self._failures.get((stage, micro_batch), 0) + 1
        if failures >= MAX_RECOMPUTATIONS:
            # The observation that the stages draw nothing may be wrong. Forget it, so that the next step locks again.
            for number, use in self._uses.items():
                use.draws.pop(self._configurations[number], None)
        raise RandomnessError(
            f"the recomputation of stage {stage}, micro-batch {micro_batch}, did not draw the random numbers of its "
            "forward. Either the stage does not draw in the same way twice. Or a thread of yours draws from PyTorch's "
            "default generator, even if the stage itself draws nothing: give that thread a torch.Generator of its "
            "own. Or a stage that had drawn nothing began to draw: stages are observed again from the next step on, so "
            "run this one again. With checkpoint='never' nothing has to be drawn twice"
        )

    def backward(self, stage: int, roots: Callable[[], Sequence[Node]]) -> AbstractContextManager[Any]:
        """Surround one walk back through the graph of a stage that begins at `roots`."""
        # If layers run again in it (`torch.utils.checkpoint` in a layer), the lock is held, because these layers set
        # the generators to their states of the forward. A step that is `quiet` does not need this.
        repeats = self._repeats.get(stage)
        if repeats is None:
            use, configuration = self._uses[stage], self._configurations[stage]
            if configuration not in use.repeats:
                use.repeats[configuration] = repeats_layers(roots())
            repeats = self._repeats[stage] = use.repeats[configuration]
        return lock_generators(self._uses[stage].sources) if repeats else _FREE

    def vote(self) -> "RngVote":
        return RngVote(bool(self._drew), self._surprised or (self.quiet and self._watch.moved()))

    def commit_draws(self, vote: "RngVote | None" = None) -> bool:
        """Record which stages drew, and set the caller's generator accordingly, by a `vote` on all stages."""
        # Default: the vote of the stages here. False means that a stage drew without the lock, so its numbers cannot be
        # replayed and the step must run again. Then all stages lock, so the second run cannot fail in the same way.
        vote = vote or self.vote()
        if vote.surprised:
            for stage, use in self._uses.items():
                configuration = self._configurations[stage]
                # Unknown again, so that the second run locks. A stage that drew is known to draw.
                use.draws.pop(configuration, None)
                if stage in self._drew:
                    use.draws[configuration] = True
            self._watch.put_back()
            return False
        for stage, use in self._uses.items():
            configuration = self._configurations[stage]
            use.draws[configuration] = use.draws.get(configuration, False) or stage in self._drew
        if self._agreed is not None:
            # A process whose own stages draw nothing advances too, so that the generators of all processes stay equal.
            with lock_generators(self._watch.sources):
                set_states(self._watch.sources, self._agreed.after if vote.drew else self._agreed.before)
        elif not self.quiet and not vote.drew:
            with lock_generators(self._watch.sources):
                # Take the draw of the seed back, unless another thread has advanced the generators since.
                if same(get_states(self._watch.sources), self._after):
                    set_states(self._watch.sources, self._watch.before)
        return True


class RngVote(NamedTuple):
    """Observations of the random numbers of a step: whether any were drawn, and whether some without the lock."""

    drew: bool
    surprised: bool

    @staticmethod
    def of(votes: Sequence["RngVote"]) -> "RngVote":
        return RngVote(any(vote.drew for vote in votes), any(vote.surprised for vote in votes))


class RngProbe:
    """Replaces `RngStreams` for a step in the caller's thread, if such steps drew nothing before. It only observes."""

    quiet = True

    def __init__(self, uses: Sequence[RandomUse]) -> None:
        self._watch = GeneratorWatch(list(dict.fromkeys(source for use in uses for source in use.sources)))

    def has_drawn(self) -> bool:
        """Whether something drew nevertheless. Then the generators are restored, and the step must run again."""
        if not self._watch.moved():
            return False
        self._watch.put_back()
        return True
