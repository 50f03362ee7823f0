"""A model's forward() on all ranks together: each call runs on the rank that has its parameters.

    every rank                        forward() of the model, line by line
    a call that reads parameters      runs on the rank that has them --result--> all other ranks
    any other call                    runs on every rank

Python between blocks therefore sees real numbers on all ranks. The alternative, a copy of all parameters on every rank,
would need the memory that the pipe saves. Ranks make the same calls in the same order, so a message is found by its
number in the walk.
"""

from collections import Counter
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torchweft.core.errors import SpecError, SplitError
from torchweft.core.pytree import flatten, register_dataclasses, unflatten
from torchweft.core.segment import version
from torchweft.pipeline.processes.links import Walk
from torchweft.pipeline.processes.packing import pack, unpack
from torchweft.pipeline.processes.rank_executor import Channel
from torchweft.pipeline.split.open_state import PLAIN
from torchweft.pipeline.split.program import Program, perform
from torchweft.pipeline.split.provenance import Observed
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.recording import SHAPES, Instruction, Owned, Values
from torchweft.pipeline.split.state_writes import Captured
from torchweft.pipeline.weights import replaced_in

_CONTENT, _PARAMETER = -5, -6  # routes of addresses; those of values are numbered from 0

EQUAL_EVERYWHERE = (
    "all that the code between blocks depends on (attributes, globals, random numbers, the environment) must be equal "
    "on all ranks"
)
Finding = TypeVar("Finding")


class CollectiveCalls:
    _channel: Channel

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self._device = rank, device
        self._owners: Mapping[int, int] = {}
        self._walk: Walk | None = None
        self._numbers = count()

    def set_channel(self, channel: Channel) -> None:
        self._channel = channel

    def set_owners(self, owners: Mapping[int, int]) -> None:
        self._owners = owners

    def run_step(self, step: Instruction, run: Callable[..., Observed], args: Any, kwargs: Any) -> Observed:
        """Run a step by `run`, on the rank that has most of the parameters that it reads."""
        leaves, structure = flatten((tuple(args), kwargs))
        modules: list[nn.Module] = [] if step.module is None else list(step.module.modules())
        read: list[Any] = [*leaves, *(x for module in modules for x in module._parameters.values())]
        parameters = list({id(x): x for x in read if isinstance(x, nn.Parameter)}.values())
        # All ranks run such a call. Its result is equal on all of them, and costs no message.
        if not parameters or step.call in SHAPES:  # placeholders have shapes
            return run(*args, **kwargs)
        bytes_on: Counter[int] = Counter()
        for parameter in parameters:
            bytes_on[self._owners[id(parameter)]] += parameter.nbytes
        # Of ranks with equally many bytes the lowest, so that all ranks choose the same one.
        runner, number = max(sorted(bytes_on), key=bytes_on.__getitem__), self._next_number()
        copies = self._send_parameters(runner, number, parameters)
        known: list[Any] = [*leaves, *parameters, *(x for module in modules for x in module._buffers.values())]
        if self.rank != runner:
            name, *content = self._receive(number, runner, known)
            # Compared here, because another path would give a result of another shape, and an error far away.
            if name != step.name:
                raise SplitError(
                    f"forward() takes another path on each rank: rank {runner} of the group is at {name}, rank "
                    f"{self.rank} at {step}; {EQUAL_EVERYWHERE}"
                )
            effects = CallEffects(*content)
            effects.repeat_here(known, modules)
        else:
            slots = [((m._parameters, key), copies[id(x)]) for m in modules for key, x in m._parameters.items()
                     if id(x) in copies]  # fmt: skip
            with replaced_in(slots):
                args, kwargs = unflatten(structure, [copies.get(id(x), x) for x in leaves])
                effects = CallEffects.run_observed(partial(run, *args, **kwargs), known, modules)
            try:
                self._send(number, pack((step.name, *effects), known))
            except SpecError as error:
                error.add_note(f"torchweft: the result of {step} is needed on all ranks of the group")
                raise
        return effects.result, effects.flags

    def announce(self, *content: Any) -> None:
        self._send(self._next_number(), pack(content))

    def receive_announcement(self, source: int) -> Any:
        return self._receive(self._next_number(), source)

    def exchange_contents(self, content: Any) -> list[Any]:
        number, size = self._next_number(), self._channel.links.size
        self._send(number, pack(content))
        return [content if rank == self.rank else self._receive(number, rank) for rank in range(size)]

    def compare_reports(self, report: Any, what: str) -> list[Any]:
        # The walk ends, so that all ranks have the reports or all raise. Another one begins.
        reports = self._channel.walk.agree(report)
        self._channel.end()
        self._channel.open(what)
        return reports

    def _next_number(self) -> int:
        if self._walk is not self._channel.walk:
            self._walk, self._numbers = self._channel.walk, count()
        return next(self._numbers)

    def _send(self, number: int, message: Any) -> None:
        for rank in range(self._channel.links.size):
            if rank != self.rank:
                # The rank is part of the address: in an exchange, several ranks send under one number.
                self._channel.walk.send(rank, (_CONTENT, self.rank, number), message, through_cpu=True)

    def _receive(self, number: int, source: int, known: Sequence[Any] = ()) -> Any:
        return unpack(self._channel.walk.receive((_CONTENT, source, number), source), self._device, known)

    def _send_parameters(self, runner: int, number: int, parameters: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        """Send parameters of other ranks to the runner. Returns its copies, by the id() of the placeholder."""
        copies: dict[int, Tensor] = {}
        for k, parameter in enumerate(parameters):
            owner, address = self._owners[id(parameter)], (_PARAMETER, k, number)
            if self.rank == owner != runner:
                self._channel.walk.send(runner, address, parameter.detach(), through_cpu=True)
            elif self.rank == runner != owner:
                # Not an nn.Parameter: a call can return it, and later calls would look for the owner of the result.
                copy: Tensor = self._channel.walk.receive(address, owner)
                copies[id(parameter)] = copy.requires_grad_(parameter.requires_grad)
        return copies


class CallEffects(NamedTuple):
    """Effects of a call that other ranks repeat. Inputs and modules are named by their numbers."""

    result: Any
    flags: list[bool]
    contents: Sequence[tuple[int, Tensor]]  # inputs that the call wrote into, and their new contents
    stored: Sequence[tuple[int, str, Any]]  # attributes that modules stored, which code between blocks can read
    # Arguments of forward hooks. Hooks can take tensors out of a block (Hugging Face's router logits).
    hooked: Sequence[tuple[int, Any, Any, Any]]

    @staticmethod
    def run_observed(run: Callable[[], Observed], known: Sequence[Any], modules: Sequence[nn.Module]) -> "CallEffects":
        # Versions, because comparing values would wait for the device, and a write of equal values counts.
        versions = [version(x) if isinstance(x, Tensor) else 0 for x in known]
        before = [dict(vars(module)) for module in modules]
        with _hook_calls(modules) as hooked:
            result, flags = run()
        # A result can be a dataclass of the model. As a container, its tensors can be sent.
        register_dataclasses(result)
        written = [k for k, x in enumerate(known) if isinstance(x, Tensor) and version(x) != versions[k]]
        contents = [(k, known[k].detach().clone().requires_grad_(known[k].requires_grad)) for k in written]
        stored = [
            (k, key, x)
            for k, (module, held) in enumerate(zip(modules, before, strict=True))
            for key, x in vars(module).items()
            # Attributes of other types stay where they are, because no message can carry them.
            if held.get(key) is not x and isinstance(x, (Tensor, *PLAIN))
        ]
        return CallEffects(result, flags, contents, stored, hooked)

    def repeat_here(self, known: Sequence[Any], modules: Sequence[nn.Module]) -> None:
        for k, content in self.contents:
            target = known[k]
            # A leaf that requires a gradient cannot be written to under autograd. The call did so under no_grad, too.
            tracked = content.requires_grad and not (target.is_leaf and target.requires_grad)
            with torch.set_grad_enabled(torch.is_grad_enabled() and tracked):
                target.copy_(content)  # in place, so that the version counts
        for k, key, value in self.stored:
            vars(modules[k])[key] = value
        for k, args, kwargs, output in self.hooked:
            module: Any = modules[k]
            for key, hook in [*module._forward_hooks.items()]:
                with_kwargs = key in module._forward_hooks_with_kwargs
                hook(module, args, *([kwargs] if with_kwargs else []), output)


@contextmanager
def _hook_calls(modules: Sequence[nn.Module]) -> Generator[list[tuple[int, Any, Any, Any]]]:
    calls: list[tuple[int, Any, Any, Any]] = []

    def note_call(number: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((number, args, kwargs, output))

    hooked = [(k, module) for k, module in enumerate(modules) if module._forward_hooks]
    handles = [module.register_forward_hook(partial(note_call, k), with_kwargs=True) for k, module in hooked]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class CollectiveRecorder(ForwardRecorder):
    def __init__(self, calls: CollectiveCalls, *args: Any) -> None:
        super().__init__(*args)
        self.watched, self._calls = True, calls
        self.alone = False
        self.written: set[tuple[nn.Module, str]] = set()
        """Buffers that blocks were seen to write to: the module, and the name in it."""

    def run_step(self, step: Instruction, run: Callable[..., Observed], args: Any, kwargs: Any) -> Observed:
        """See `ForwardRecorder.run_step`."""
        modules: list[nn.Module] = [] if step.module is None else list(step.module.modules())
        held = [(m, key, x, version(x)) for m in modules for key, x in m._buffers.items() if x is not None]
        observed = self._calls.run_step(step, run, args, kwargs)
        self.written |= {(m, key) for m, key, x, before in held if m._buffers[key] is not x or version(x) != before}
        return observed

    def replay(self, program: Program, leaves: Sequence[Any], owned: Owned, captured: Captured) -> Any:
        """See `ForwardRecorder.replay`. Steps run in the order of the recording, because stages are on other ranks.

        `captured` is empty, because programs that need copies of state are rejected over ranks.
        """
        values = self._run_steps(program, leaves, owned, ())
        return program.output(values)

    def run_stages(self, program: Program, leaves: Sequence[Any], owned: Owned) -> None:
        """See `ForwardRecorder.run_stages`."""
        self._run_steps(program, leaves, owned, program.tail.steps)

    def _run_steps(self, program: Program, leaves: Sequence[Any], owned: Owned, omitted: Container[int]) -> Values:
        recording = program.recording
        values = program.given(leaves, owned, recording.steps, recording.reads.values())
        for k, step in enumerate(recording.steps):
            if k not in omitted:
                self.perform(step, step.leaves, values)
        return values

    def perform(self, step: Instruction, constants: Sequence[Any], values: Values) -> None:
        def run_together(*args: Any, **kwargs: Any) -> Any:
            return self._calls.run_step(step, lambda *a, **k: (step.call(*a, **k), []), args, kwargs)[0]

        perform(replace(step, call=run_together), constants, values)

    def agree_on(self, finding: Finding | None) -> Finding | None:
        # The first rank that found something counts, so that all ranks act alike.
        return next((other for other in self._calls.exchange_contents(finding) if other is not None), None)
