"""What does not change while a program runs, and what code says of what does.

plain     numbers, words, flags: known by value
lasting   torch's, numpy's and Python's own code; modules and classes, as far as only the thing itself counts
names     what a function may read: of its module, of the classes it meets, of a user's modules of code
"""

import dis
import enum
import functools
import sys
import types
from typing import Any, cast

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
"""Known by value."""
LASTING = (types.ModuleType, types.MethodDescriptorType, type(...), range)
"""Known by themselves."""
CACHED = type(functools.lru_cache(lambda: None))
_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow", "matmul")
UNNAMED = frozenset({"forward", "__call__", "__bool__", "__int__", "__float__", "__neg__"}).union(
    f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")
)
"""Methods that run without being named."""
_CONSTANTS = (torch.layout, torch.memory_format)
_OF_GLOBALS = frozenset(name for name in dis.opmap if name.endswith(("_GLOBAL", "_GLOBALS", "_NAME")))
_BY_WORD = frozenset({"getattr", "globals", "vars"})
_ENVIRONMENT = frozenset({"environ", "getenv"})


class _Empty:
    """An object of a class like this has attributes, and nothing else that could change."""


_EMPTY = _Empty.__basicsize__


@functools.cache
def lasts(module: str | None) -> bool:
    """Whether a module of code is torch's, Python's or ours."""
    home = (module or "").partition(".")[0]
    return home in ("torch", "numpy", "weft") or home in sys.stdlib_module_names


def of_torch(value: object) -> bool:
    """Functions and constants of torch and numpy, which do not change and are known by themselves."""
    if isinstance(value, types.FunctionType | types.MethodType):
        return str(getattr(value, "__module__", "")).partition(".")[0] == "torch"
    kind = type(value)
    home = kind.__module__.partition(".")[0]
    if home == "numpy":  # numbers, dtypes, functions; no arrays, which can be written to
        return kind.__hash__ is not None and (callable(value) or hasattr(value, "itemsize"))
    return home == "torch" and (callable(value) or isinstance(value, _CONSTANTS))


def open_object(value: object) -> bool:
    """Whether the attributes of an object of the user's are all that it has: no slots, nothing hidden in C."""
    kind = type(value)
    if kind.__basicsize__ > _EMPTY or not hasattr(value, "__dict__"):
        return False
    return all([each is object or "__slots__" not in each.__dict__ for each in kind.__mro__])


def function_of(found: object) -> types.FunctionType | None:
    """The function behind what stands in a class under the name of a method or property; None for anything else."""
    if isinstance(found, staticmethod | classmethod):
        found = cast(Any, found).__func__
    elif isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = cast(Any, found).func
    return found if isinstance(found, types.FunctionType) else None


def names_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code says, those given to `getattr`, `globals` and `vars` as words among them."""
    return (*code.co_names, *_words_of(code))


@functools.lru_cache(4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Those of `names_of` that may stand in its module: `h.mean()` and `self.net` say nothing of a global `mean`."""
    read = [each.argval for each in dis.get_instructions(code) if each.opname in _OF_GLOBALS]
    return (*dict.fromkeys(read), *_words_of(code))


def _words_of(code: types.CodeType) -> list[str]:
    return [] if _BY_WORD.isdisjoint(code.co_names) else [each for each in code.co_consts if type(each) is str]


def reads_environment(code: types.CodeType) -> bool:
    """Whether code names the environment of the process, which may change unseen."""
    return not _ENVIRONMENT.isdisjoint(code.co_names)
