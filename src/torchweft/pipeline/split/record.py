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
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._python_dispatch import _pop_mode_temporarily as _pop_dispatch_mode
from torch.utils.checkpoint import CheckpointFunction

from torchweft.core.errors import SplitError, join_faults
from torchweft.core.pytree import flatten, register_dataclasses, structure_paths, unflatten
from torchweft.core.segment import held_values, version
from torchweft.pipeline.microbatch import storage_id
from torchweft.pipeline.split.attributes import OPENED, SHARED, forbid_stored_activations, path_of
from torchweft.pipeline.split.isolation import copies, moved_to_device, undisturbed
from torchweft.pipeline.split.modules import check_names, named_modules
from torchweft.pipeline.split.open_state import PLAIN, OpenState
from torchweft.pipeline.split.program import (
    HERE,
    Instruction,
    Owned,
    Program,
    Reads,
    RecordedValue,
    Recording,
    Values,
    moved,
    perform,
)
from torchweft.pipeline.split.user_code import call_site, python_random_state

_Finding = TypeVar("_Finding")
_T = cast(Any, Tensor)
_c = cast(Any, torch._C)
_READS = {
    *(_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__complex__, _T.__contains__),
    *(_T.equal, _T.allclose, _T.is_nonzero, torch.equal, torch.allclose, torch.is_nonzero),
}
SHAPES = {_T.shape.__get__, _T.size, _T.__len__, _T.numel, _T.nelement, _T.stride, torch.numel}
_SETTERS = (_T.data.__set__, _T.requires_grad.__set__, _T.grad.__set__)
_UNSEEN = (_T.numpy, _T.__array__, _T.data_ptr, _T.untyped_storage, _T.__dlpack__)
_REFUSED: dict[Any, str] = {
    **{setter: f"sets .{setter.__self__.__name__}" for setter in _SETTERS},
    **{function: f"takes a tensor out of PyTorch's sight ({function.__name__})" for function in _UNSEEN},
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward, _T.backward), "asks torch.autograd for a gradient"),
    **dict.fromkeys((_T.register_hook, _T.retain_grad), "attaches a hook to a tensor's gradient"),
}
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_CONTAINERS = (list, tuple, dict)
_LEAVES = {Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device}
_MOVE = "move that into a submodule"
_WATCHED = 4
"""Number of recordings of a kind in which reads are noted. Later recordings read the same state. Noting replaces a
method of module classes, and Python stops caching the attributes of a class that changes too often."""
_one_at_a_time = threading.RLock()  # a recording patches classes, which the whole process shares


class ForwardRecorder(TorchFunctionMode):
    """Runs a model and records its instructions. `record` leaves the model unchanged.

    Raises SplitError for names that are not modules.
    """

    def __init__(self, model: nn.Module, split: Sequence[str], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.model, self.devices, self._split_names = model, devices, list(split)
        self.mixed = len(set(devices)) > 1
        self.watched = self.mixed
        """Whether the recorder also observes the plain forward. Its graph then differs from that of the model."""
        self.open: set[nn.Module] = set()
        self.state = OpenState()
        self._watches: Counter[Hashable] = Counter()  # recordings that noted reads, by grad mode and mode of the model
        self._leaking: set[nn.Module] = set()
        self._exits: dict[nn.Module, str] = {}  # the way in which a tensor left a block that was then opened, in words
        self._running: list[nn.Module] = []  # open modules whose forward() is running
        self._watches_blocks, self._has_strangers = False, False
        self._inside, self._keep = True, False
        self._resolve()

    def _resolve(self) -> None:
        """Look up the named modules, which can have changed since the last recording."""
        check_names(self.model, self._split_names)
        modules = dict(named_modules(self.model, again=True))
        self._modules = list(dict.fromkeys(modules.values()))
        self.split = {modules[name]: name for name in self._split_names}
        parts = [name.split(".") for name in self._split_names]
        self.open = self.open.intersection(modules.values()) | {
            modules[".".join(path[:k])] for path in parts for k in range(len(path))
        }
        self.names = {id(module): name for name, module in reversed(modules.items())}  # the first of several names

    def plain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the plain forward. If stages have several devices, tensors are moved as in a recording."""
        if not self.watched:
            return self.model(*args, **kwargs)
        with _one_at_a_time:
            self._begin()
            return self._forward(args, kwargs)

    def replay(self, program: Program, leaves: Sequence[Any], owned: Owned) -> Any:
        return program.replay(leaves, owned)

    def perform(self, step: Instruction, constants: Sequence[Any], values: Values) -> None:
        """Run one step of a program: see `program.perform`."""
        perform(step, constants, values)

    def settle(self, finding: _Finding | None) -> _Finding | None:
        """A finding on which the further run depends. Over processes, the first finding of all ranks."""
        return finding

    def record(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, optional: bool = False, keep: bool = False
    ) -> Recording:
        """Record one run on copies of these arguments.

        With `optional`, split points need not be called. With `keep`, the recording keeps copies of all values. Raises
        SplitError, with file and line, for code that cannot be recorded.
        """
        with _one_at_a_time:
            self._keep = keep
            self._resolve()
            if hooked := [self._called(m) for m in self.open if m._backward_hooks or m._backward_pre_hooks]:
                headline = (
                    "backward hooks of a module that is cut would not run, because no backward goes through it as a "
                    "whole; attach the hooks to submodules that are not cut:"
                )
                raise SplitError(join_faults(headline, hooked))
            while True:  # until tensors leave a block only through its return value
                self._leaking, self._has_strangers = set(), False
                recording = self._record(args, kwargs)
                # Observing every operator inside of blocks doubles the time of a recording. It is needed only to
                # distinguish tensors that leave a block from the user's constants, so it starts when either appears.
                if self._has_strangers and not self._watches_blocks:
                    self._watches_blocks = True
                    continue
                if not self._leaking:
                    break
                self.open |= self._leaking
        if missing := [] if optional else [name for name in self.split.values() if name not in recording.cuts]:
            raise SplitError(
                f"forward of {type(self.model).__name__} never called the split points {missing}, so it cannot be cut "
                "before them; name modules that it calls (a ModuleList is not called, its items are: 'h.6', not 'h')"
            )
        return recording

    def _record(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Recording:
        leaves, structure = flatten((tuple(args), kwargs))
        leaves = copies(leaves)
        # With a graph, so that autograd functions are seen. It saves no tensors, because nothing runs it backward.
        tracked = torch.is_grad_enabled()
        names = structure_paths(flatten(tuple(args))[1])
        names += [name for key, x in kwargs.items() for name in structure_paths(flatten(x)[1], key)]
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(tracked),
            undisturbed(self.model, self.devices),
            saved_tensors_hooks(_nothing, _nothing) if tracked else nullcontext(),
        ):
            self._begin(names, leaves)
            tables = [(module, dict(module._buffers)) for module in self.open]
            held = [(self.names[id(m)], m, dict(vars(m))) for m in self.open if m not in self._exits]
            result = self._forward(*unflatten(structure, leaves))
            for module, before in tables:
                if any(before.get(key) is not buffer for key, buffer in module._buffers.items()):
                    raise SplitError(
                        f"forward of {self._called(module)} replaces a buffer by another tensor, which a stage would "
                        "not see; write to the buffer in place (copy_), or do it in a submodule"
                    )
            self._reject_python_draws()
            recording = self._recording
            trained = {known[1].key for known in self._known.values() if isinstance(known[0], nn.Parameter)}
            forbid_stored_activations(held, trained, recording, {key: known[1] for key, known in self._known.items()})
            register_dataclasses(result)
            outputs, recording.structure = flatten(result)
            recording.reads = self._reads(outputs)
            recording.leaves = [None if k in recording.reads else leaf for k, leaf in enumerate(outputs)]
            recording.has_scalars = any(
                isinstance(x, Tensor) and not x.dim() and x.is_floating_point() for x in outputs
            )
        # Drop all references to tensors of the run.
        self._recording, self._known, self._nodes, self.births = Recording([]), {}, {}, {}
        self._steps = self._recording.steps
        return recording

    def _forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Blocks run uncompiled. Code compiled now would contain the patches, and modules with a replaced
        # __getattribute__ cannot be compiled.
        eager = torch.compiler.set_stance("force_eager")
        with self._patched(), self._noting_reads(), eager, ValueProvenanceMode(self), self:
            self._inside = False
            try:
                return self.model(*args, **kwargs)
            finally:
                self._inside = True

    def state_in_words(self) -> dict[str, Hashable]:
        """The state that forward() reads besides its arguments, and the attributes of open modules, by name."""
        return self.state.described((self.names[id(module)], module) for module in self.open)

    def _noting_reads(self) -> AbstractContextManager[None]:
        """Note the state that the code between blocks reads, in the first recordings of a kind."""
        kind = torch.is_grad_enabled(), self.model.training
        self._watches[kind] += 1
        if self._watches[kind] > _WATCHED:
            return nullcontext()
        return self.state.watching(self.model, lambda: not self._inside and threading.get_ident() == self._thread)

    def _begin(self, names: Sequence[str] = (), leaves: Sequence[Any] = ()) -> None:
        """Start a run: drop the state of the run before, and note all inputs, parameters and buffers."""
        inputs = [RecordedValue("in", name, -1, *_size(leaf)) for name, leaf in zip(names, leaves, strict=True)]
        self._recording = Recording(inputs)
        self._steps = self._recording.steps
        self._known: dict[int, tuple[Any, RecordedValue, int]] = {}  # by id(): the object, its value, its version then
        self._nodes: dict[int, Any] = {}  # nodes of the graph that blocks and autograd functions have made
        self._written: dict[int, int] = {}  # storage -> the last step that wrote to it
        self.births: dict[int, tuple[weakref.ref[Tensor], nn.Module | None]] = {}  # all tensors made in this run
        self.block: nn.Module | None = None
        self.drew = self.dynamic = False
        self._thread = threading.get_ident()
        self._outer = torch.is_grad_enabled(), _casts()
        self._python_state = python_random_state()
        self._device = self.devices[0]
        for leaf, value in zip(leaves, inputs, strict=True):
            if not isinstance(leaf, PLAIN):
                self._know(leaf, value)
        for module in self._modules:
            prefix = self.names[id(module)]
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in self._known:
                    self._know(tensor, RecordedValue("own", f"{prefix}.{key}" if prefix else key))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func in _REFUSED:
            raise self._refusal(f"forward {_REFUSED[func]}")
        with self._unwatched():
            return self._function(getattr(func, "__name__", str(func)), func, args, kwargs)

    def _module(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._inside or id(module) not in self.names or threading.get_ident() != self._thread:
            return plain(module, *args, **kwargs)
        cuts = self._recording.cuts
        if module in self.split and self.split[module] not in cuts:
            cuts[self.split[module]] = len(self._steps)
            self._device = self.devices[min(len(cuts), len(self.devices) - 1)]
        if module in self.open:
            self._running.append(module)
            try:
                return plain(module, *args, **kwargs)
            finally:
                self._running.pop()
        mine = _get_current_function_mode() is self
        hides = not self._watches_blocks and isinstance(_get_current_dispatch_mode(), ValueProvenanceMode)
        with (
            self._unwatched(),
            _pop_mode_temporarily() if mine else nullcontext(),
            _pop_dispatch_mode() if hides else nullcontext(),
        ):
            return self._block(plain, module, args, kwargs)

    @contextmanager
    def _unwatched(self) -> Generator[None]:
        """Context in which functions are part of one step, and are not recorded themselves."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _block(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        register_dataclasses((args, kwargs))
        step = _step(self.names[id(module)], module, args, kwargs, module=module)
        self._reject_python_draws(f" before {step.name}")
        self.block = module
        try:
            with moved_to_device([module], self._device if self.mixed else None):
                return self._recorded(step, partial(plain, module))
        finally:
            self.block = None
            self._python_state = python_random_state()

    def _function(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        step = _step(name, func, args, kwargs, where=call_site())
        if any(_c._functorch.is_functorch_wrapped_tensor(x) for x in step.leaves if isinstance(x, Tensor)):
            raise self._refusal(f"{name} runs under vmap or grad")
        return self._recorded(step, func)

    def _recorded(self, step: Instruction, run: Callable[..., Any]) -> Any:
        """Run a step, and record it."""
        leaves = step.leaves
        step.reads, step.advice = self._reads(leaves), self._advice(step.advice)
        inputs = [moved(x, self._device) for x in leaves] if self.mixed else leaves
        # A write in place raises the version of a tensor. No other sign of it exists in Python.
        versions = [version(x) if isinstance(x, Tensor) else 0 for x in inputs]
        self.drew = self.dynamic = False
        args, kwargs = step.arguments(inputs)
        result = run(*args, **kwargs)
        step.draws, step.dynamic = self.drew, self.dynamic or step.module is not None
        wrote = [k for k, x in enumerate(inputs) if isinstance(x, Tensor) and version(x) != versions[k]]
        register_dataclasses(result)
        results = flatten(result)[0]
        step.leaves = [None if k in step.reads else leaf for k, leaf in enumerate(leaves)]
        if self.mixed:
            step.leaves = _without_devices(step)
        if step.module is None and not wrote and not any(isinstance(x, Tensor) for x in results):
            if step.call in SHAPES and (tensors := [x for x in leaves if isinstance(x, Tensor)]):
                self._note_shape(tensors[0])
            if step.call not in _READS:
                return result  # a replay need not repeat it
            self._reject_random_decision(step)
            step.expects = (result,)
        else:
            self._note_results(step, results)
            self._note_writes(step, leaves, wrote)
        grad = None if torch.is_grad_enabled() == self._outer[0] else not self._outer[0]
        casts = [cast_state for cast_state in _casts() if cast_state not in self._outer[1]]
        if casts or grad is not None:
            step.call = partial(_in_modes, grad, casts, step.call)
        self._steps.append(step)
        return result

    def _note_results(self, step: Instruction, results: Sequence[Any]) -> None:
        ours = step.module is not None or step.name.endswith(".apply")
        for k, x in enumerate(results):
            value, known = None, self._known.get(id(x))
            still_own = known is not None and known[1].kind == "own"  # written in place, or returned unchanged
            if not still_own and (isinstance(x, Tensor) or (ours and not isinstance(x, PLAIN))):
                value = self._make(x, k)
            elif ours and not still_own:
                step.plain.append((k, x))
            if ours and isinstance(x, Tensor) and x.grad_fn is not None:
                self._nodes[id(x.grad_fn)] = x.grad_fn
            step.makes.append(value)

    def _note_writes(self, step: Instruction, leaves: Sequence[Any], wrote: Iterable[int]) -> None:
        for k, x in {id(leaves[k]): (k, leaves[k]) for k in wrote}.values():
            step.writes.append(k)
            step.stored.add(storage_id(x))
            self._written[storage_id(x)] = len(self._steps)
            value = self._known[id(x)][1]
            if value.kind == "own":
                self._know(x, value)
            step.makes.append(None if value.kind == "own" else self._make(x, -1))

    def _note_shape(self, x: Tensor) -> None:
        """Note that Python code can depend on the shape of a value."""
        value = self._known[id(x)][1]
        if value.kind == "made" and value.key >= 0:
            self._steps[value.step].shapes[value.key] = tuple(x.size())

    def _know(self, x: Any, value: RecordedValue) -> None:
        self._known[id(x)] = (x, value, version(x) if isinstance(x, Tensor) else 0)

    def _make(self, x: Any, leaf: int) -> RecordedValue:
        """The value of a leaf of the result of the next step, or (-1) of an argument that it writes in place."""
        value = RecordedValue("made", leaf, len(self._steps), *_size(x))
        if self._keep:
            value.kept = x.detach().clone() if isinstance(x, Tensor) else x
        self._know(x, value)
        return value

    def _reads(self, leaves: Sequence[Any]) -> Reads:
        """The values of leaves that are neither plain objects nor constants of the program."""
        return {k: value for k, leaf in enumerate(leaves) if (value := self._value(leaf)) is not None}

    def _value(self, leaf: Any) -> RecordedValue | None:
        if not isinstance(leaf, Tensor):
            known = None if isinstance(leaf, PLAIN) else self._known.get(id(leaf))
            if known is None and not isinstance(leaf, PLAIN) and _hides_tensors(leaf):
                instead = "pass use_cache=False" if type(leaf).__name__.endswith("Cache") else SHARED
                raise self._refusal(f"a {type(leaf).__name__} carries tensors", instead)
            return known and known[1]
        if id(leaf) not in self._known:
            self._unknown(leaf)
        _, value, before = self._known[id(leaf)]
        if value.kind == "made" and isinstance(leaf.grad_fn, BackwardCFunction) and id(leaf.grad_fn) not in self._nodes:
            name = type(leaf.grad_fn).__name__.removesuffix("Backward")
            raise self._refusal(
                f"{name}.apply, whose own backward would be lost, was called through a name that holds the bound method"
            )
        if version(leaf) != before:
            # The write was not through this tensor, so it was through a view of it, or through its base.
            if value.kind != "own":
                self._recording.aliases.append((value.step, self._written.get(storage_id(leaf), -1)))
            self._know(leaf, value)
        return value

    def _unknown(self, leaf: Tensor) -> None:
        """Handle a tensor that is not a result of a step: a constant of the user, or a tensor made inside of a block.
        Raises SplitError for a tensor made by code that cannot be recorded."""
        birth, block = self.births.get(id(leaf), (None, None))
        ours = birth is not None and birth() is leaf  # ids are reused, so the reference decides
        self._has_strangers |= not ours
        if ours and block is not None:
            self._leaking.add(block)
            self._exits.setdefault(block, path_of(block, self.names[id(block)], leaf))
        elif ours and not self._leaking:
            raise self._refusal(f"a tensor of shape {tuple(leaf.shape)} is made by a function that is not PyTorch's")
        self._know(leaf, RecordedValue("const", leaf if leaf.is_leaf else leaf.detach()))

    def _reject_random_decision(self, step: Instruction) -> None:
        """Raise SplitError if a decision of Python code depends on a random number that was drawn between blocks.

        Each outcome would need its own program: 2^n programs for n blocks that are skipped at random.
        """
        todo = list(step.reads.values())
        while todo:
            value = todo.pop()
            source = self._steps[value.step] if value.kind == "made" else None
            if source is None or source.module is not None:
                continue
            if source.draws:
                raise self._refusal(
                    f"forward decides by a random number, of {source},", f"{self._advice_on_draws()}, or {_MOVE}"
                )
            todo += source.reads.values()

    def _advice_on_draws(self) -> str:
        """Name the settings in the model's config that switch random decisions off."""
        config = cast("dict[str, Any]", getattr(getattr(self.model, "config", None), "__dict__", {}))
        settings = [key for key in config if ("layerdrop" in key or key == "apply_spec_augment") and config[key]]
        words = ", ".join(f"{key}={type(config[key])(0)}" for key in settings)
        return f"make the model with {words} in its config" if settings else "switch that off"

    def _reject_python_draws(self, where: str = "") -> None:
        if self._python_state != python_random_state():
            raise self._refusal(
                f"forward of {type(self.model).__name__} draws from Python's or NumPy's random numbers{where}",
                f"every step would get the same ones; {self._advice_on_draws()}, draw from torch, or in a submodule",
            )

    def _refusal(self, what: str, instead: str = _MOVE) -> SplitError:
        """The error for code that cannot be recorded, with its file and line."""
        return SplitError(f"{call_site()}: {what} between blocks, where the model is cut; {self._advice(instead)}")

    def _advice(self, instead: str) -> str:
        """Advice for the running code: `instead`, unless it belongs to a block that had to be opened."""
        exits = dict.fromkeys(self._exits[module] for module in self._running if module in self._exits)
        return OPENED.format(" and ".join(exits)) if exits else instead

    def _called(self, module: nn.Module) -> str:
        return f"{self.names[id(module)] or 'the model'} ({type(module).__name__})"

    @contextmanager
    def _patched(self) -> Generator[None]:
        """Route the calls of modules and of autograd functions through this recorder."""

        def around(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._module(plain, module, args, kwargs)

            return call

        kinds = cast("set[Any]", {kind for module in self._modules for kind in type(module).__mro__})
        calls = {k: vars(k)["__call__"] for k in kinds if "__call__" in vars(k) and issubclass(k, nn.Module)}
        function = cast(Any, torch.autograd.Function)
        apply = cast(Any, vars(function)["apply"])

        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = apply.__get__(None, cls)
            if self._inside or threading.get_ident() != self._thread:
                return bound(*args, **kwargs)
            if cls is CheckpointFunction:
                instead = "pass use_reentrant=False, or leave it out and give the Pipe checkpoint="
                raise self._refusal("torch.utils.checkpoint with use_reentrant=True is called", instead)
            with self._unwatched():
                return self._function(f"{cls.__name__}.apply", bound, args, kwargs)

        try:
            for kind, plain in calls.items():
                kind.__call__ = around(plain)
            function.apply = classmethod(applied)
            yield
        finally:
            function.apply = apply
            for kind, plain in calls.items():
                kind.__call__ = plain


class ValueProvenanceMode(TorchDispatchMode):
    """Notes the block in which every tensor is made, and whether operators draw random numbers."""

    supports_higher_order_operators = True

    def __init__(self, recorder: ForwardRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        recorder, (draws, dynamic) = self._recorder, _tags(func)
        recorder.drew |= draws
        recorder.dynamic |= dynamic
        for x in cast("Iterable[Any]", result) if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                recorder.births[id(x)] = (weakref.ref(x), recorder.block)
        return cast(Any, result)


@lru_cache(1024)
def _tags(func: Any) -> tuple[bool, bool]:
    """Whether an operator draws random numbers, and whether the shape of its result depends on data."""
    tags = getattr(func, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags, any(tag in tags for tag in _DYNAMIC)


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


def _size(x: Any) -> tuple[int, int | None]:
    """Bytes and storage of a tensor."""
    return (x.nbytes, storage_id(x)) if isinstance(x, Tensor) else (0, None)


def _without_devices(step: Instruction) -> list[Any]:
    """The constants of a step, with devices replaced by a placeholder for the device of the stage that runs it."""
    names = [""] * (len(step.leaves) - len(step.names)) + list(step.names)
    devices = [
        leaf.type != "meta" if isinstance(leaf, torch.device) else name == "device" or step.call is _T.to
        for name, leaf in zip(names, step.leaves, strict=True)
    ]
    pairs = zip(step.leaves, devices, strict=True)
    return [HERE if at and isinstance(leaf, str | torch.device) else leaf for leaf, at in pairs]


def _hides_tensors(value: Any, depth: int = 4) -> bool:
    """Whether an object that is not a container for PyTorch holds tensors, down to `depth` levels of attributes."""
    if not depth or isinstance(value, (str, bytes, int, float, type, nn.Module, type(None))) or callable(value):
        return False
    return any(isinstance(inner, Tensor) or _hides_tensors(inner, depth - 1) for inner in held_values(value))


def _holds_values(container: Any) -> bool:
    """Whether a container has to be rebuilt at every call, because its contents change."""
    inside = cast("Iterable[Any]", container.values() if isinstance(container, dict) else container)
    return any(_holds_values(x) if isinstance(x, _CONTAINERS) else not isinstance(x, PLAIN) for x in inside)


def _casts() -> list[tuple[str, torch.dtype, bool]]:
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]


def _in_modes(grad: bool | None, casts: Iterable[Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a step in the grad mode (None: that of the call) and the autocasts that it was recorded in."""
    with ExitStack() as stack:
        if grad is not None:
            stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype, enabled in casts:
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        return call(*args, **kwargs)


def _nothing(_: Any) -> Any:
    """Replaces the tensors that autograd saves, because a recording has no backward."""
