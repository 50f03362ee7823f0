"""A cell is run for trial when a plan is made and checked; nobody shall see of that.

before      a copy of the cell's buffers, of its attributes, and of the lists, dicts and sets among these
trial       tracing, the check, the race of backends
after       what differs is put back, whatever happened
"""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.recurrent.owned import OF_MODULES, Owned


@contextmanager
def put_back(reads: Owned) -> Generator[None]:
    """Inside, the cell is run for trial: what it writes into buffers, attributes and lists of its own is undone.

    Parameters it cannot write into.
    """
    kept = [(each, each._version, each.detach().clone()) for each in reads.tensors if not each.requires_grad]
    attributes = [(inside, _contents(inside)) for inside in reads.holders]
    try:
        yield
    finally:
        for inside, before in attributes:
            _restore(inside, before)
        with torch.no_grad():
            for each, version, before in kept:
                if each._version != version or _changed(each, before):
                    each.copy_(before)


def _contents(inside: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attributes, and what is in those that are lists, dicts or sets."""
    return {
        name: (value, copy.copy(value) if type(value) in (list, dict, set) else None)
        for name, value in inside.items()
        if name not in OF_MODULES
    }


def _restore(inside: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in inside if name not in OF_MODULES and name not in before]:
        del inside[name]
    for name, (value, content) in before.items():
        inside[name] = value
        if content is not None:
            value.clear()
            (value.extend if type(value) is list else value.update)(content)


def _changed(now: Tensor, before: Tensor) -> bool:
    """By value: batch norm writes without telling the version."""
    both_nan = now.isnan() & before.isnan() if now.is_floating_point() else torch.zeros_like(now, dtype=torch.bool)
    return bool(((now != before) & ~both_nan).any())
