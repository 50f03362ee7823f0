"""What a cell reads besides its arguments: tensors, which a plan looks up anew, and settings, which it was made for.

    module      its parameters and buffers; its and its children's attributes; what its methods name
    function    what it closes over, has as defaults, and names in its module
    class       the attributes and methods that code names, of the module's own class or of one named in its module
    any of them may be, or hold in lists, tuples, dicts and plain objects:
                tensors, modules, numbers, words, flags, functions

A plan is found again only if all of it is as it was, so a changed flag, another activation or a replaced tensor makes
another plan. A cell that reads what cannot be known in this way, such as a file or a generator, or whose hooks want to
see every step, is run by the eager loop.
"""

import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_FIXED = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    type,
    type(...),
    range,
)
_CONSTANTS = (torch.layout, torch.memory_format)
_DEEP = 8
_MISSING = object()
_torch_module = cast(Any, nn.modules.module)
OF_MODULES = frozenset(nn.Module().__dict__)
"""What every module has; the other attributes are the user's."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Owned:
    """What was found: tensors (of which parameters want gradients), a key of it all, and what cannot be known."""

    tensors: list[Tensor] = field(default_factory=list[Tensor])
    key: list[Hashable] = field(default_factory=list[Hashable])
    unknown: list[str] = field(default_factory=list[str])
    held: list[object] = field(default_factory=list[object])
    """What the key knows by its place in memory; to be kept alive as long as the key."""
    holders: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The attributes of modules and objects."""
    _seen: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that want a gradient."""
        return [each for each in self.tensors if each.requires_grad]

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """Look at one thing that the cell can reach; `name` is for people."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, _PLAIN):
            self.key += (type(value), value)  # 1, 1.0 and True are equal, but not the same to a graph
        elif isinstance(value, nn.Module):
            self.module(value)
        elif isinstance(value, _FIXED) or _of_torch(value):
            self.key.append(value)
        elif depth >= _DEEP:
            self._give_up(f"{name} ({type(value).__name__}, nested too deeply)")
        elif isinstance(value, list | tuple | set | frozenset | Mapping):
            self._container(name, cast("Collection[Any]", value), depth + 1)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.function(cast("Callable[..., Any]", value), depth + 1)
        else:
            self._object(name, value, depth + 1)

    def module(self, module: nn.Module) -> None:
        """A module's tensors, attributes and hooks, and its children's."""
        if self._again(module):
            return
        inside, kind = module.__dict__, type(module)
        self.holders.append(inside)
        self.key += (kind, inside["training"])
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
        if not _known(kind.__module__):
            self._method(kind, "forward", inside, 1)

    def _method(self, kind: type[Any], name: str, instance: Mapping[str, Any], depth: int) -> None:
        """A method of the user's class, with the class's attributes and the other methods that it names."""
        found = _function_of(_static(kind, name))
        function = None if found is None else inspect.unwrap(found)
        if not isinstance(function, types.FunctionType) or _known(function.__module__) or self._again(function):
            return
        code = function.__code__
        self._code(code)
        self._globals(code, function, depth)
        self._of_class(kind, code, instance, depth)

    def _of_class(self, kind: type[Any], code: types.CodeType, instance: Mapping[str, Any], depth: int) -> None:
        """What code names of a user's class and an instance does not have itself."""
        for each in code.co_names:
            value = _static(kind, each)
            if each in instance or value is _MISSING or depth >= _DEEP:
                continue
            if _function_of(value) is not None:
                self._method(kind, each, instance, depth + 1)
            elif isinstance(value, (*_PLAIN, Tensor, nn.Module, list, tuple, dict)):
                self.key.append(each)
                self.add(f"{each} of {kind.__name__}", value, depth)

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
        if isinstance(function, types.MethodType):
            self.add("self", function.__self__, depth)
            function = function.__func__
            if _of_torch(function):  # the apply of a torch.autograd.Function: the class says all
                self.key.append(function)
                return
        if not isinstance(function, types.FunctionType):
            self._give_up(type(function).__name__)
            return
        code = function.__code__
        self._code(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.add(name, cell.cell_contents, depth)
            except ValueError:  # not yet bound
                self._give_up(name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add("a default", value, depth)
        self._globals(code, function, depth)

    def _globals(self, code: types.CodeType, function: types.FunctionType, depth: int) -> None:
        """What a function, and functions within it, name in their module."""
        for name in code.co_names:
            if name in function.__globals__:
                value = function.__globals__[name]
                self.add(name, value, depth)
                if isinstance(value, types.ModuleType) and not _known(value.__name__):
                    self._module_of_code(value, code, depth)
                elif isinstance(value, type) and not _known(value.__module__):
                    self._of_class(value, code, {}, depth)
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                self._globals(each, function, depth)

    def _module_of_code(self, module: types.ModuleType, code: types.CodeType, depth: int) -> None:
        """What a function reads of a user's module of code, such as settings that stand there."""
        for name in code.co_names:
            if name in vars(module) and depth < _DEEP:
                self.key.append(name)
                self.add(f"{module.__name__}.{name}", vars(module)[name], depth + 1)

    def _container(self, name: str, value: "Collection[Any]", depth: int) -> None:
        """What is in it now: a list that has changed by the next call is another key then."""
        kind = type(cast(object, value))
        if kind is not tuple and self._again(value):
            return
        self.key += (kind, len(value))
        for each in value:
            self.add(name, each, depth)
            if isinstance(value, Mapping):
                self.add(name, value[each], depth)

    def _object(self, name: str, value: Any, depth: int) -> None:
        """An object of the user's by its attributes, where these are all that it has."""
        if self._again(value):
            return
        kind = cast("type[Any]", type(value))
        plain = kind.__flags__ & _HEAP and all(each is object or "__slots__" not in vars(each) for each in kind.__mro__)
        if not plain or not hasattr(value, "__dict__"):
            self._give_up(f"{name} ({kind.__name__})")
            return
        self.key.append(kind)
        inside = cast("dict[str, Any]", vars(value))
        self.holders.append(inside)
        for inner, each in inside.items():
            self.key.append(inner)
            self.add(f"{name}.{inner}", each, depth)

    def _code(self, code: types.CodeType) -> None:
        """By identity, which is quick to compare; it is held, so that no other takes its place in memory."""
        self.held.append(code)
        self.key.append(id(code))

    def _give_up(self, name: str) -> None:
        self.unknown.append(name)
        self.key.append(name)

    def _tensor(self, tensor: Tensor) -> None:
        if not self._again(tensor):
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
    return found


def _static(kind: type[Any], name: str) -> object:
    """What a class has under a name, as it stands there; quicker than `inspect.getattr_static`."""
    for each in kind.__mro__:
        if name in each.__dict__:
            return each.__dict__[name]
    return _MISSING


def _function_of(found: object) -> types.FunctionType | None:
    """The function behind what stands in a class under the name of a method or property; None for anything else."""
    if isinstance(found, staticmethod | classmethod):
        found = cast(Any, found).__func__
    elif isinstance(found, property):
        found = found.fget
    return found if isinstance(found, types.FunctionType) else None


_HEAP = 1 << 9
"""The flag of a class that was written in Python (`Py_TPFLAGS_HEAPTYPE`)."""


def _known(module: str | None) -> bool:
    """Whether a module of code is torch's, Python's or ours: it does not change while a program runs."""
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
    return home == "torch" and (callable(value) or isinstance(value, _CONSTANTS))
