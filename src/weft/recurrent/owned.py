"""What a cell reads besides its arguments: tensors, which a plan looks up anew, and settings, which it was made for.

    module      its parameters and buffers; its and its children's attributes
    function    what it closes over, has as defaults, and names in its module
    class       of all that the cell can reach, with its parents: the attributes and methods that any of the code names
    any of them may be, or hold in lists, tuples, dicts and plain objects:
                tensors, modules, numbers, words, flags, functions, classes

A plan is found again only if all of it is as it was, so a changed flag, another activation or a replaced tensor makes
another plan. A cell that reads what cannot be known in this way, such as a file or a generator, or whose hooks want to
see every step, is run by the eager loop.
"""

import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from weft.recurrent.lasting import (
    CACHED,
    LASTING,
    PLAIN,
    UNNAMED,
    function_of,
    globals_of,
    lasts,
    names_of,
    of_torch,
    open_object,
    reads_environment,
)

_DEEP = 8
_torch_module = cast(Any, nn.modules.module)
OF_MODULES = frozenset(nn.Module().__dict__)
"""What every module has; the other attributes are the user's."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_UNREADY = (UninitializedParameter, UninitializedBuffer)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, CACHED)


@dataclass
class Owned:
    """What was found: tensors (of which parameters want gradients), a key of it all, and what cannot be known."""

    tensors: list[Tensor] = field(default_factory=list[Tensor])
    key: list[Hashable] = field(default_factory=list[Hashable])
    unknown: list[str] = field(default_factory=list[str])
    remote: list[str] = field(default_factory=list[str])
    """Classes of the modules that servers compute."""
    unready: bool = False
    """Whether there is a parameter of which a lazy module does not know the shape yet."""
    held: list[object] = field(default_factory=list[object])
    """What the key knows by its place in memory; to be kept alive as long as the key."""
    holders: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The attributes of modules and objects."""
    containers: list[Any] = field(default_factory=list[Any])
    """Lists, dicts and sets."""
    cells: list[types.CellType] = field(default_factory=list[types.CellType])
    """What functions close over."""
    sources: list[tuple[dict[str, Any], Iterable[str]]] = field(default_factory=list[Any])
    """Modules of code by their dicts, and the names that code says of what is in them."""
    classes: list[type] = field(default_factory=list[type])
    """Those of the user's."""
    _names: set[str] = field(default_factory=lambda: set(UNNAMED))
    _seen: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that want a gradient."""
        return [each for each in self.tensors if each.requires_grad]

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """Look at one thing that the cell can reach; `name` is for people."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, PLAIN):
            self.key += (type(value), value)  # 1, 1.0 and True are equal, but not the same to a graph
        elif isinstance(value, nn.Module):
            self.module(value)
        elif isinstance(value, type):
            self.key.append(value)
            self._class(value)
        elif isinstance(value, LASTING) or of_torch(value):
            self.key.append(value)
        elif depth >= _DEEP:
            self._give_up(f"{name} ({type(value).__name__}, nested too deeply)")
        elif isinstance(value, list | tuple | set | frozenset | Mapping):
            self._container(name, cast("Collection[Any]", value), depth + 1)
        elif isinstance(value, _FUNCTIONS):
            self.function(cast("Callable[..., Any]", value), depth + 1)
        elif isinstance(value, types.BuiltinFunctionType):
            self._builtin(name, value, depth + 1)
        else:
            self._object(name, value, depth + 1)

    def module(self, module: nn.Module) -> None:
        """A module's tensors, attributes and hooks, and its children's."""
        if self._again(module):
            return
        inside, kind = module.__dict__, type(module)
        if hasattr(kind, "steps_in_backward"):  # a remote expert: what it holds are connections
            self.remote.append(kind.__name__)
            self._give_up(kind.__name__)
            return
        if "training" not in inside:  # the attributes are not where those of a module are
            self._give_up(f"a compiled or scripted module ({kind.__name__})")
            return
        self.holders.append(inside)
        self.key += (kind, inside["training"])
        self._class(kind)
        if any([inside[name] for name in _HOOKS]):
            self._give_up(f"the hooks of {kind.__name__}")
        for name, tensor in (*inside["_parameters"].items(), *inside["_buffers"].items()):
            self.key.append(name)  # the slot counts: two tensors may change places
            if tensor is None:
                self.key.append(None)
            else:
                self._tensor(tensor)
        for name, child in inside["_modules"].items():
            self.key.append(name)
            if child is not None:
                self.module(child)
        for name, value in inside.items():
            if name not in OF_MODULES:
                self.key.append(name)
                self.add(f"{name} of {kind.__name__}", value, 1)

    def _class(self, kind: type[Any]) -> None:
        """A class of the user's, with its parents; what code names of it is looked at in the end."""
        if id(kind) in self._seen:
            return
        for each in kind.__mro__:
            if id(each) not in self._seen:
                self._seen[id(each)] = len(self._seen)
                if not lasts(each.__module__):
                    self.classes.append(each)

    def named(self) -> None:
        """What the code names of the classes, until nothing new comes of it: each may bring more code and classes."""
        done: set[tuple[type, str]] = set()
        size = (0, 0)
        while self.classes and size != (len(self._names), len(self.classes)):
            size = (len(self._names), len(self.classes))
            for each in self.classes:  # it may grow meanwhile
                for name in [name for name in each.__dict__ if name in self._names]:
                    if (each, name) not in done:
                        done.add((each, name))
                        self._of_class(each, name, each.__dict__[name])

    def _of_class(self, kind: type[Any], name: str, value: object) -> None:
        function = function_of(value)
        if function is not None:
            self.function(function, 1)
        elif not hasattr(type(value), "__get__"):
            self.key.append(name)
            self.add(f"{name} of {kind.__name__}", value, 1)

    def _again(self, value: object) -> bool:
        """Whether a thing was seen before; then the key says which it is, since two names may change places."""
        at = self._seen.get(id(value))
        if at is None:
            self._seen[id(value)] = len(self._seen)
            return False
        self.key.append(("again", at))
        return True

    def function(self, function: Callable[..., Any], depth: int = 0) -> None:
        """What a function closes over, has as defaults, or names in its module."""
        if self._again(function):
            return
        if isinstance(function, functools.partial):
            for each in (function.func, *function.args, *function.keywords.items()):
                self.add("partial", each, depth)
            return
        if isinstance(function, CACHED):
            function = cast(Any, function).__wrapped__
        if isinstance(function, types.MethodType):
            self.add("self", function.__self__, depth)
            function = function.__func__
            if of_torch(function):  # the apply of a torch.autograd.Function: the class says all
                self.key.append(function)
                return
        if not isinstance(function, types.FunctionType):
            self._give_up(type(function).__name__)
            return
        code = function.__code__
        self.held.append(code)  # known by its place, which is quick to compare; held, so that no other takes it
        self.key.append(id(code))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.cells.append(cell)
            try:
                self.add(name, cell.cell_contents, depth)
            except ValueError:  # not yet bound
                self._give_up(name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add("a default", value, depth)
        if not lasts(function.__globals__.get("__name__")):
            self._globals(code, function.__globals__, depth)

    def _globals(self, code: types.CodeType, inside: dict[str, Any], depth: int) -> None:
        """What a function, and functions within it, name in their module."""
        names, read = names_of(code), globals_of(code)
        self._names.update(names)
        self.sources.append((inside, read))
        if reads_environment(code):
            self._give_up("the environment (os.environ)")
        for name in read:
            if name in inside:
                value = inside[name]
                self.add(name, value, depth)
                if isinstance(value, types.ModuleType) and not lasts(value.__name__):
                    self._module_of_code(value, names, depth)
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                self._globals(each, inside, depth)

    def _module_of_code(self, module: types.ModuleType, names: tuple[str, ...], depth: int) -> None:
        """What a function reads of a user's module of code, such as settings that stand there."""
        inside = vars(module)
        self.sources.append((inside, names))
        for name in names:
            if name in inside and depth < _DEEP:
                self.key.append(name)
                self.add(f"{module.__name__}.{name}", inside[name], depth + 1)

    def _builtin(self, name: str, value: types.BuiltinFunctionType, depth: int) -> None:
        """A function in C by itself; a method in C by its object too."""
        self.key.append(value)
        if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType | type):
            self.add(name, value.__self__, depth)

    def _container(self, name: str, value: "Collection[Any]", depth: int) -> None:
        """What is in it now: a list that has changed by the next call is another key then."""
        kind = type(cast(object, value))
        if kind is not tuple and self._again(value):
            return
        self.key += (kind, len(value))
        self._class(kind)
        if isinstance(value, list | dict | set):
            self.containers.append(value)
        for each in value:
            self.add(name, each, depth)
            if isinstance(value, Mapping):
                self.add(name, value[each], depth)

    def _object(self, name: str, value: Any, depth: int) -> None:
        """An object of the user's by its attributes, where these are all that it has."""
        if self._again(value):
            return
        kind = cast("type[Any]", type(value))
        if not open_object(value):
            self._give_up(f"{name} ({kind.__name__})")
            return
        self.key.append(kind)
        self._class(kind)
        inside = cast("dict[str, Any]", vars(value))
        self.holders.append(inside)
        for inner, each in inside.items():
            self.key.append(inner)
            self.add(f"{name}.{inner}", each, depth)

    def _give_up(self, name: str) -> None:
        self.unknown.append(name)
        self.key.append(name)

    def _tensor(self, tensor: Tensor) -> None:
        if self._again(tensor):
            return
        if type(tensor) in _UNREADY:
            self.unready = True
            return
        self.tensors.append(tensor)
        self.key.append((id(tensor), tensor.requires_grad, tensor.shape, tensor.dtype))


def owned(cell: Callable[..., Any]) -> Owned:
    """What a cell reads. Looked up at every call of a network, so it must be quick."""
    found = Owned()
    if _torch_module._global_forward_hooks or _torch_module._global_forward_pre_hooks:
        found.unknown.append("hooks of all modules")
    if isinstance(cell, nn.Module):
        found.module(cell)
        for tensor in (*cell.parameters(), *cell.buffers()):  # a module may say itself what its tensors are
            found.add("a tensor", tensor)
    else:
        found.add("cell", cell)
    found.named()
    return found
