"""Guards of a plan: everything that a cell reads besides its arguments, as a key, so that a stale plan never runs.

    module      parameters and buffers; attributes of it and of its children
    function    closure, defaults, and the globals that its code names
    class       of every reachable object, with its bases: attributes and methods that any of the code names
    value       each of these can be, or hold in lists, tuples, dicts and plain objects:
                tensors, modules, numbers, strings, functions, classes

A plan is found again only if the key is the same. Values of tensors are not part of the key, because a plan looks them
up at every call. A key cannot hold the state of some objects, such as generators, and some hooks must see every step.
For such cells `rejection` gives the reason, and the eager loop runs them.

Dynamo records such guards while it reads Python code. A capture by `make_fx` runs the code instead of reading it.
Therefore the objects are walked here. For a short sequence the walk is a large part of the time, so later calls of a
kind compare a `GuardSnapshot` first, and walk again only if that differs.
"""

import copy
import dis
import enum
import functools
import pickle
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchweft.recurrent.capture import CaptureError
from torchweft.recurrent.guard_snapshot import GuardSnapshot
from torchweft.recurrent.pytorch_internals import module_hooks, saved_tensor_hooks

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_BY_IDENTITY = (types.ModuleType, types.MethodDescriptorType, type(...), range)
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
_WRAPPED_NAMES = ("__func__", "fget", "func")  # attributes in which descriptors hold their function
_CACHED = type(functools.lru_cache(lambda: None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, _CACHED)
_UNREADY = (UninitializedParameter, UninitializedBuffer)
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAX_DEPTH = 8
# Methods that run without being named.
_IMPLICIT = frozenset({"forward", "__call__", "__bool__", "__int__", "__float__", "__neg__"}).union(
    f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul") for side in ("", "r")
)
_GLOBAL_READS = frozenset(name for name in dis.opmap if name.endswith(("_GLOBAL", "_GLOBALS", "_NAME")))
_BY_STRING = frozenset({"getattr", "globals", "vars"})
_ENVIRONMENT = frozenset({"environ", "getenv"})
_COMPARABLE = (dict, OrderedDict, list, set, types.MappingProxyType)
# Methods by which a module lists its tensors. A module that overrides one can list others at every call.
_LISTING = (
    *("parameters", "buffers", "modules", "named_parameters", "named_buffers", "named_modules"),
    "_named_members",
)
_PLAIN_SIZE = type("_Plain", (), {}).__basicsize__  # size of an object with attributes and no other state


class CellGuards:
    """The current state of everything that a cell reads."""

    def __init__(self, cell: Callable[..., Any]) -> None:
        self.key: list[Hashable] = []  # equal if nothing has changed; hashable as a tuple
        self.tensors: list[Tensor] = []  # each once, in the order of the walk
        self.unready = False  # whether a lazy module has yet to see its first input
        # Objects that the key identifies by address. They must live as long as the key: otherwise, another object could
        # get the address of a dead one, and a stale plan would be found.
        self.held: list[object] = []
        self._unknown: list[str] = []
        self._modules: list[nn.Module] = []
        self._mutables: list[Any] = []  # attributes of modules and objects; lists, dicts and sets
        self.functions: list[types.FunctionType] = []
        self.global_names: list[tuple[dict[str, Any], str]] = []
        self._objects: list[object] = []  # with attributes, so that their class can change
        # Whether a part cannot be compared by a snapshot: a mapping that computes its items, say.
        self._has_opaque_parts = False
        self._classes: list[type] = []
        self._names: set[str] = set(_IMPLICIT)
        self._seen: dict[int, int] = {}
        if module_hooks["_global_forward_hooks"] or module_hooks["_global_forward_pre_hooks"]:
            self._unknown.append("hooks of all modules")
        self._add_value("cell", cell)
        if isinstance(cell, nn.Module):
            # A module can override these methods, so the attributes alone are not enough.
            for tensor in (*cell.parameters(), *cell.buffers()):
                self._add_tensor(tensor)
        self._read_classes()

    @property
    def closures(self) -> list[types.CellType]:
        """The closure variables of all functions. Those of a cell with a plan are bound."""
        return [closure for function in self.functions for closure in function.__closure__ or ()]

    @property
    def parameters(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    @property
    def rejection(self) -> str | None:
        """The reason why a plan cannot stand for the cell, or None."""
        if not self._unknown:
            return None
        return (
            f"the cell reads {', '.join(self._unknown[:3])}, which can change unnoticed; make it a module whose "
            "tensors are parameters and buffers, or a function that closes over tensors and plain values"
        )

    def snapshot(self, cell: Callable[..., Any]) -> GuardSnapshot | None:
        """A fast test whether a new walk would find the same key. None if a part of the cell permits no such test."""
        modules = self._modules
        if self._has_opaque_parts or self._unknown or self.unready or not all(map(_has_plain_tables, modules)):
            return None
        tables: list[Any] = [table for module in modules for table in _tables_of(module)]
        tables += [module_hooks[name] for name in ("_global_forward_hooks", "_global_forward_pre_hooks")]
        tables += [vars(kind) for kind in self._classes]
        tables += [function.__kwdefaults__ for function in self.functions if function.__kwdefaults__ is not None]
        known = set(map(id, tables))
        containers = [*tables, *(mutable for mutable in self._mutables if id(mutable) not in known)]
        if not all([type(each) in _COMPARABLE for each in containers]):
            return None
        kinds = {type(module) for module in modules}
        return GuardSnapshot(cell, self, containers, [*self._objects, *modules], [*self._classes, *kinds])

    @contextmanager
    def restore_state(self) -> Generator[None]:
        """Undo the cell's writes on exit, for a run that traces or checks it."""
        # This covers buffers, attributes, lists, dicts, sets and closures. The cell cannot write into parameters.
        # Globals and classes are not restored.
        with ExitStack() as undo:
            for tensor in self.tensors:
                if not tensor.requires_grad:
                    undo.callback(_restore_tensor, tensor, tensor._version, tensor.detach().clone())
            for mutable in self._mutables:
                undo.callback(_restore_mutable, mutable, copy.copy(mutable))
            for closure in self.closures:
                undo.callback(setattr, closure, "cell_contents", closure.cell_contents)
            yield

    @contextmanager
    def as_float64(self) -> Generator[dict[int, Tensor]]:
        """Inside, the cell reads its tensors in float64. Yields these by the ids of the originals."""
        floats = [tensor for tensor in self.tensors if tensor.is_floating_point()]
        wide = {id(tensor): tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in floats}
        with self.swap_tensors(wide):
            yield wide

    @contextmanager
    def swap_tensors(self, substitutes: Mapping[int, Tensor]) -> Generator[None]:
        names = ("_parameters", "_buffers", "__dict__")
        tables = [getattr(module, name) for module in self._modules for name in names]
        before = [dict(table) for table in tables]
        closures = [(closure, closure.cell_contents) for closure in self.closures]
        try:
            for table in tables:
                table.update({name: substitutes.get(id(value), value) for name, value in table.items()})
            for closure, value in closures:
                closure.cell_contents = substitutes.get(id(value), value)
            yield
        finally:
            for table, values in zip(tables, before, strict=True):
                table.update(values)
            for closure, value in closures:
                closure.cell_contents = value

    def _add_value(self, name: str, value: Any, depth: int = 0) -> None:
        # Ordered by frequency. A plain value, which most attributes are, must not cost a dozen checks.
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, _BY_VALUE):
            self.key += (type(value), value)  # 1, 1.0 and True are equal, but a graph distinguishes them
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, type):
            self.key.append(value)
            self._add_class(value)
        elif isinstance(value, _BY_IDENTITY) or _is_of_torch(value):
            self.key.append(value)
        elif depth >= _MAX_DEPTH:
            self._give_up(f"{name} ({type(value).__name__}, nested too deeply)")
        elif isinstance(value, list | tuple | set | frozenset | Mapping):
            self._add_container(name, cast("Collection[Any]", value), depth + 1)
        elif isinstance(value, _FUNCTIONS):
            self._add_function(cast("Callable[..., Any]", value), depth + 1)
        elif isinstance(value, types.BuiltinFunctionType):
            self.key.append(value)
            if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType | type):
                self._add_value(name, value.__self__, depth + 1)  # a bound method in C reads its object
        else:
            self._add_object(name, value, depth + 1)

    def _seen_before(self, value: object) -> bool:
        # Whether the walk met this object already. The key then refers to it, because two names can swap objects.
        at = self._seen.get(id(value))
        if at is None:
            self._seen[id(value)] = len(self._seen)
            return False
        self.key.append(("again", at))
        return True

    def _give_up(self, name: str) -> None:
        self._unknown.append(name)
        self.key.append(name)

    def _add_tensor(self, tensor: Tensor) -> None:
        if self._seen_before(tensor):
            return
        if type(tensor) in _UNREADY:
            self.unready = True
        else:
            self.tensors.append(tensor)
            self.key.append((id(tensor), tensor.requires_grad, tensor.shape, tensor.dtype))

    def _add_module(self, module: nn.Module) -> None:
        if self._seen_before(module):
            return
        inside, kind = module.__dict__, type(module)
        if hasattr(kind, "steps_in_backward"):  # a remote expert, which holds connections
            return self._give_up(f"{kind.__name__}, which servers compute")
        if "_plans" in inside and "_handle" in inside:
            return self._give_up("a recurrent network, which runs by a plan of its own")
        if "training" not in inside:  # the attributes are kept elsewhere
            return self._give_up(f"a compiled or scripted module ({kind.__name__})")
        self._modules.append(module)
        self._mutables.append(inside)
        self.key += (kind, inside["training"])
        self._add_class(kind)
        if any([inside[name] for name in _HOOKS]):
            self._give_up(f"the hooks of {kind.__name__}")
        for name, tensor in (*inside["_parameters"].items(), *inside["_buffers"].items()):
            self.key.append(name)  # the slot is part of the key, because two tensors can swap places
            self._add_tensor(tensor) if tensor is not None else self.key.append(None)
        for name, child in inside["_modules"].items():
            self.key.append(name)
            self._add_module(child) if child is not None else self.key.append(None)
        for name, value in inside.items():
            if name not in _MODULE_ATTRIBUTES:
                self.key.append(name)
                self._add_value(f"{name} of {kind.__name__}", value, 1)
        return None

    def _add_container(self, name: str, value: "Collection[Any]", depth: int) -> None:
        kind = type(cast(object, value))
        if kind not in (tuple, list, dict, OrderedDict, set, frozenset):
            self._has_opaque_parts = True
        # A tuple is immutable, so its identity does not matter, and new ones are created at every call.
        if kind is not tuple and self._seen_before(value):
            return
        self.key += (kind, len(value))
        self._add_class(kind)
        if isinstance(value, list | dict | set):
            self._mutables.append(value)
        for item in value:
            self._add_value(name, item, depth)
            if isinstance(value, Mapping):
                self._add_value(name, value[item], depth)

    def _add_object(self, name: str, value: Any, depth: int) -> None:
        # Add a user's object by its attributes, if it has no other state.
        if self._seen_before(value):
            return
        kind = cast("type[Any]", type(value))
        hidden = kind.__basicsize__ > _PLAIN_SIZE or not hasattr(value, "__dict__")  # in slots, or in C
        if hidden or not all([base is object or "__slots__" not in base.__dict__ for base in kind.__mro__]):
            self._give_up(f"{name} ({kind.__name__})")
            return
        self.key.append(kind)
        self._add_class(kind)
        inside = cast("dict[str, Any]", vars(value))
        self._mutables.append(inside)
        self._objects.append(value)
        for attribute, content in inside.items():
            self.key.append(attribute)
            self._add_value(f"{name}.{attribute}", content, depth)

    def _add_function(self, function: Callable[..., Any], depth: int) -> None:
        if self._seen_before(function):
            return
        if not isinstance(function, types.FunctionType | types.MethodType):
            self._has_opaque_parts = True  # a partial's keywords, a cache's function: rare
        if isinstance(function, functools.partial):
            for part in (function.func, *function.args, *function.keywords.items()):
                self._add_value("partial", part, depth)
            return
        if isinstance(function, _CACHED):
            function = cast(Any, function).__wrapped__
        if isinstance(function, types.MethodType):
            self._add_value("self", function.__self__, depth)
            function = function.__func__
            if _is_of_torch(function):  # `apply` of a torch.autograd.Function, which its class determines
                self.key.append(function)
                return
        if not isinstance(function, types.FunctionType):
            self._give_up(type(function).__name__)
            return
        code = function.__code__
        self.functions.append(function)
        self.held.append(code)  # identified by its address, because comparing code objects is slow
        self.key.append(id(code))
        for name, closure in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add_value(name, closure.cell_contents, depth)
            except ValueError:  # not yet bound
                self._give_up(name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add_value("a default", value, depth)
        self.global_names.append((function.__globals__, "__name__"))
        if not _is_constant_module(function.__globals__.get("__name__")):
            self._add_globals(code, function.__globals__, depth)

    def _add_globals(self, code: types.CodeType, inside: dict[str, Any], depth: int) -> None:
        """Add the globals that code, and code nested in it, names in its own module and in the user's other modules."""
        names = (*code.co_names, *_strings_as_names(code))
        self._names.update(names)
        if not _ENVIRONMENT.isdisjoint(code.co_names):
            self._give_up("the environment (os.environ)")
        for name in _globals_read(code):
            self.global_names.append((inside, name))
            if name not in inside:
                continue
            value = inside[name]
            self._add_value(name, value, depth)
            if isinstance(value, types.ModuleType) and not _is_constant_module(value.__name__) and depth < _MAX_DEPTH:
                for attribute in names:
                    self.global_names.append((vars(value), attribute))
                    if attribute in vars(value):
                        self.key.append(attribute)
                        self._add_value(f"{value.__name__}.{attribute}", vars(value)[attribute], depth + 1)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_globals(constant, inside, depth)

    def _add_class(self, kind: type[Any]) -> None:
        # Note a user's class with its bases. `_read_classes` adds their attributes when all names are known.
        for base in () if id(kind) in self._seen else kind.__mro__:
            if id(base) not in self._seen:
                self._seen[id(base)] = len(self._seen)
                if not _is_constant_module(base.__module__):
                    self._classes.append(base)

    def _read_classes(self) -> None:
        # Add the class attributes that the code names, to a fixed point: each can add more code and classes.
        done: set[tuple[type, str]] = set()
        size = 0
        while self._classes and size != len(self._names) + len(self._classes):
            size = len(self._names) + len(self._classes)
            for kind in self._classes:  # grows inside this loop
                for name in [name for name in kind.__dict__ if name in self._names and (kind, name) not in done]:
                    done.add((kind, name))
                    value = kind.__dict__[name]
                    if isinstance(cast(object, value), _DESCRIPTORS):
                        self._has_opaque_parts |= isinstance(value, functools.cached_property)
                        value = next(getattr(value, inner) for inner in _WRAPPED_NAMES if hasattr(value, inner))
                    if isinstance(value, types.FunctionType):
                        self._add_function(value, 1)
                    elif not hasattr(cast(object, type(value)), "__get__"):
                        self.key.append(name)
                        self._add_value(f"{name} of {kind.__name__}", value, 1)


def _tables_of(module: nn.Module) -> list[Any]:
    inside = module.__dict__
    return [inside, *(inside[name] for name in (*_HOOKS, "_parameters", "_buffers", "_modules"))]


def _has_plain_tables(module: nn.Module) -> bool:
    lists_its_own = all([getattr(type(module), name) is getattr(nn.Module, name) for name in _LISTING])
    return lists_its_own and module.__dict__.keys().isdisjoint(_LISTING)


@functools.cache
def _is_constant_module(module: str | None) -> bool:
    home = (module or "").partition(".")[0]
    return home in ("torch", "numpy", "torchweft") or home in sys.stdlib_module_names


def _is_of_torch(value: object) -> bool:
    # Whether a value is a function or constant of torch or numpy, which does not change.
    if isinstance(value, types.FunctionType | types.MethodType):
        return str(getattr(value, "__module__", "")).partition(".")[0] == "torch"
    kind = type(value)
    home = kind.__module__.partition(".")[0]
    if home == "numpy":  # numbers, dtypes and functions, but not arrays, which can be written to
        return kind.__hash__ is not None and (callable(value) or hasattr(value, "itemsize"))
    return home == "torch" and (callable(value) or isinstance(value, torch.layout | torch.memory_format))


def _strings_as_names(code: types.CodeType) -> list[str]:
    # The strings of code that looks up names by strings, e.g. by `getattr`.
    return [] if _BY_STRING.isdisjoint(code.co_names) else [each for each in code.co_consts if type(each) is str]


@functools.lru_cache(4096)
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    # From the instructions, not from `co_names`: there `h.mean()` and `self.net` would look like globals.
    read = [instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _GLOBAL_READS]
    return (*dict.fromkeys(read), *_strings_as_names(code))


@contextmanager
def tensors_restored(
    function: Callable[..., Any], key: Sequence[Hashable], tensors: Sequence[Tensor]
) -> Generator[bool]:
    """Inside, the modules of `function` hold `tensors` again, which an earlier walk with this `key` found."""
    # Yields whether the key still holds. During the backward of a `torch.func.functional_call` they hold others
    # than in its forward. Flags and attributes are not restored.
    now = CellGuards(function)
    with now.swap_tensors({id(new): old for new, old in zip(now.tensors, tensors, strict=False)}):
        yield CellGuards(function).key == key


def _restore_tensor(tensor: Tensor, version: int, before: Tensor) -> None:
    with torch.no_grad():
        # Compare values too, because batch norm updates its statistics without a new version. Copy only on a change:
        # the copy is a new version, which would invalidate graphs of the caller that saved the tensor.
        equal = torch.isclose(tensor, before, rtol=0, atol=0, equal_nan=tensor.is_floating_point())
        if tensor._version != version or not equal.all():
            tensor.copy_(before)


def _restore_mutable(mutable: Any, before: Any) -> None:
    if isinstance(mutable, list):
        mutable[:] = before
    elif isinstance(mutable, dict):
        # Entry by entry: another thread can read it at the same time, and must not find it empty.
        table, entries = cast("dict[Any, Any]", mutable), cast("dict[Any, Any]", before)
        for name in table.keys() - entries.keys():
            del table[name]
        table.update(entries)
    else:
        mutable.clear()
        mutable.update(before)


@contextmanager
def without_observers() -> Generator[None]:
    """Inside, the caller's hooks on saved tensors (e.g. of activation checkpointing) and anomaly mode are off."""

    def identity(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.set_detect_anomaly(False), ExitStack() as hooks:
        # Only on top of the caller's hooks, because `torch.func.grad` inside a cell does not accept any.
        if saved_tensor_hooks() is not None:
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(identity, identity))
        yield


@contextmanager
def no_foreign_draws(step: Callable[[], object]) -> Generator[None]:
    """Reject a cell that draws from Python's or numpy's generator: a plan would freeze the numbers of its capture."""
    # `step` runs the cell once, without tracing. On an error both generators are restored, so that the eager loop draws
    # the same numbers as without an attempt to capture. Raises CaptureError.
    before = _generator_states()
    try:
        yield
        # Another thread can advance the generators too. A repeated step distinguishes the two: it draws every time.
        if _generator_states() != before and all(
            [_generator_states() != (step(), _generator_states())[1] for _ in range(3)]
        ):
            raise CaptureError(
                "the cell draws from Python's `random` or from numpy's generator, and a plan would freeze the numbers "
                "of its capture; draw by torch, as torch.rand_like does"
            )
    except BaseException:
        python_state, numpy_state = pickle.loads(before)
        random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy.random"].set_state(numpy_state)
        raise


def _generator_states() -> bytes:
    numpy = sys.modules.get("numpy.random")
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.get_state(legacy=False)))
