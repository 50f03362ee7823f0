"""A model's forward() on all ranks together: each call runs on the rank that has its parameters.

    every rank     forward() of the model, line by line
    a call that reads parameters     runs on the rank that has them --result--> all other ranks
    any other call                   runs on every rank

So Python between blocks sees real numbers on all ranks, and no rank needs parameters of another one. Ranks take part in
the same order, so a message is found by its number in the walk.
"""

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft.core.errors import SplitError
from weft.core.pytree import flatten, from_plain, register_dataclasses, to_plain, unflatten
from weft.core.segment import version
from weft.pipeline.microbatch import storage_id
from weft.pipeline.processes.executor import Channel
from weft.pipeline.processes.links import Walk
from weft.pipeline.split.open_state import PLAIN
from weft.pipeline.split.program import Owned, Program, Step, Values, perform
from weft.pipeline.split.record import ForwardRecorder

_TOLD, _COPIED = -5, -6  # routes of addresses; those of values are numbered from 0

EQUAL_EVERYWHERE = (
    "what the code between blocks goes by (attributes, globals, random numbers, the environment) must be equal on all "
    "ranks"
)
Finding = TypeVar("Finding")
Observed = tuple[Any, list[bool]]
"""The result of a call, and flags that only the rank which ran it knows."""


class Together:
    """The part of one rank in calls that all ranks make together."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._connected: Channel | None = None
        self._homes: Mapping[int, int] = {}
        self._walk: Walk | None = None
        self._numbers = count()

    def open(self, channel: Channel, what: str) -> None:
        """Open a walk for the messages of this rank, unless one is open."""
        self._connected = channel
        channel.open(what)

    @property
    def _channel(self) -> Channel:
        assert self._connected is not None, "a walk is open"
        return self._connected

    def set_homes(self, homes: Mapping[int, int]) -> None:
        """The rank of each parameter, by its id()."""
        self._homes = homes

    def call(self, step: Step, run: Callable[..., Observed], args: Any, kwargs: Any) -> Observed:
        """Run a step by `run`, on the rank that has most of the parameters that it reads."""
        module = step.module
        leaves, structure = flatten((tuple(args), kwargs))
        parameters = [*([] if module is None else module.parameters()), *leaves]
        parameters = list({id(x): x for x in parameters if isinstance(x, nn.Parameter)}.values())
        bytes_on: Counter[int] = Counter()
        for parameter in parameters:
            bytes_on[self._homes[id(parameter)]] += parameter.nbytes
        if not bytes_on:
            return run(*args, **kwargs)
        runner = max(sorted(bytes_on), key=bytes_on.__getitem__)
        number = next(self._begun())
        copies = self._copy_to(runner, number, [x for x in parameters if self._homes[id(x)] != runner])
        modules = [] if module is None else list(module.modules())
        given = [*leaves, *parameters, *(each for m in modules for each in m._buffers.values())]
        if self.rank != runner:
            name, *told = decode(self._channel.walk.receive((_TOLD, 0, number), runner), given)
            if name != step.name:
                raise SplitError(
                    f"forward() goes another way on each rank: rank {runner} of the group is at {name}, rank "
                    f"{self.rank} at {step}; {EQUAL_EVERYWHERE}"
                )
            return _apply(*told, given, modules)
        versions = [version(x) if isinstance(x, Tensor) else 0 for x in given]
        before = [dict(vars(m)) for m in modules]
        hooked: list[Any] = []
        with _Substituted(modules, copies), _watching_hooked(modules, hooked):
            args, kwargs = unflatten(structure, [copies.get(id(x), x) for x in leaves])
            result, flags = run(*args, **kwargs)
        originals = {id(copy): parameter for parameter in parameters if (copy := copies.get(id(parameter))) is not None}
        register_dataclasses(result)
        made, nesting = flatten(result)
        result = unflatten(nesting, [originals.get(id(x), x) for x in made])
        written = [k for k, x in enumerate(given) if isinstance(x, Tensor) and version(x) != versions[k]]
        contents = [(k, given[k].detach().clone().requires_grad_(given[k].requires_grad)) for k in written]
        pairs = enumerate(zip(modules, before, strict=True))
        stored = [(k, key, x) for k, (m, held) in pairs for key, x in vars(m).items() if _is_new(x, held.get(key))]
        self._send(number, encode((step.name, result, flags, contents, stored, hooked), given))
        return result, flags

    def announce(self, *content: Any) -> None:
        """Tell all other ranks what to do next."""
        self._send(next(self._begun()), encode(content))

    def hear(self, source: int) -> Any:
        """What a rank has announced."""
        return decode(self._channel.walk.receive((_TOLD, 0, next(self._begun())), source))

    def settle(self, finding: Finding | None) -> Finding | None:
        """The first finding of all ranks, which is a plain value."""
        number, others = next(self._begun()), self._others()
        self._send(number, [finding])
        found = {rank: self._channel.walk.receive((_TOLD, 0, number), rank)[0] for rank in others}
        found[self.rank] = finding
        return next((found[rank] for rank in sorted(found) if found[rank] is not None), None)

    def compare(self, report: Any, what: str) -> list[Any]:
        """The plain reports of all ranks. The walk ends, so that all ranks have them or all raise; another begins."""
        reports = self._channel.walk.agree(report)
        self._channel.end()
        self._channel.open(what)
        return reports

    def _begun(self) -> "count[int]":
        """The numbers of the calls in this walk."""
        if self._walk is not self._channel.walk:
            self._walk, self._numbers = self._channel.walk, count()
        return self._numbers

    def _others(self) -> list[int]:
        return [rank for rank in range(self._channel.links.size) if rank != self.rank]

    def _send(self, number: int, message: Any) -> None:
        for rank in self._others():
            self._channel.walk.send(rank, (_TOLD, 0, number), message)

    def _copy_to(self, runner: int, number: int, missing: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        """Send the runner the parameters that it lacks. There, copies of them by the id() of the placeholder."""
        copies: dict[int, nn.Parameter] = {}
        for k, parameter in enumerate(missing):
            owner, address = self._homes[id(parameter)], (_COPIED, k, number)
            if self.rank == owner:
                self._channel.walk.send(runner, address, parameter.detach())
            elif self.rank == runner:
                copies[id(parameter)] = nn.Parameter(
                    self._channel.walk.receive(address, owner), parameter.requires_grad
                )
        return copies


class _Substituted:
    """Modules have copies in the place of some parameters inside."""

    def __init__(self, modules: Sequence[nn.Module], copies: Mapping[int, nn.Parameter]) -> None:
        tables = [module._parameters for module in modules]
        self._slots = [(table, key, x) for table in tables for key, x in table.items() if id(x) in copies]
        self._copies = copies

    def __enter__(self) -> None:
        for table, key, parameter in self._slots:
            table[key] = self._copies[id(parameter)]

    def __exit__(self, *_: object) -> None:
        for table, key, parameter in self._slots:
            table[key] = parameter


def _is_new(value: Any, before: Any) -> bool:
    """Whether a call has stored this attribute, and other ranks can get it."""
    return value is not before and isinstance(value, Tensor | PLAIN)


@contextmanager
def _watching_hooked(modules: Sequence[nn.Module], calls: list[Any]) -> Generator[None]:
    """Note in `calls` each call of a module with forward hooks: its number, its arguments and its output."""

    def note(number: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((number, args, kwargs, output))

    hooked = [(k, module) for k, module in enumerate(modules) if module._forward_hooks]
    handles = [module.register_forward_hook(partial(note, k), with_kwargs=True) for k, module in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _apply(
    result: Any, flags: Any, contents: Any, stored: Any, calls: Any, given: Sequence[Any], modules: Sequence[nn.Module]
) -> Observed:
    """The result of a call on another rank. What the call has written, stored and given to hooks there is written,
    stored and given to hooks here."""
    for k, content in contents:
        target = given[k]
        tracked = content.requires_grad and not (target.is_leaf and target.requires_grad)
        with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
            target.copy_(content)  # in place, so that the version counts
    for k, key, value in stored:
        vars(modules[k])[key] = value
    for k, args, kwargs, output in calls:
        module: Any = modules[k]
        for key, hook in [*module._forward_hooks.items()]:
            with_kwargs = key in module._forward_hooks_with_kwargs
            hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
    return result, flags


def encode(value: Any, given: Sequence[Any] = ()) -> Any:
    """A nested value as a message. Tensors of `given` travel as their number, views of them as such. Other tensors keep
    their strides, and memory that they share."""
    leaves, structure = flatten(value)
    numbers = {id(x): k for k, x in reversed([*enumerate(given)]) if isinstance(x, Tensor)}
    memory = {
        (storage_id(x), x.dtype): k
        for k, x in reversed([*enumerate(given)])
        if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.layout is torch.strided
    }
    places: list[list[Any] | None] = []
    seen: dict[int, int] = {}
    plain: list[Any] = []
    tensors: list[Tensor] = []
    spans: dict[Any, tuple[int, int, Tensor]] = {}
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            places.append(None)
            plain.append(leaf)
        elif seen.setdefault(id(leaf), position) != position:
            places.append([-2, seen[id(leaf)]])  # one tensor stays one
        elif id(leaf) in numbers:
            places.append([numbers[id(leaf)]])
        elif leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            places.append([-1, len(tensors)])
            tensors.append(leaf)
        else:
            key = storage_id(leaf), leaf.dtype
            start, length = (
                leaf.storage_offset(),
                sum((n - 1) * by for n, by in zip(leaf.shape, leaf.stride(), strict=True)),
            )
            shape = [list(leaf.shape), list(leaf.stride()), start]
            if key in memory:
                places.append([memory[key], *shape])
                continue
            low, high, _ = spans.get((*key, leaf.requires_grad), (start, start, leaf))
            spans[(*key, leaf.requires_grad)] = min(low, start), max(high, start + length + bool(leaf.numel())), leaf
            places.append([(*key, leaf.requires_grad), *shape])
    # A clone, because a rank goes on before its messages have left, and may write into the tensor.
    flat = {key: x.detach().as_strided((high - low,), (1,), low).clone() for key, (low, high, x) in spans.items()}
    order = {key: len(tensors) + k for k, key in enumerate(flat)}
    for place in places:
        if place is not None and isinstance(place[0], tuple):
            key = place[0]
            place[:] = [-1, order[key], *place[1:3], place[3] - spans[key][0]]
    tensors += [x.requires_grad_(key[2]) for key, x in flat.items()]
    about = json.dumps([to_plain(structure, classes=True), places])
    return [about, plain, tensors]


def decode(message: Any, given: Sequence[Any] = ()) -> Any:
    """The inverse of `encode`, with the tensors of this process in the places of `given`."""
    about, plain, tensors = message
    structure, places = json.loads(about)
    rest = iter(plain)
    made = [x.clone() for x in tensors]  # with a graph, where there is one: the result of a call is not a leaf
    leaves: list[Any] = []
    for place in places:
        if place is None:
            leaves.append(next(rest))
            continue
        number, *shape = place
        if number == -2:
            leaves.append(leaves[shape[0]])
            continue
        base = given[number] if number >= 0 else made[shape.pop(0)]
        leaves.append(base.as_strided(*shape) if shape else base)
    return unflatten(from_plain(structure, classes=True), leaves)


class TogetherRecorder(ForwardRecorder):
    """A recorder on every rank. All ranks record one program."""

    def __init__(self, together: Together, *args: Any) -> None:
        super().__init__(*args)
        self.watched, self._together = True, together

    def _recorded(self, step: Step, run: Callable[..., Any]) -> Any:
        def observed(*args: Any, **kwargs: Any) -> Observed:
            return run(*args, **kwargs), [self.drew, self.dynamic]

        def run_together(*args: Any, **kwargs: Any) -> Any:
            result, flags = self._together.call(step, observed, args, kwargs)
            self.drew, self.dynamic = flags
            return result

        return super()._recorded(step, run_together)

    def replay(self, program: Program, leaves: Sequence[Any], owned: Owned) -> Any:
        """See `ForwardRecorder.replay`. Without stages: one step after the other."""
        recording = program.recording
        values = program.given(leaves, owned, recording.steps, recording.reads.values())
        for step in recording.steps:
            self.perform(step, step.leaves, values)
        return program.result(values)

    def perform(self, step: Step, constants: Sequence[Any], values: Values) -> None:
        """See `ForwardRecorder.perform`."""

        def observed(*args: Any, **kwargs: Any) -> Observed:
            return step.call(*args, **kwargs), []

        def run_together(*args: Any, **kwargs: Any) -> Any:
            return self._together.call(step, observed, args, kwargs)[0]

        perform(step, constants, values, call=run_together)

    def settle(self, finding: Finding | None) -> Finding | None:
        """See `ForwardRecorder.settle`."""
        return self._together.settle(finding)
