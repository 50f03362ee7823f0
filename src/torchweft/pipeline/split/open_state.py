"""State besides arguments that the code between blocks reads: part of the key of a program, so that no stale one runs.

    self.alpha, self.block.p     attributes of modules, noted while the code between blocks is recorded
    ALPHA, settings.alpha        globals that functions of this code name, and variables that they close over
    self.args.inner["alpha"]     values in lists, dicts and plain objects, down to `DEPTH` levels and `ENTRIES` values

Comparing all attributes of all modules at every step would take longer than the step of a small model. It would also
record a new program whenever a block counts its own calls. So a recording notes the attributes that are read, and each
step compares only these. Other state is left to `verify.py`: state outside of Python (a C extension, a file, the
environment), deeper levels, and globals of installed packages.
"""

import dis
import enum
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

DEPTH = 4  # levels of containers and objects that are compared by value
ENTRIES = 4096  # values of one attribute that are compared: the first ones, and the length of each container
PLAIN: tuple[type[Any], ...] = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.Size, slice, range),
)
"""Types that keys compare by value, and that a block can return together with tensors."""

_PLAIN = frozenset({*PLAIN} - {slice})  # a slice cannot be hashed before Python 3.12
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_ABSENT = object()
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_WRAPPERS = (types.MethodType, staticmethod, classmethod, property, partial)
_WRAPPED = ("__func__", "fget", "func")  # the attributes in which wrappers hold their function


class OpenState:
    """The attributes and globals that were read between blocks so far, and their present values."""

    def __init__(self) -> None:
        # By the id() of a table of attributes or globals, and a name in it: the table, the name, and a description.
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str, str]] = {}
        self._codes: set[types.CodeType] = set()

    @contextmanager
    def watching(self, model: nn.Module, is_open: Callable[[], bool]) -> Generator[None]:
        """Note every attribute of the model's modules that is read inside, while `is_open` is true."""
        names = {id(module): name or "self" for name, module in cast(Any, model).named_modules()}

        def reader(read: Callable[..., Any]) -> Callable[..., Any]:
            def watched(module: Any, name: str) -> Any:
                value = read(module, name)
                if name not in _OF_MODULES and name[:2] != "__" and is_open() and id(module) in names:
                    self._note_attribute(module, name, names[id(module)])
                    # The code that reads the attribute is code between blocks, so its globals count too.
                    frame = sys._getframe(1)
                    self._note_code(frame.f_code, frame.f_globals, DEPTH)
                return value

            return watched

        kinds = cast("set[Any]", {type(module) for module in model.modules()})
        own: dict[Any, Any] = {kind: vars(kind).get("__getattribute__") for kind in kinds}
        # All readers are made before any class changes. Otherwise a subclass would wrap the reader of its base class.
        readers = {kind: reader(kind.__getattribute__) for kind in kinds}
        try:
            for kind, read in readers.items():
                kind.__getattribute__ = read
            yield
        finally:
            for kind, read in own.items():
                if read is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = read

    def key(self) -> tuple[Hashable, ...]:
        """The present values. Two keys are equal if no value has changed in between."""
        by_id: dict[int, Hashable] = {}  # modules often share one object, such as a config
        states: list[Hashable] = []
        for table, name, _ in self._places.values():
            value = table.get(name, _ABSENT)
            state = by_id.get(id(value))
            if state is None:
                state = by_id[id(value)] = _state_of(value)
            states.append(state)
        return tuple(states)

    def described(self, modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Hashable]:
        """The present values by name, without tensors: of all that was read, and of all attributes of `modules`."""
        values = {words: table.get(name, _ABSENT) for table, name, words in self._places.values()}
        for path, module in modules:
            values |= {f"{path or 'self'}.{key}": x for key, x in vars(module).items() if key not in _OF_MODULES}
        return {words: _state_of(value) for words, value in values.items() if not isinstance(value, Tensor)}

    def line_of(self, name: str) -> str:
        """File and line where the code between blocks sets or uses an attribute. Empty if it does not name it."""
        lines: dict[str, str] = {}
        for code in self._codes:
            for instruction in dis.get_instructions(code):
                if instruction.argval == name and instruction.positions is not None:
                    lines.setdefault(instruction.opname, f"{code.co_filename}:{instruction.positions.lineno}")
        return lines.get("STORE_ATTR") or next(iter(lines.values()), "")

    def _note_attribute(self, module: nn.Module, name: str, words: str) -> None:
        # By the id() of the table, and not of the module: the entry keeps the table alive, so the id is not reused.
        table = vars(module)
        if (id(table), name) in self._places:
            return
        self._places[id(table), name] = table, name, f"{words}.{name}"
        self._note_function(table.get(name), DEPTH)
        kind = next((base for base in type(module).__mro__ if name in vars(base)), None)
        if kind is not None and not _is_constant(kind.__module__) and not self._note_function(vars(kind)[name], DEPTH):
            self._places[id(kind), name] = vars(kind), name, f"{kind.__name__}.{name}"

    def _note_function(self, function: Any, depth: int) -> bool:
        """Note the globals and the closure of a function. Returns False if `function` is not a function."""
        while isinstance(function, _WRAPPERS):
            wrapper = cast(Any, function)
            function = next(getattr(wrapper, attribute) for attribute in _WRAPPED if hasattr(wrapper, attribute))
        if not isinstance(function, types.FunctionType):
            return False
        if depth and not _is_constant(function.__module__):
            if function.__closure__:
                self._places.setdefault((id(function), ""), ({"": function}, "", function.__name__))
            self._note_code(function.__code__, function.__globals__, depth)
        return True

    def _note_code(self, code: types.CodeType, held: dict[str, Any], depth: int) -> None:
        """Note the globals that code uses, also through functions and modules of the user."""
        if code in self._codes or _is_constant(held.get("__name__")):
            return
        self._codes.add(code)
        for name in code.co_names:
            value = held.get(name)
            if isinstance(value, type | types.ModuleType):
                home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
                inside = {} if _is_constant(home) else vars(value)
                for inner in set(code.co_names).intersection(inside):
                    self._note_global(inside, inner, f"{name}.{inner}", depth)
            elif name in held:
                self._note_global(held, name, name, depth)

    def _note_global(self, held: Mapping[str, Any], name: str, words: str, depth: int) -> None:
        value = held[name]
        # A logger is left out, because it caches its levels and so changes with any message.
        if not self._note_function(value, depth - 1) and not isinstance(value, logging.Logger):
            self._places.setdefault((id(held), name), (held, name, words))


def _state_of(value: Any, depth: int = DEPTH, left: list[int] | None = None) -> Hashable:
    """A hashable image of a value, equal if the value has not changed. `left` holds how many values still count."""
    kind = cast("type[Any]", type(value))
    # With the type, because True == 1 == 1.0.
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return kind, value
    left = left or [ENTRIES]
    if kind is slice:
        return kind, value.start, value.stop, value.step
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.nbytes <= 8 * ENTRIES:
        return kind, value.dtype, value.shape, value.tobytes()
    inside = _inside(value) if depth and left[0] > 0 else None
    if inside is None:
        return id(value)
    states: list[Hashable] = [kind]
    for inner in inside:
        if left[0] <= 0:
            break
        left[0] -= 1
        states.append(_state_of(inner, depth - 1, left))
    return tuple(states)


def _inside(value: Any) -> Iterable[Any] | None:
    """Values in a container, plain object or function. None for objects that are compared by identity."""
    if isinstance(value, list | tuple | set | frozenset | deque):
        return (len(cast("list[Any]", value)), *cast("list[Any]", value))
    if isinstance(value, dict):
        return chain.from_iterable(cast("dict[Any, Any]", value).items())
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]  # without empty cells
        return (value.__code__, value.__defaults__, *(cell.cell_contents for cell in cells))
    if isinstance(value, Tensor | nn.Module | type | types.ModuleType):
        return None
    slots = _slots(cast("type[Any]", type(value)))
    if not slots and not hasattr(value, "__dict__"):
        return None
    held = chain.from_iterable(getattr(value, "__dict__", {}).items())
    return chain(held, (getattr(value, name, None) for name in slots))


@cache
def _slots(kind: type[Any]) -> list[str]:
    return [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]


@cache
def _is_constant(module: str | None) -> bool:
    """Whether a module belongs to Python or an installed package, whose globals users are not expected to change."""
    home = (module or "").partition(".")[0]
    if home in ("torch", "numpy", "torchweft") or home in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return not _INSTALLED.isdisjoint(Path(file).parts)
