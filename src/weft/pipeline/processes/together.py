"""A model's forward() on all ranks together: each call runs on the rank that has its parameters.

    every rank     forward() of the model, line by line
    a call that reads parameters     runs on the rank that has them --result--> all other ranks
    any other call                   runs on every rank

So Python between blocks sees real numbers on all ranks, and no rank needs parameters of another one. Ranks take part in
the same order, so a message is found by its number in the walk.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError, SplitError
from weft.core.pytree import flatten, register_dataclasses, unflatten
from weft.core.segment import version
from weft.pipeline.processes.links import Walk
from weft.pipeline.processes.packing import pack, unpack
from weft.pipeline.processes.rank_executor import Channel
from weft.pipeline.split.open_state import PLAIN
from weft.pipeline.split.program import Instruction, Owned, Program, Values, perform
from weft.pipeline.split.record import SHAPES, ForwardRecorder
from weft.pipeline.weights import replaced_in

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

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self._device = rank, device
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

    def call(self, step: Instruction, run: Callable[..., Observed], args: Any, kwargs: Any) -> Observed:
        """Run a step by `run`, on the rank that has most of the parameters that it reads."""
        leaves, structure = flatten((tuple(args), kwargs))
        modules: list[nn.Module] = [] if step.module is None else list(step.module.modules())
        read: list[Any] = [*leaves, *(each for module in modules for each in module._parameters.values())]
        parameters = list({id(x): x for x in read if isinstance(x, nn.Parameter)}.values())
        if not parameters or step.call in SHAPES:  # placeholders have shapes
            return run(*args, **kwargs)
        bytes_on: Counter[int] = Counter()
        for parameter in parameters:
            bytes_on[self._homes[id(parameter)]] += parameter.nbytes
        runner, number = max(sorted(bytes_on), key=bytes_on.__getitem__), next(self._begun())
        copies = self._copy_to(runner, number, [x for x in parameters if self._homes[id(x)] != runner])
        given: list[Any] = [*leaves, *parameters, *(each for module in modules for each in module._buffers.values())]
        if self.rank != runner:
            name, *told = self._receive(number, runner, given)
            if name != step.name:
                raise SplitError(
                    f"forward() goes another way on each rank: rank {runner} of the group is at {name}, rank "
                    f"{self.rank} at {step}; {EQUAL_EVERYWHERE}"
                )
            effects = Effects(*told)
            effects.repeat(given, modules)
        else:
            with _substituted(modules, copies):
                args, kwargs = unflatten(structure, [copies.get(id(x), x) for x in leaves])
                effects = Effects.of(partial(run, *args, **kwargs), given, modules)
            effects = self._with_originals(effects, parameters, copies)
            try:
                self._send(number, pack((step.name, *effects), given))
            except SpecError as error:
                error.add_note(f"weft: the result of {step} is needed on all ranks of the group")
                raise
        return effects.result, effects.flags

    def _with_originals(
        self, effects: "Effects", parameters: Sequence[nn.Parameter], copies: Mapping[int, nn.Parameter]
    ) -> "Effects":
        """The effects with placeholders again, where a call has returned one of the copies."""
        originals = {id(copies[id(each)]): each for each in parameters if id(each) in copies}
        leaves, structure = flatten(effects.result)
        if not any(id(leaf) in originals for leaf in leaves):
            return effects
        return effects._replace(result=unflatten(structure, [originals.get(id(leaf), leaf) for leaf in leaves]))

    def announce(self, *content: Any) -> None:
        """Send an action, and its arguments, to all other ranks."""
        self._send(next(self._begun()), pack(content))

    def hear(self, source: int) -> Any:
        """The next announcement of a rank."""
        return self._receive(next(self._begun()), source)

    def exchange(self, content: Any) -> list[Any]:
        """The contents that all ranks give, by rank."""
        number, size = next(self._begun()), self._channel.links.size
        self._send(number, pack(content))
        others = {rank: self._receive(number, rank) for rank in self._others()}
        return [content if rank == self.rank else others[rank] for rank in range(size)]

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
            # The rank is part of the address: in an exchange, several ranks send under one number.
            self._channel.walk.send(rank, (_TOLD, self.rank, number), message)

    def _receive(self, number: int, source: int, given: Sequence[Any] = ()) -> Any:
        return unpack(self._channel.walk.receive((_TOLD, source, number), source), self._device, given)

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


class Effects(NamedTuple):
    """The effects of a call: its result and flags; new contents of its inputs, by number; attributes that it stored, by
    the number of the module; and the arguments of hooks in it, by the number of the module."""

    result: Any
    flags: list[bool]
    contents: Sequence[tuple[int, Tensor]]
    stored: Sequence[tuple[int, str, Any]]
    hooked: Sequence[tuple[int, Any, Any, Any]]

    @staticmethod
    def of(run: Callable[[], Observed], given: Sequence[Any], modules: Sequence[nn.Module]) -> "Effects":
        """Run a call."""
        versions = [version(x) if isinstance(x, Tensor) else 0 for x in given]
        before = [dict(vars(module)) for module in modules]
        with _watching_hooked(modules) as hooked:
            result, flags = run()
        register_dataclasses(result)
        written = [k for k, x in enumerate(given) if isinstance(x, Tensor) and version(x) != versions[k]]
        contents = [(k, given[k].detach().clone().requires_grad_(given[k].requires_grad)) for k in written]
        pairs = enumerate(zip(modules, before, strict=True))
        # Attributes of other types stay where they are: no message can carry them.
        stored = [
            (k, key, x)
            for k, (module, held) in pairs
            for key, x in vars(module).items()
            if held.get(key) is not x and isinstance(x, (Tensor, *PLAIN))
        ]
        return Effects(result, flags, contents, stored, hooked)

    def repeat(self, given: Sequence[Any], modules: Sequence[nn.Module]) -> None:
        """Repeat the effects of a call on another rank."""
        for k, content in self.contents:
            target = given[k]
            tracked = content.requires_grad and not (target.is_leaf and target.requires_grad)
            with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
                target.copy_(content)  # in place, so that the version counts
        for k, key, value in self.stored:
            vars(modules[k])[key] = value
        for k, args, kwargs, output in self.hooked:
            module: Any = modules[k]
            for key, hook in [*module._forward_hooks.items()]:
                if key in module._forward_hooks_with_kwargs:
                    hook(module, args, kwargs, output)
                else:
                    hook(module, args, output)


@contextmanager
def _watching_hooked(modules: Sequence[nn.Module]) -> Generator[list[tuple[int, Any, Any, Any]]]:
    """Note each call of a module with forward hooks: its number, its arguments and its output. Hooks can take tensors
    out of a block, so all ranks need to run them."""
    calls: list[tuple[int, Any, Any, Any]] = []

    def note(number: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((number, args, kwargs, output))

    hooked = [(k, module) for k, module in enumerate(modules) if module._forward_hooks]
    handles = [module.register_forward_hook(partial(note, k), with_kwargs=True) for k, module in hooked]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _substituted(modules: Iterable[nn.Module], copies: Mapping[int, nn.Parameter]) -> AbstractContextManager[None]:
    """Modules have copies in the place of some parameters inside."""
    tables = cast("list[dict[str, Any]]", [module._parameters for module in modules])
    slots = [((table, key), copies[id(x)]) for table in tables for key, x in table.items() if id(x) in copies]
    return replaced_in(slots)


class TogetherRecorder(ForwardRecorder):
    """A recorder on every rank. All ranks record one program."""

    def __init__(self, together: Together, *args: Any) -> None:
        super().__init__(*args)
        self.watched, self._together = True, together
        self.written: set[tuple[nn.Module, str]] = set()
        """Buffers that blocks were seen to write to: the module, and the name in it."""

    def _recorded(self, step: Instruction, run: Callable[..., Any]) -> Any:
        def observed(*args: Any, **kwargs: Any) -> Observed:
            return run(*args, **kwargs), [self.drew, self.dynamic]

        def run_together(*args: Any, **kwargs: Any) -> Any:
            result, flags = self._together.call(step, observed, args, kwargs)
            self.drew, self.dynamic = flags
            return result

        modules: list[nn.Module] = [] if step.module is None else list(step.module.modules())
        held = [(m, key, x, version(x)) for m in modules for key, x in m._buffers.items() if x is not None]
        result = super()._recorded(step, run_together)
        self.written |= {(m, key) for m, key, x, before in held if m._buffers[key] is not x or version(x) != before}
        return result

    def replay(self, program: Program, leaves: Sequence[Any], owned: Owned) -> Any:
        """See `ForwardRecorder.replay`. Without stages: one step after the other."""
        recording = program.recording
        values = program.given(leaves, owned, recording.steps, recording.reads.values())
        for step in recording.steps:
            self.perform(step, step.leaves, values)
        return program.result(values)

    def perform(self, step: Instruction, constants: Sequence[Any], values: Values) -> None:
        """See `ForwardRecorder.perform`."""

        def observed(*args: Any, **kwargs: Any) -> Observed:
            return step.call(*args, **kwargs), []

        def run_together(*args: Any, **kwargs: Any) -> Any:
            return self._together.call(step, observed, args, kwargs)[0]

        perform(step, constants, values, call=run_together)

    def settle(self, finding: Finding | None) -> Finding | None:
        """See `ForwardRecorder.settle`."""
        return next((found for found in self._together.exchange(finding) if found is not None), None)
