"""Guards of a plan: all that a cell reads besides its arguments, as a key, so that no stale plan is run.

    module      parameters and buffers; its and its children's attributes
    function    closure, defaults, and what its code names in its module
    class       of all that the cell can reach, with its bases: attributes and methods that any of the code names
    any of them may be, or hold in lists, tuples, dicts and plain objects:
                tensors, modules, numbers, strings, functions, classes

A plan is found again only if the key is the same. Values of tensors are no part of it: a plan looks them up at every
call. Where a cell reads what cannot be known in this way, such as a generator, or where hooks want to see every step,
`refusal` says so, and the eager loop runs it. Dynamo guards what a trace has read; here it is looked up from the
objects, at every call.
"""

import copy
import dis
import enum
import functools
import pickle
import random
import sys
import types
from collections.abc import Callable, Collection, Generator, Hashable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from weft.recurrent.capture import CaptureError

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_BY_IDENTITY = (types.ModuleType, types.MethodDescriptorType, type(...), range)
_METHODS = (staticmethod, classmethod, property, functools.cached_property)
_BEHIND = ("__func__", "fget", "func")
"""Where these hold their function."""
_CACHED = type(functools.lru_cache(lambda: None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, _CACHED)
_UNREADY = (UninitializedParameter, UninitializedBuffer)
_OF_MODULES = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAX_DEPTH = 8
_IMPLICIT = frozenset({"forward", "__call__", "__bool__", "__int__", "__float__", "__neg__"}).union(
    f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul") for side in ("", "r")
)
"""Methods that run without being named."""
_GLOBAL_READS = frozenset(name for name in dis.opmap if name.endswith(("_GLOBAL", "_GLOBALS", "_NAME")))
_BY_STRING = frozenset({"getattr", "globals", "vars"})
_ENVIRONMENT = frozenset({"environ", "getenv"})
_PLAIN_SIZE = type("_Plain", (), {}).__basicsize__
"""Size of an object with attributes and no other state."""
_torch_module = cast(Any, nn.modules.module)


class CellGuards:
    """The current state of all that a cell reads.

    Attributes:
        key: equal where nothing has changed; hashable as a tuple.
        tensors: each once, in the order in which they are found.
        unready: whether a lazy module has yet to see its first input.
        held: what the key knows by its address; to be kept alive as long as the key.
    """

    def __init__(self, cell: Callable[..., Any]) -> None:
        self.key: list[Hashable] = []
        self.tensors: list[Tensor] = []
        self.unready = False
        self.held: list[object] = []
        self._unknown: list[str] = []
        self._modules: list[nn.Module] = []
        self._mutables: list[Any] = []  # attributes of modules and objects; lists, dicts and sets
        self._closures: list[types.CellType] = []
        self._classes: list[type] = []
        self._names: set[str] = set(_IMPLICIT)
        self._seen: dict[int, int] = {}
        if _torch_module._global_forward_hooks or _torch_module._global_forward_pre_hooks:
            self._unknown.append("hooks of all modules")
        self._add("cell", cell)
        if isinstance(cell, nn.Module):
            for tensor in (*cell.parameters(), *cell.buffers()):  # a module may say itself what its tensors are
                self._tensor(tensor)
        self._read_classes()

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that want a gradient."""
        return [each for each in self.tensors if each.requires_grad]

    @property
    def refusal(self) -> str | None:
        """Why no plan may stand for the cell; None if one may."""
        if not self._unknown:
            return None
        return (
            f"the cell reads {', '.join(self._unknown[:3])}, which may change unseen; make it a module whose "
            "tensors are parameters and buffers, or a function that closes over tensors and plain values"
        )

    @contextmanager
    def restore_state(self) -> Generator[None]:
        """Inside, the cell is run for tracing or checking: its writes into buffers, attributes, lists, dicts, sets and
        closures are taken back. It cannot write into parameters; globals and classes stay as it leaves them."""
        with ExitStack() as undo:
            for tensor in self.tensors:
                if not tensor.requires_grad:
                    undo.callback(_restore_tensor, tensor, tensor._version, tensor.detach().clone())
            for mutable in self._mutables:
                undo.callback(_restore, mutable, copy.copy(mutable))
            for closure in self._closures:
                undo.callback(setattr, closure, "cell_contents", closure.cell_contents)
            yield

    @contextmanager
    def restored(self, function: Callable[..., Any]) -> Generator[bool]:
        """Inside, the modules of `function` hold the tensors of these guards again; yields whether the key holds, too.

        After `torch.func.functional_call` they hold others than in its forward. Flags and attributes are not put back.
        """
        now = CellGuards(function)
        with now._holding({id(new): old for new, old in zip(now.tensors, self.tensors, strict=False)}):
            yield CellGuards(function).key == self.key

    @contextmanager
    def widened(self) -> Generator[dict[int, Tensor]]:
        """See `weft.recurrent.verify.Widened`."""
        floats = [each for each in self.tensors if each.is_floating_point()]
        wide = {id(each): each.detach().double().requires_grad_(each.requires_grad) for each in floats}
        with self._holding(wide):
            yield wide

    @contextmanager
    def _holding(self, instead: Mapping[int, Tensor]) -> Generator[None]:
        """Inside, modules and closures hold these tensors in place of those with the ids."""
        names = ("_parameters", "_buffers", "__dict__")
        tables = [getattr(module, name) for module in self._modules for name in names]
        before = [dict(table) for table in tables]
        closures = [(closure, closure.cell_contents) for closure in self._closures]
        try:
            for table in tables:
                table.update({name: instead.get(id(value), value) for name, value in table.items()})
            for closure, value in closures:
                closure.cell_contents = instead.get(id(value), value)
            yield
        finally:
            for table, values in zip(tables, before, strict=True):
                table.update(values)
            for closure, value in closures:
                closure.cell_contents = value

    # -- the walk over what a cell can reach ------------------------------------------------------------------------

    def _add(self, name: str, value: Any, depth: int = 0) -> None:
        """One value; `name` is for people."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, _BY_VALUE):
            self.key += (type(value), value)  # 1, 1.0 and True are equal, but not the same to a graph
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, type):
            self.key.append(value)
            self._class(value)
        elif isinstance(value, _BY_IDENTITY) or _of_torch(value):
            self.key.append(value)
        elif depth >= _MAX_DEPTH:
            self._give_up(f"{name} ({type(value).__name__}, nested too deeply)")
        elif isinstance(value, list | tuple | set | frozenset | Mapping):
            self._container(name, cast("Collection[Any]", value), depth + 1)
        elif isinstance(value, _FUNCTIONS):
            self._function(cast("Callable[..., Any]", value), depth + 1)
        elif isinstance(value, types.BuiltinFunctionType):
            self.key.append(value)
            if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType | type):
                self._add(name, value.__self__, depth + 1)  # a method in C, by its object too
        else:
            self._object(name, value, depth + 1)

    def _again(self, value: object) -> bool:
        """Whether a thing was seen before; then the key says which it is, since two names may change places."""
        at = self._seen.get(id(value))
        if at is None:
            self._seen[id(value)] = len(self._seen)
            return False
        self.key.append(("again", at))
        return True

    def _give_up(self, name: str) -> None:
        self._unknown.append(name)
        self.key.append(name)

    def _tensor(self, tensor: Tensor) -> None:
        if self._again(tensor):
            return
        if type(tensor) in _UNREADY:
            self.unready = True
        else:
            self.tensors.append(tensor)
            self.key.append((id(tensor), tensor.requires_grad, tensor.shape, tensor.dtype))

    def _module(self, module: nn.Module) -> None:
        if self._again(module):
            return
        inside, kind = module.__dict__, type(module)
        if hasattr(kind, "steps_in_backward"):  # what it holds are connections
            return self._give_up(f"{kind.__name__}, which servers compute")
        if "_plans" in inside and "_handle" in inside:
            return self._give_up("a recurrent network, which runs by a plan of its own")
        if "training" not in inside:  # the attributes are not where those of a module are
            return self._give_up(f"a compiled or scripted module ({kind.__name__})")
        self._modules.append(module)
        self._mutables.append(inside)
        self.key += (kind, inside["training"])
        self._class(kind)
        if any([inside[name] for name in _HOOKS]):
            self._give_up(f"the hooks of {kind.__name__}")
        for name, tensor in (*inside["_parameters"].items(), *inside["_buffers"].items()):
            self.key.append(name)  # the slot counts: two tensors may change places
            self._tensor(tensor) if tensor is not None else self.key.append(None)
        for name, child in inside["_modules"].items():
            self.key.append(name)
            self._module(child) if child is not None else self.key.append(None)
        for name, value in inside.items():
            if name not in _OF_MODULES:
                self.key.append(name)
                self._add(f"{name} of {kind.__name__}", value, 1)
        return None

    def _container(self, name: str, value: "Collection[Any]", depth: int) -> None:
        kind = type(cast(object, value))
        if kind is not tuple and self._again(value):
            return
        self.key += (kind, len(value))
        self._class(kind)
        if isinstance(value, list | dict | set):
            self._mutables.append(value)
        for each in value:
            self._add(name, each, depth)
            if isinstance(value, Mapping):
                self._add(name, value[each], depth)

    def _object(self, name: str, value: Any, depth: int) -> None:
        """An object of the user's by its attributes, where these are all that it has."""
        if self._again(value):
            return
        kind = cast("type[Any]", type(value))
        hidden = kind.__basicsize__ > _PLAIN_SIZE or not hasattr(value, "__dict__")  # by slots, or in C
        if hidden or not all([each is object or "__slots__" not in each.__dict__ for each in kind.__mro__]):
            self._give_up(f"{name} ({kind.__name__})")
            return
        self.key.append(kind)
        self._class(kind)
        inside = cast("dict[str, Any]", vars(value))
        self._mutables.append(inside)
        for inner, each in inside.items():
            self.key.append(inner)
            self._add(f"{name}.{inner}", each, depth)

    def _function(self, function: Callable[..., Any], depth: int) -> None:
        """The closure and defaults of a function, and the globals it names."""
        if self._again(function):
            return
        if isinstance(function, functools.partial):
            for each in (function.func, *function.args, *function.keywords.items()):
                self._add("partial", each, depth)
            return
        if isinstance(function, _CACHED):
            function = cast(Any, function).__wrapped__
        if isinstance(function, types.MethodType):
            self._add("self", function.__self__, depth)
            function = function.__func__
            if _of_torch(function):  # the apply of a torch.autograd.Function: the class says all
                self.key.append(function)
                return
        if not isinstance(function, types.FunctionType):
            self._give_up(type(function).__name__)
            return
        code = function.__code__
        self.held.append(code)  # known by its address, which is quick to compare
        self.key.append(id(code))
        for name, closure in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add(name, closure.cell_contents, depth)
                self._closures.append(closure)
            except ValueError:  # not yet bound
                self._give_up(name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add("a default", value, depth)
        if not _is_constant(function.__globals__.get("__name__")):
            self._globals(code, function.__globals__, depth)

    def _globals(self, code: types.CodeType, inside: dict[str, Any], depth: int) -> None:
        """Globals that code, and code nested in it, names in its own module and in others of the user's."""
        names = (*code.co_names, *_strings(code))
        self._names.update(names)
        if not _ENVIRONMENT.isdisjoint(code.co_names):
            self._give_up("the environment (os.environ)")
        for name in _globals_read(code):
            if name not in inside:
                continue
            value = inside[name]
            self._add(name, value, depth)
            if isinstance(value, types.ModuleType) and not _is_constant(value.__name__) and depth < _MAX_DEPTH:
                for inner in names:
                    if inner in vars(value):
                        self.key.append(inner)
                        self._add(f"{value.__name__}.{inner}", vars(value)[inner], depth + 1)
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                self._globals(each, inside, depth)

    def _class(self, kind: type[Any]) -> None:
        """A class of the user's, with its bases; what code names of it is read in the end."""
        for each in () if id(kind) in self._seen else kind.__mro__:
            if id(each) not in self._seen:
                self._seen[id(each)] = len(self._seen)
                if not _is_constant(each.__module__):
                    self._classes.append(each)

    def _read_classes(self) -> None:
        """Class attributes that the code names, to a fixed point: each may bring more code and classes."""
        done: set[tuple[type, str]] = set()
        size = 0
        while self._classes and size != len(self._names) + len(self._classes):
            size = len(self._names) + len(self._classes)
            for kind in self._classes:  # it may grow meanwhile
                for name in [name for name in kind.__dict__ if name in self._names and (kind, name) not in done]:
                    done.add((kind, name))
                    value = kind.__dict__[name]
                    if isinstance(cast(object, value), _METHODS):
                        value = next(getattr(value, each) for each in _BEHIND if hasattr(value, each))
                    if isinstance(value, types.FunctionType):
                        self._function(value, 1)
                    elif not hasattr(cast(object, type(value)), "__get__"):
                        self.key.append(name)
                        self._add(f"{name} of {kind.__name__}", value, 1)


# -- what is constant while a program runs, and what code names ------------------------------------------------------


@functools.cache
def _is_constant(module: str | None) -> bool:
    """Whether a module of code is torch's, numpy's, Python's or ours."""
    home = (module or "").partition(".")[0]
    return home in ("torch", "numpy", "weft") or home in sys.stdlib_module_names


def _of_torch(value: object) -> bool:
    """Functions and constants of torch and numpy, which do not change and are known by themselves."""
    if isinstance(value, types.FunctionType | types.MethodType):
        return str(getattr(value, "__module__", "")).partition(".")[0] == "torch"
    kind = type(value)
    home = kind.__module__.partition(".")[0]
    if home == "numpy":  # numbers, dtypes, functions; no arrays, which can be written to
        return kind.__hash__ is not None and (callable(value) or hasattr(value, "itemsize"))
    return home == "torch" and (callable(value) or isinstance(value, torch.layout | torch.memory_format))


def _strings(code: types.CodeType) -> list[str]:
    """The strings of code that reads names by strings."""
    return [] if _BY_STRING.isdisjoint(code.co_names) else [each for each in code.co_consts if type(each) is str]


@functools.lru_cache(4096)
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    """Names that code may read in its module: `h.mean()` and `self.net` say nothing of a global `mean`."""
    read = [each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL_READS]
    return (*dict.fromkeys(read), *_strings(code))


# -- running a cell without a trace ----------------------------------------------------------------------------------


def _restore_tensor(tensor: Tensor, version: int, before: Tensor) -> None:
    with torch.no_grad():
        # By value as well: batch norm writes without telling the version.
        equal = torch.isclose(tensor, before, rtol=0, atol=0, equal_nan=tensor.is_floating_point())
        if tensor._version != version or not equal.all():
            tensor.copy_(before)


def _restore(mutable: Any, before: Any) -> None:
    if isinstance(mutable, list):
        mutable[:] = before
    elif isinstance(mutable, dict):  # entry by entry: another thread may read it meanwhile
        table, entries = cast("dict[Any, Any]", mutable), cast("dict[Any, Any]", before)
        for name in table.keys() - entries.keys():
            del table[name]
        table.update(entries)
    else:
        mutable.clear()
        mutable.update(before)


@contextmanager
def unobserved() -> Generator[None]:
    """Inside, hooks on saved tensors, as those of recomputation are, and anomaly mode are off."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.set_detect_anomaly(False), ExitStack() as hooks:
        # Only over hooks of the caller: `torch.func.grad` in a cell accepts no hooks at all.
        if cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None:
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(same, same))
        yield


@contextmanager
def no_foreign_draws(step: Callable[[], object]) -> Generator[None]:
    """Refuse a cell that draws from Python's or numpy's generator: a plan would freeze the numbers of its capture.

    `step` runs the cell once, without tracing. Where an error comes out, both generators are as before, so that the
    eager loop draws what it would have drawn. Raises CaptureError.
    """
    before = _generators()
    try:
        yield
        # Another thread may move the generators as well, but hardly every time.
        if _generators() != before and all([_generators() != (step(), _generators())[1] for _ in range(3)]):
            raise CaptureError(
                "the cell draws from Python's `random` or from numpy's generator, and a plan would keep what was drawn "
                "when it was made; draw by torch, as torch.rand_like does"
            )
    except BaseException:
        python, numpys = pickle.loads(before)
        random.setstate(python)
        if numpys is not None:
            sys.modules["numpy.random"].set_state(numpys)
        raise


def _generators() -> bytes:
    """The states of Python's and numpy's global generators."""
    numpy = sys.modules.get("numpy.random")
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.get_state(legacy=False)))
