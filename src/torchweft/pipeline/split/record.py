"""Record one run of a model's forward() as a program: calls of whole blocks, and the torch functions between them.

    forward()     x = self.embed(ids);  for block in self.blocks: x = block(x, mask);  return self.head(x)
    recording     %0 = embed(in0)    %1 = add(%0, own cls)    %2 = blocks.0(%1, in1)   ...

A module without a split point inside is a *block*. It is called as a whole at every step, so its Python code can do
anything. Modules around split points are *open*: the torch functions of their forward() are recorded, and the decisions
of their Python code are frozen. Such a decision depends on the key of a program (shapes, arguments, flags), or on a
value read from a tensor. The latter is a guard, which every replay checks. Symbolic tracing (torch.fx) or torch.export
would trace into the blocks too, and fail at the first Python code that they do not know.

A `TorchFunctionMode` sees the functions, a patched ``__call__`` of the module classes sees the blocks, and a
`TorchDispatchMode` sees every tensor that is made between blocks. If the code between blocks uses another tensor, the
run is repeated with the operators inside of blocks observed as well. If a block made that tensor and did not return it,
the block is opened.
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._python_dispatch import _pop_mode_temporarily as _pop_dispatch_mode
from torch.utils.checkpoint import CheckpointFunction

from torchweft.core.errors import SplitError
from torchweft.core.pytree import flatten, register_dataclasses, structure_paths, unflatten
from torchweft.core.segment import version
from torchweft.pipeline.split.isolation import copies, moved_to_device, undisturbed
from torchweft.pipeline.split.modules import MOVE, OpenModules
from torchweft.pipeline.split.open_state import PLAIN, OpenState
from torchweft.pipeline.split.program import Program, moved, perform
from torchweft.pipeline.split.provenance import LIFT, Observed, RunValues, ValueProvenanceMode
from torchweft.pipeline.split.recording import HERE, SHAPES, Instruction, Owned, Recording, Values
from torchweft.pipeline.split.state_writes import Captured
from torchweft.pipeline.split.user_code import call_site, python_random_state

_Finding = TypeVar("_Finding")
_T = cast(Any, Tensor)
READS = {
    *(_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__complex__, _T.__contains__),
    *(_T.equal, _T.allclose, _T.is_nonzero, torch.equal, torch.allclose, torch.is_nonzero),
}
_SETTERS = (_T.data.__set__, _T.requires_grad.__set__, _T.grad.__set__)
_UNSEEN = (_T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.__dlpack__)
_REFUSED: dict[Any, str] = {
    **{setter: f"sets .{setter.__self__.__name__}" for setter in _SETTERS},
    **{function: f"takes a tensor out of PyTorch's sight ({function.__name__})" for function in _UNSEEN},
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward, _T.backward), "asks torch.autograd for a gradient"),
    **dict.fromkeys((_T.register_hook, _T.retain_grad), "attaches a hook to a tensor's gradient"),
}
_CONTAINERS = (list, tuple, dict)
_LEAVES = {Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device}
# Recordings of a kind in which reads are noted. Later recordings read the same state. Noting replaces a method of
# module classes, and Python stops caching the attributes of a class that changes too often.
_WATCHED = 4
one_at_a_time = threading.RLock()  # a recording patches classes, which the whole process shares


class ForwardRecorder:
    """Runs a model and records its instructions. Raises SplitError for names that are not modules."""

    def __init__(self, model: nn.Module, split: Sequence[str], devices: Sequence[torch.device]) -> None:
        self.model, self.devices = model, devices
        self.mixed = len(set(devices)) > 1
        # Whether the recorder also observes the plain forward. Its graph then differs from that of the model.
        self.watched = self.mixed
        self.alone = True  # whether no other process takes part in a recording
        self.modules = OpenModules(model, split)
        self.state = OpenState()
        self.watches_blocks = False
        self._watches: Counter[Hashable] = Counter()  # recordings that noted reads, by grad mode and mode of the model

    def plain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the plain forward. If stages have several devices, tensors are moved as in a recording."""
        if not self.watched:
            return self.model(*args, **kwargs)
        with one_at_a_time:
            return _ForwardRun(self).run(args, kwargs)

    def replay(self, program: Program, leaves: Sequence[Any], owned: Owned, captured: Captured) -> Any:
        return program.replay(leaves, owned, captured)

    def run_stages(self, program: Program, leaves: Sequence[Any], owned: Owned) -> None:
        """Run the steps of all stages, without the tail. Raises GuardError."""
        program.check_branches(leaves, owned)
        program.replay(leaves, owned, {})

    def perform(self, step: Instruction, constants: Sequence[Any], values: Values) -> None:
        perform(step, constants, values)

    def run_step(self, step: Instruction, run: Callable[..., Observed], args: Any, kwargs: Any) -> Observed:
        """Run a step that is being recorded. Over processes, one rank runs it for all."""
        return run(*args, **kwargs)

    def agree_on(self, finding: _Finding | None) -> _Finding | None:
        """A finding on which the further run depends. Over processes, the first finding of all ranks."""
        return finding

    def record(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, optional: bool = False, keep: bool = False
    ) -> Recording:
        """Record one run on copies of these arguments, without effects on the model.

        With `optional`, split points need not be called. With `keep`, values have copies of their tensors. Raises
        SplitError, with file and line, for code that cannot be recorded.
        """
        with one_at_a_time:
            self.modules.resolve()
            self.modules.reject_backward_hooks()
            while (recording := self._record(args, kwargs, keep)) is None:
                pass  # until tensors leave a block only through its return value
        missing = [] if optional else [name for name in self.modules.split.values() if name not in recording.cuts]
        read = {value.key for step in recording.steps for value in step.reads.values() if value.kind == "own"}
        if used := [name for name in missing if any(key.startswith(f"{name}.") for key in read)]:
            raise SplitError(
                f"forward of {type(self.model).__name__} uses the parameters of the split points {used}, but does not "
                "call them as modules, so it cannot be cut there: write layer(x), not layer.forward(x), which also "
                "skips hooks, nor functional.linear(x, layer.weight)"
            )
        if missing:
            raise SplitError(
                f"forward of {type(self.model).__name__} never called the split points {missing}, so it cannot be cut "
                "before them; name modules that it calls (a ModuleList is not called, its items are: 'h.6', not 'h')"
            )
        return recording

    def _record(self, args: Sequence[Any], kwargs: dict[str, Any], keep: bool) -> Recording | None:
        """Record one run. None if another run has to show more, or needs more open modules."""
        leaves, structure = flatten((tuple(args), kwargs))
        leaves = copies(leaves)
        names = structure_paths(flatten(tuple(args))[1])
        names += [name for key, x in kwargs.items() for name in structure_paths(flatten(x)[1], key)]
        # With a graph, so that autograd functions are seen. It saves no tensors, because nothing runs it backward.
        tracked = torch.is_grad_enabled()
        saved = saved_tensors_hooks(lambda _: None, lambda x: x) if tracked else nullcontext()
        quiet = undisturbed(self.model, self.devices, self.modules.open)
        with quiet, torch.set_grad_enabled(tracked), saved:
            # All tensors of the run belong to this object and are freed with it. Nothing must refer back to it.
            run = _ForwardRun(self, list(zip(names, leaves, strict=True)), keep)
            before = [(module, dict(module._buffers), dict(vars(module))) for module in self.modules.open]
            result = run.run(*unflatten(structure, leaves))
            run.reject_python_draws()
            run.values.reject_stored(before)
            register_dataclasses(result)
            recording = run.values.recording
            outputs, recording.structure = flatten(result)
            recording.reads = run.values.read_leaves(outputs)
            recording.leaves = [None if k in recording.reads else leaf for k, leaf in enumerate(outputs)]
            numbers = (x for x in outputs if isinstance(x, Tensor) and not x.dim())
            recording.has_scalars = any(number.is_floating_point() for number in numbers)
        # Observing every operator inside of blocks doubles the time of a recording. It is needed only to distinguish
        # tensors that leave a block from the user's constants, so it starts when either appears.
        if run.values.has_unknown_tensors and not self.watches_blocks:
            self.watches_blocks = True
            return None
        self.modules.open_blocks(run.values.leaks)
        return None if run.values.leaks else recording

    def noting_reads(self, is_open: Callable[[], bool]) -> AbstractContextManager[None]:
        """Note the state that is read while `is_open` is true, in the first recordings of a kind."""
        kind = torch.is_grad_enabled(), self.model.training
        self._watches[kind] += 1
        return self.state.watching(self.model, is_open) if self._watches[kind] <= _WATCHED else nullcontext()


class _ForwardRun(TorchFunctionMode):
    """One run of forward(), which it turns into instructions."""

    def __init__(self, recorder: ForwardRecorder, inputs: Sequence[tuple[str, Any]] = (), keep: bool = False) -> None:
        super().__init__()
        self._recorder, self._modules = recorder, recorder.modules
        self._provenance = ValueProvenanceMode()
        self.values = RunValues(recorder.modules, self._provenance.origins, inputs, keep)
        self._steps = self.values.recording.steps
        self._inside = True  # in code that is part of one step, or outside of forward()
        self._thread = threading.get_ident()
        self._outer = torch.is_grad_enabled(), casts_of_thread()
        self._python_state = python_random_state()
        self._device = recorder.devices[0]

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Blocks run uncompiled. Code compiled now would contain the patches, and modules with a replaced
        # __getattribute__ cannot be compiled.
        eager = torch.compiler.set_stance("force_eager")
        with self._patched(), self._recorder.noting_reads(self._is_between_blocks), eager, self._provenance, self:
            self._inside = False
            try:
                return self._recorder.model(*args, **kwargs)
            finally:
                self._inside = True

    def _is_between_blocks(self) -> bool:
        # Other threads can call the patched classes at the same time. Their calls are not part of this run.
        return not self._inside and threading.get_ident() == self._thread

    @contextmanager
    def _as_one_step(self) -> Generator[None]:
        """Context in which functions are part of one step, and are not recorded themselves."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or func is LIFT:
            return func(*args, **kwargs)
        if func in _REFUSED:
            raise self._modules.refusal(f"forward {_REFUSED[func]}")
        with self._as_one_step():
            return self._record_function(getattr(func, "__name__", str(func)), func, args, kwargs)

    def _call_module(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        modules, cuts, devices = self._modules, self.values.recording.cuts, self._recorder.devices
        if not self._is_between_blocks() or id(module) not in modules.names:
            return plain(module, *args, **kwargs)
        # Only the first call of a split point cuts. A later one runs in the stage that is current then.
        if module in modules.split and modules.split[module] not in cuts:
            cuts[modules.split[module]] = len(self._steps)
            self._device = devices[min(len(cuts), len(devices) - 1)]
        if module in modules.open:
            return modules.run_open(plain, module, args, kwargs)
        mine = _get_current_function_mode() is self
        hides = not self._recorder.watches_blocks and isinstance(_get_current_dispatch_mode(), ValueProvenanceMode)
        with (
            self._as_one_step(),
            _pop_mode_temporarily() if mine else nullcontext(),
            _pop_dispatch_mode() if hides else nullcontext(),
        ):
            register_dataclasses((args, kwargs))
            step = _step(modules.names[id(module)], module, args, kwargs, module=module)
            self.reject_python_draws(f" before {step.name}")
            self.values.recording.has_hooks |= bool(cast(Any, module)._forward_hooks)
            try:
                return self._record_step(step, partial(plain, module))
            finally:
                self._python_state = python_random_state()  # a block can draw, because it runs at every step

    def _record_function(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        step = _step(name, func, args, kwargs, where=call_site())
        wrapped = cast(Any, torch._C)._functorch.is_functorch_wrapped_tensor
        if any(wrapped(x) for x in step.leaves if isinstance(x, Tensor)):
            raise self._modules.refusal(f"{name} runs under vmap or grad")
        return self._record_step(step, func)

    def _record_step(self, step: Instruction, run: Callable[..., Any]) -> Any:
        leaves, blocks = step.leaves, [] if step.module is None else [step.module]
        step.reads, step.advice = self.values.read_leaves(leaves), self._modules.advice(step.advice)
        step.opened = self._modules.advice("")
        device = self._device if self._recorder.mixed else None
        inputs = leaves if device is None else [moved(x, device) for x in leaves]
        # A write in place raises the version of a tensor. No other sign of it exists in Python.
        versions = [version(x) if isinstance(x, Tensor) else 0 for x in inputs]
        args, kwargs = step.arguments(inputs)

        def observed(*args: Any, **kwargs: Any) -> Observed:
            return run(*args, **kwargs), self._provenance.flags

        # Around all of it: results that arrive from another rank belong to the block as well.
        with self._provenance.of_step(step.module), moved_to_device(blocks, device):
            result, (step.draws, dynamic) = self._recorder.run_step(step, observed, args, kwargs)
        step.dynamic = dynamic or bool(blocks)
        wrote = [k for k, x in enumerate(inputs) if isinstance(x, Tensor) and version(x) != versions[k]]
        register_dataclasses(result)
        results, nesting = flatten(result)
        step.function, step.result = step.call, None if isinstance(result, Tensor) else nesting
        at = {id(x): k for k, x in enumerate(leaves) if isinstance(x, Tensor)}
        step.same = {k: at[id(x)] for k, x in enumerate(results) if id(x) in at}
        first = {id(x): k for k, x in reversed([*enumerate(results)])}
        step.twins = {k: first[id(x)] for k, x in enumerate(results) if isinstance(x, Tensor) and first[id(x)] < k}
        # Without values that are read at each call, because a program must not keep tensors of the recorded run.
        step.leaves = [None if k in step.reads else leaf for k, leaf in enumerate(leaves)]
        if device is not None:
            step.leaves = _without_devices(step)
        if not blocks and not wrote and not any(isinstance(x, Tensor) for x in results):
            if step.call in SHAPES and (tensors := [x for x in leaves if isinstance(x, Tensor)]):
                self.values.note_shape(tensors[0])
            if step.call not in READS:
                return result  # a replay need not repeat it
            self._reject_random_decision(step)
            step.expects = (result,)
        else:
            # Results first: a function that writes in place returns its argument, and the write makes the later value.
            self.values.note_results(step, results)
            self.values.note_writes(step, leaves, wrote)
        # A replay runs in the modes of its caller. Only modes that the model's own code has set belong to the step.
        grad = None if torch.is_grad_enabled() == self._outer[0] else not self._outer[0]
        casts = [cast_state for cast_state in casts_of_thread() if cast_state not in self._outer[1]]
        if casts or grad is not None:
            step.modes = grad is not None, casts
            step.call = partial(in_modes, grad, casts, step.call)
        self._steps.append(step)
        return result

    def _reject_random_decision(self, step: Instruction) -> None:
        # Each outcome would need its own program: 2^n programs for n blocks that are skipped at random.
        todo = list(step.reads.values())
        while todo:
            value = todo.pop()
            source = self._steps[value.step] if value.kind == "made" else None
            if source is None or source.module is not None:
                continue
            if source.draws:
                fault = f"forward decides by a random number, of {source},"
                raise self._modules.refusal(fault, f"{self._advice_on_draws()}, or {MOVE}")
            todo += source.reads.values()

    def reject_python_draws(self, where: str = "") -> None:
        if self._python_state != python_random_state():
            raise self._modules.refusal(
                f"forward of {type(self._modules.model).__name__} draws from Python's or NumPy's random numbers{where}",
                f"every step would get the same ones; {self._advice_on_draws()}, draw from torch, or in a submodule",
            )

    def _advice_on_draws(self) -> str:
        """Name the settings in the model's config that switch random decisions off."""
        config = cast("dict[str, Any]", getattr(getattr(self._recorder.model, "config", None), "__dict__", {}))
        settings = [key for key in config if ("layerdrop" in key or key == "apply_spec_augment") and config[key]]
        words = ", ".join(f"{key}={type(config[key])(0)}" for key in settings)
        return f"make the model with {words} in its config" if settings else "switch that off"

    @contextmanager
    def _patched(self) -> Generator[None]:

        def around(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._call_module(plain, module, args, kwargs)

            return call

        # Classes and not instances: Python looks up __call__ in the class, and code can keep a bound method of it.
        kinds = cast("set[Any]", {kind for module in self._modules.all for kind in type(module).__mro__})
        calls = {k: vars(k)["__call__"] for k in kinds if "__call__" in vars(k) and issubclass(k, nn.Module)}
        function = cast(Any, torch.autograd.Function)
        apply = cast(Any, vars(function)["apply"])

        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = apply.__get__(None, cls)
            if not self._is_between_blocks():
                return bound(*args, **kwargs)
            if cls is CheckpointFunction:
                instead = "pass use_reentrant=False, or leave it out and give the Pipe checkpoint="
                raise self._modules.refusal("torch.utils.checkpoint with use_reentrant=True is called", instead)
            with self._as_one_step():
                return self._record_function(f"{cls.__name__}.apply", bound, args, kwargs)

        try:
            for kind, plain in calls.items():
                kind.__call__ = around(plain)
            function.apply = classmethod(applied)
            yield
        finally:
            function.apply = apply
            for kind, plain in calls.items():
                kind.__call__ = plain


def _step(name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any], **more: Any) -> Instruction:
    """A step with flat arguments if possible, because nested arguments are rebuilt at every call."""
    inputs = [*args, *kwargs.values()]
    if all(type(x) in _LEAVES for x in inputs):  # the usual case, in which flattening would take most of the time
        return Instruction(name, call, inputs, tuple(kwargs), **more)
    leaves, structure = flatten((args, kwargs))
    is_flat = len(inputs) == len(leaves) and all(map(is_, inputs, leaves))
    if is_flat or not ("module" in more or any(isinstance(x, _CONTAINERS) and _holds_values(x) for x in inputs)):
        return Instruction(name, call, inputs, tuple(kwargs), **more)
    return Instruction(name, call, leaves, structure=structure, **more)


def _without_devices(step: Instruction) -> list[Any]:
    """The constants of a step, with devices replaced by a placeholder for the device of the stage that runs it."""
    names = [""] * (len(step.leaves) - len(step.names)) + list(step.names)
    devices = [
        leaf.type != "meta" if isinstance(leaf, torch.device) else name == "device" or step.call is _T.to
        for name, leaf in zip(names, step.leaves, strict=True)
    ]
    pairs = zip(step.leaves, devices, strict=True)
    return [HERE if at and isinstance(leaf, str | torch.device) else leaf for leaf, at in pairs]


def _holds_values(container: Any) -> bool:
    """Whether a container has to be rebuilt at every call, because its contents change."""
    inside = cast("Iterable[Any]", container.values() if isinstance(container, dict) else container)
    return any(_holds_values(x) if isinstance(x, _CONTAINERS) else not isinstance(x, PLAIN) for x in inside)


def casts_of_thread() -> list[tuple[str, torch.dtype, bool]]:
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]


def in_modes(grad: bool | None, casts: Iterable[Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step in the grad mode (None: that of the call) and the autocasts that it was recorded in."""
    with ExitStack() as stack:
        if grad is not None:
            stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype, enabled in casts:
            # Without a cache: a cached cast of a weight belongs to the autograd graph of one micro-batch.
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        return call(*args, **kwargs)
