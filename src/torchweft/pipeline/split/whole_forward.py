"""One call of the model's own forward() per step, in which the stages answer for the blocks.

    forward(mini-batch)     embed  block  add  block  head | view  cross_entropy  mean
                            answered: nothing runs         ^ the stages run on micro-batches, and what enters the tail
                                                             becomes the joined values, with a graph

Before the tail, every block and every function that depends on a block is answered by a tensor of the recorded form
without numbers. Function, plain arguments and the origin of each tensor are compared with the recording. So a change of
anything that the code between blocks reads is seen before the stages run, and needs no list of what Python can read.
Then the tail runs as the user wrote it: branches, numbers, random draws and writes need no rule and no recording.

Without a tail (the loss is outside of forward(), or there is one micro-batch), the call only compares. Its arguments
are then the first micro-batch.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors  # pyright: ignore[reportUnknownVariableType]

from torchweft.core import torch_internals as internals
from torchweft.core.errors import BatchError, InPlaceError, SplitError
from torchweft.core.pytree import Structure, flatten, unflatten
from torchweft.pipeline.split.expected import Answer, ExpectedCalls, TailNeedsMore
from torchweft.pipeline.split.isolation import keep_attributes, moved_to_device
from torchweft.pipeline.split.program import (
    moved,
)
from torchweft.pipeline.split.record import READS, casts_of_thread, in_modes, one_at_a_time
from torchweft.pipeline.split.recording import (
    DEVICES,
    FORMS,
    RecordedValue,
    Values,
)
from torchweft.pipeline.split.state_writes import Captured
from torchweft.pipeline.split.tail import Tail

_CALL = "_compiled_call_impl"  # nn.Module calls this attribute, if it is set, in place of its hooks and its forward()
_ABSENT = object()


class CallerState(NamedTuple):
    """The surroundings of the call of a pipe: thread, context variables, grad mode and autocasts."""

    thread: int
    context: Context
    grad: bool
    casts: list[tuple[str, torch.dtype, bool]]

    @staticmethod
    def here() -> "CallerState":
        return CallerState(threading.get_ident(), copy_context(), torch.is_grad_enabled(), casts_of_thread())

    def run(self, call: Callable[[], Any]) -> Any:
        """Call in these surroundings, and not in those of the line of forward() at which the tail begins. forward() can
        also set context variables, such as one that collects the outputs of its blocks."""
        changed = [x for x, now in zip(self.casts, casts_of_thread(), strict=True) if x != now]
        return self.context.run(in_modes, self.grad, changed, call)


class TailDevice(NamedTuple):
    """The device of the tail, whether stages have others, and whether parameters of other processes are on the meta
    device here. Such a parameter is on the device of the tail, as far as forward() sees."""

    device: torch.device
    mixed: bool
    hides: bool


class ForwardChanged(BaseException):
    """forward() does not do what its recording did. Nothing has run yet.

    Not an Exception, so that the user's code does not catch it.
    """

    def __init__(self, step: int, words: str) -> None:
        super().__init__(words)
        self.step = step
        self.program: Any = None


class OtherBranch(BaseException):
    """All rows take another decision than the recording. Nothing has run yet."""


class WholeForward(TorchFunctionMode):
    """One run of forward(). `serve` runs the stages, and returns the values that enter the tail, joined. Without it,
    calls are only compared, and the tail does not run. Copies of state for the stages are added to `captured`. With
    `decides`, OtherBranch is raised if all rows decide otherwise than the recording."""

    def __init__(
        self,
        expected: ExpectedCalls,
        tail: Tail,
        rows: int,
        serve: Callable[[], Sequence[Tensor]] | None,
        captured: Captured,
        home: TailDevice,
        *,
        decides: bool = False,
    ) -> None:
        super().__init__()
        self._expected, self._tail, self._rows = expected, tail, rows
        self._serve, self._captured, self._home, self._decides = serve, captured, home, decides
        self._values: Values = {}  # the objects of this run
        self._at = 0  # the next step
        self._busy = False  # inside of a call that is not compared
        self._served = False
        self._joined: Values = {}  # values of the stages that forward() does not hold yet
        self._branch = ""  # a decision that all rows take otherwise than a micro-batch, in words
        self._caller = CallerState.here()
        self._compiled: list[tuple[nn.Module, Any]] = []  # blocks that are answered, and what they had at `_CALL`

    def run(self, model: nn.Module, leaves: Sequence[Any], structure: Structure, open_modules: Any) -> Any:
        """The result of ``forward()`` for these arguments.

        Raises ForwardChanged, OtherBranch and TailNeedsMore, all with the attributes of `open_modules` as before, and
        with the state as before that the code before the tail has written to. Raises BatchError
        if all rows take another path than a micro-batch.
        """
        restore, restore_state = keep_attributes(open_modules), keep_state(self._expected, self._tail)
        leaves = self._expected.inputs(leaves)
        self._values.update(zip(self._expected.recording.inputs, leaves, strict=True))
        try:
            with self._answering(), self._patched_functions(), self:
                args, kwargs = unflatten(structure, leaves)
                result = model(*args, **kwargs)
            self._check_end(result)
        except (ForwardChanged, OtherBranch, TailNeedsMore):
            restore()
            restore_state()
            raise
        return result

    @property
    def _device(self) -> torch.device | None:
        """The device to which the tail moves its inputs."""
        return self._home.device if self._home.mixed else None

    @property
    def _is_native(self) -> bool:
        """Whether calls run as the user wrote them: in a call that is not compared, and in the tail."""
        return self._busy or (self._served and self._at > self._tail.last_answered)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DEVICES and self._home.hides and isinstance(args[0], nn.Parameter) and args[0].is_meta:
            return func(torch.empty((), device=self._home.device))
        if self._is_native:
            return self._run_here(func, args, kwargs)
        k = self._next_step(func, None, args, kwargs)
        if k is None:
            return self._run_unexpected(func, args, kwargs)
        way = self._tail.ways[k]
        if way == "answer" or (way == "tail" and self._serve is None):
            return self._answer(k, args, kwargs)
        if way == "tail":
            self._run_stages()
            return self._run_here(func, args, kwargs)
        return self._run_known(k, func, args, kwargs)

    def _call_block(self, module: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        plain = cast(Any, module)._call_impl if compiled in (None, _ABSENT) else compiled
        # Other threads can use the module at the same time, such as an evaluation.
        if self._busy or threading.get_ident() != self._caller.thread:
            return plain(*args, **kwargs)
        # Functions inside are part of the block. One of them could be equal to the next step.
        self._busy = True
        try:
            k = None if self._is_served_whole else self._next_step(None, module, args, kwargs)
            if k is not None and (self._serve is None or self._tail.ways[k] == "answer"):
                result = self._answer(k, args, kwargs)
                if self._expected.runs_hooks:
                    _run_hooks(module, args, kwargs, result)
                return result
            if k is None and not self._served:
                raise self._change(f"calls {type(module).__name__}")
            self._run_stages()
            if self._device is None:
                return plain(*args, **kwargs)
            args, kwargs = self._moved(args, kwargs)
            with moved_to_device([module], self._device):
                return plain(*args, **kwargs)
        finally:
            self._busy = False

    @property
    def _is_served_whole(self) -> bool:
        return self._served and self._at > self._tail.last_answered

    def _next_step(self, function: Any, module: nn.Module | None, args: Any, kwargs: Any) -> int | None:
        """The step that a call is. None if it is not the next one. Raises ForwardChanged if it has other arguments."""
        expected, k = self._expected, self._at
        if not self._served and not self._branch:
            if k >= len(expected.steps) or not expected.is_call(k, function, module):
                return None
            fault = expected.fault(k, args, kwargs, self._values, self._rows) or self._fault_of_modes(k)
            if fault is not None:
                raise ForwardChanged(k, fault)
            if k in self._tail.state_writes.captured:
                self._capture(k, expected.leaves_of(k, args, kwargs))
            self._at = k + 1
            return k
        # Steps of the tail can be others than in the recording. So can be those that depend on inputs only, after a
        # decision that all rows take otherwise. Then the next step of the stages is looked for.
        for k in range(self._at, self._tail.last_answered + 1):
            if self._tail.ways[k] != "answer":
                continue
            if expected.is_call(k, function, module) and expected.takes_answers(k, args, kwargs, self._values):
                # The stages have run already, with the plain arguments of the recording.
                fault = None if self._branch else expected.fault_of_plain(k, args, kwargs, self._rows)
                if fault is not None:
                    raise self._change(fault)
                self._at = k + 1
                return k
            if self._served:
                break  # no step of the stages can be left out
        return None

    def _capture(self, k: int, leaves: Sequence[Any]) -> None:
        """Copy the state that a step reads, because forward() writes to it afterwards, and the stages run later."""
        held: dict[int, Tensor] = {leaf: leaves[leaf] for leaf in self._tail.state_writes.captured[k]}
        if torch.is_grad_enabled() and any(x.requires_grad for x in held.values()):
            raise InPlaceError(
                f"{self._expected.steps[k]} reads a tensor that requires a gradient, and forward() writes to it "
                "afterwards; write to it before it is used, or outside of forward()"
            )
        with self._outside():
            self._captured[k] = {leaf: x.detach().clone() for leaf, x in held.items()}

    def _fault_of_modes(self, k: int) -> str | None:
        step, caller = self._expected.steps[k], self._caller
        changed = torch.is_grad_enabled() != caller.grad, [x for x in casts_of_thread() if x not in caller.casts]
        return None if changed == (step.modes or (False, [])) else f"it calls {step} in another grad mode or autocast"

    def _run_unexpected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that is not a step, such as a shape. Raises ForwardChanged if it could have been one."""
        if func in FORMS:
            with internals.without_subclasses():
                return func(*args, **kwargs)
        inputs = flatten((args, kwargs))[0]
        has_answers = any(isinstance(x, Answer) for x in inputs)
        if (self._served or self._branch) and not has_answers:
            return self._run_here(func, args, kwargs)
        try:
            with internals.without_subclasses():
                result = func(*args, **kwargs)
        except Exception:
            raise self._change(f"calls {_name(func)}") from None
        if func in READS or any(isinstance(x, Tensor) for x in flatten(result)[0]):
            raise self._change(f"calls {_name(func)}")
        return result

    def _change(self, what: str) -> BaseException:
        steps = self._expected.steps
        at = str(steps[self._at]) if self._at < len(steps) else "its end"
        if not self._served and not self._branch:
            return ForwardChanged(self._at, f"it {what} where the recording has {at}")
        why = self._branch or "a value of all rows, which it computes between blocks"
        return BatchError(
            f"forward() {what} for all rows, where it has {at} for a micro-batch, because it decides by {why}. So the "
            "results of micro-batches cannot be joined. Move this decision into a submodule, or make it outside and "
            "pass its result as an argument"
        )

    def _run_here(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Inputs and parameters can be on other devices than the tail.
        if self._device is not None and self._served and not self._busy:
            args, kwargs = self._moved(args, kwargs)
        return func(*args, **kwargs)

    def _moved(self, args: Any, kwargs: Any) -> Any:
        assert self._device is not None
        leaves, structure = flatten((args, kwargs))
        return unflatten(structure, [moved(x, self._device) for x in leaves])

    def _run_known(self, k: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a step before the tail that depends on inputs and parameters only, and note its results."""
        step = self._expected.steps[k]
        result = func(*args, **kwargs)
        if step.expects is not None:
            if result != step.expects[0]:
                if self._tail.is_of_state(k):
                    raise ForwardChanged(k, f"{step} is {result!r} now, and was {step.expects[0]!r}")
                if self._decides:
                    raise OtherBranch
                self._branch = f"{step}, which is {result!r} for all rows and {step.expects[0]!r} for a micro-batch"
            return result
        results = [result] if step.result is None else flatten(result)[0]
        if step.writes:
            inputs = self._expected.leaves_of(k, args, kwargs)
            results = [*results, *(inputs[leaf] for leaf in step.writes)]
        self._values.update((value, x) for value, x in zip(step.makes, results, strict=False) if value is not None)
        return result

    def _answer(self, k: int, args: Any, kwargs: Any) -> Any:
        """The result of a step that the stages run."""
        step = self._expected.steps[k]
        if step.expects is not None:
            return step.expects[0]
        inputs = self._expected.leaves_of(k, args, kwargs) if step.writes or step.same else ()
        plain, leaves = dict(step.plain), list[Any]()
        for j, value in enumerate(step.makes[: len(step.makes) - len(step.writes)]):
            if j in step.same:
                leaf = inputs[step.same[j]]
            elif j in step.twins:
                leaf = leaves[step.twins[j]]
            elif j in step.passed:
                leaf = self._expected.own(step.passed[j])
            elif value is None:
                leaf = plain[j]
            else:
                leaf = self._answer_of(value, k, j)
            leaves.append(leaf)
            if value is not None:
                self._hold(value, leaf)
        for j, value in zip(step.writes, step.makes[len(leaves) :], strict=True):
            if value is not None:
                self._hold(value, inputs[j])
        result = leaves[0] if step.result is None else unflatten(step.result, leaves)
        if k == self._tail.last_answered:
            self._run_stages()
        return result

    def _answer_of(self, value: RecordedValue, step: int, leaf: int) -> Any:
        joined = self._joined.pop(value, None)
        return self._expected.answer(value, (step, leaf), self._rows) if joined is None else joined

    def _hold(self, value: RecordedValue, held: Any) -> None:
        """Note the object of a value. If the stages have run, it becomes the joined value."""
        self._values[value] = held
        if value in self._joined:
            _become(held, self._joined.pop(value))

    def _run_stages(self) -> None:
        if self._served or self._serve is None:
            return
        self._served = True
        self._remove_answers()
        with self._outside():
            joined = self._caller.run(self._serve)
        enters = [entering.value for entering in self._tail.enters]
        self._joined = dict(zip(enters, joined, strict=True))
        del joined
        for value in enters:
            if value in self._values:
                _become(self._values[value], self._joined.pop(value))
        if self._at <= self._tail.last_answered or self._device is not None:
            self._install_answers()

    @contextmanager
    def _outside(self) -> Generator[None]:
        """Context in which this mode sees nothing, as if the stages were called outside of forward()."""
        count = internals.function_mode_count()
        mine = bool(count) and internals.function_mode_at(count - 1) is self
        if mine:
            internals.pop_function_mode()
        try:
            yield
        finally:
            if mine:
                internals.push_function_mode(self)

    @contextmanager
    def _answering(self) -> Generator[None]:
        self._install_answers()
        try:
            yield
        finally:
            self._remove_answers()

    @contextmanager
    def _patched_functions(self) -> Generator[None]:
        """Context in which custom autograd functions are calls like any other. No mode sees their `apply`."""
        if not any(step.name.endswith(".apply") for step in self._expected.steps):
            yield
            return
        function = cast(Any, torch.autograd.Function)
        # One thread at a time, because the class belongs to the process.
        with one_at_a_time:
            apply = cast(Any, vars(function)["apply"])

            def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
                bound = apply.__get__(None, cls)
                if self._is_native or threading.get_ident() != self._caller.thread:
                    return bound(*args, **kwargs)
                with self._outside():
                    return self.__torch_function__(bound, (), args, kwargs)

            function.apply = classmethod(applied)
            try:
                yield
            finally:
                function.apply = apply

    def _install_answers(self) -> None:
        for module in self._expected.blocks:
            before = vars(module).get(_CALL, _ABSENT)
            self._compiled.append((module, before))
            vars(module)[_CALL] = partial(self._call_block, module, before)

    def _remove_answers(self) -> None:
        for module, before in self._compiled:
            if before is _ABSENT:
                del vars(module)[_CALL]
            else:
                vars(module)[_CALL] = before
        self._compiled.clear()

    def _check_end(self, result: Any) -> None:
        leaves, structure = flatten(result)
        if self._at <= self._tail.last_answered or (self._serve is None and self._at < len(self._expected.steps)):
            change = self._change("returns")
            raise change
        if self._serve is None:
            if (fault := self._expected.fault_of_result(leaves, structure, self._values)) is not None:
                raise ForwardChanged(len(self._expected.steps), fault)
            return
        if not self._served:
            raise BatchError(
                "the end of forward() uses no result of the blocks before it, so there is nothing to compute in "
                "stages; cut the model elsewhere, or leave split= out"
            )
        for x in leaves:
            if isinstance(x, Answer):
                raise TailNeedsMore(*x.place)


def keep_state(expected: ExpectedCalls, tail: Tail) -> Callable[[], None]:
    """Returns a function that undoes the writes to state which run in forward() before its tail."""
    state: list[Any] = [expected.own(value) for value in tail.state_writes.state]
    before = [(x, x.detach().clone()) for x in state if x is not None]  # or another rank has it

    def restore() -> None:
        with torch.no_grad():
            for tensor, numbers in before:
                tensor.copy_(numbers)

    return restore


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _become(held: Any, joined: Tensor) -> None:
    """Make the object that forward() holds the joined value, with its graph."""
    try:
        # A view, because the joined value itself can be held by a graph, a hook on saved tensors or an attribute. Those
        # would get the tensor without numbers, and gradients would be wrong without notice.
        swap_tensors(held, joined.view_as(joined))
    except RuntimeError as error:
        raise SplitError(
            "forward() writes in place into a tensor of the blocks which its end has used before; use the out-of-place "
            f"form there ({error})"
        ) from error


def _run_hooks(module: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Run the forward hooks of an answered block. They can take its result out of it, for the code between blocks."""
    for key, hook in [*module._forward_hooks.items()]:
        with suppress(TailNeedsMore):  # a hook that reads numbers does so in the stages
            if key in module._forward_hooks_with_kwargs:
                hook(module, args, kwargs, result)
            else:
                hook(module, args, result)
