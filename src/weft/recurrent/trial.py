"""A cell is run for trial when a plan is made and checked; nobody shall see of that.

before      a copy of the cell's buffers; of its attributes and its classes'; of what functions close over and name in
            their modules; of the lists, dicts and sets among these; of the state of Python's and numpy's generators
trial       tracing, the check, the race of backends
after       what differs is put back, whatever happened
"""

import operator
import pickle
import random
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from weft.recurrent.capture import CaptureError
from weft.recurrent.draws import Layouts
from weft.recurrent.owned import OF_MODULES, Owned

_MISSING = object()
_LOOKS = 3


@contextmanager
def unobserved() -> Generator[None]:
    """Inside, what is tried is no business of what autograd was told to do with the user's own graph.

    Hooks on saved tensors, as those of recomputation are; anomaly mode, which looks at every value; and the cache of
    parametrized weights, which would hold a weight that was made without a graph.
    """

    def same(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(same, same), torch.autograd.set_detect_anomaly(False), _uncached():
        yield


@contextmanager
def _uncached() -> Generator[None]:
    """Inside, `parametrize.cached` does not hold."""
    cache = cast(Any, parametrize)
    before = cache._cache_enabled, cache._cache
    if not before[0]:  # it is one for the whole process: so as not to meddle with that of another thread
        yield
        return
    cache._cache_enabled, cache._cache = 0, {}
    try:
        yield
    finally:
        cache._cache_enabled, cache._cache = before


@contextmanager
def put_back(reads: Owned) -> Generator[None]:
    """Inside, the cell is run for trial: what it writes into anything but parameters is undone.

    Parameters it cannot write into.
    """
    with ExitStack() as undo:
        for each in reads.tensors:
            if not each.requires_grad:
                undo.callback(_restore_tensor, each, each._version, each.detach().clone())
        for inside in reads.holders:
            undo.callback(_restore_attributes, inside, dict(inside))
        for kind in reads.classes:
            undo.callback(_restore_class, kind, dict(kind.__dict__))
        for cell in reads.cells:
            undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
        for inside, names in reads.sources:
            undo.callback(_restore_names, inside, {name: inside[name] for name in names if name in inside})
        for container in reads.containers:
            undo.callback(_restore_container, container, _contents(container))
        yield


def _restore_tensor(tensor: Tensor, version: int, before: Tensor) -> None:
    with torch.no_grad():
        if tensor._version != version or _changed(tensor, before):
            tensor.copy_(before)


def _restore_attributes(inside: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in inside if name not in OF_MODULES and name not in before]:
        del inside[name]
    inside.update({name: value for name, value in before.items() if name not in OF_MODULES})


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    for name, value in list(kind.__dict__.items()):
        if name not in before:
            delattr(kind, name)
        elif value is not before[name]:
            setattr(kind, name, before[name])


def _restore_names(inside: dict[str, Any], before: dict[str, Any]) -> None:
    """Of a module of code only what differs: others may write there meanwhile."""
    inside.update({name: value for name, value in before.items() if inside.get(name, _MISSING) is not value})


def _contents(container: Any) -> list[Any]:
    """What is in a list or set; the keys of a dict, and then its values."""
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _restore_container(container: Any, before: list[Any]) -> None:
    now = _contents(container)
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        half = len(before) // 2
        container.update(zip(before[:half], before[half:], strict=True) if isinstance(container, dict) else before)


def _changed(now: Tensor, before: Tensor) -> bool:
    """By value: batch norm writes without telling the version."""
    both_nan = now.isnan() & before.isnan() if now.is_floating_point() else torch.zeros_like(now, dtype=torch.bool)
    return bool(((now != before) & ~both_nan).any())


@contextmanager
def drawing_nothing(step: Callable[[], object]) -> Generator[None]:
    """Refuses a cell that draws from Python's generator or numpy's, and has it draw the same again.

    `step` runs the cell once, without tracing. Raises CaptureError.
    """
    before = _generators()
    try:
        yield
        if _generators() != before and all([_moves_them(step) for _ in range(_LOOKS)]):
            raise CaptureError(
                "the cell draws from Python's `random` or from numpy's generator, and a plan would keep what was drawn "
                "when it was made; draw by torch, as torch.rand_like does"
            )
    except BaseException:
        _set_generators(before)
        raise


def check_layouts(step: Callable[[Any], Any], state: Any) -> None:
    """Refuses a cell of which what it draws lies in memory in another way in later steps: other numbers come so.

    A state may be given transposed, and then be row by row. `step` runs the cell once, from a state. Raises
    CaptureError.
    """
    found: list[list[tuple[int, ...]]] = []
    for _ in range(_LOOKS):
        with Layouts() as layouts:
            _, state = step(state)
        found.append(layouts.seen)
    if any(each != found[0] for each in found):
        raise CaptureError(
            "the cell draws numbers for a state in the order in which that lies in memory, and the first state lies in "
            "another way than later ones, as a transposed tensor does; make both contiguous, as by .contiguous()"
        )


def _moves_them(step: Callable[[], object]) -> bool:
    """Whether the generators move while a step runs. Another thread may move them as well, but hardly every time."""
    before = _generators()
    step()
    return _generators() != before


def _generators() -> bytes:
    """What Python's and numpy's own generators will draw next."""
    numpy = sys.modules.get("numpy.random")
    return pickle.dumps((random.getstate(), None if numpy is None else numpy.get_state(legacy=False)))


def _set_generators(state: bytes) -> None:
    python, numpys = pickle.loads(state)
    random.setstate(python)
    if numpys is not None:
        sys.modules["numpy.random"].set_state(numpys)
