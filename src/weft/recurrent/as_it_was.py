"""A cell as it was when a sequence ran: for a while its modules hold again the tensors that they held then.

    forward     functional_call puts p into the module, the sequence runs over p, the module's own weight comes back
    backward    runs the cell once more: p is put into the module again, and afterwards the own weight

The same holds for a parameter that was replaced in between. A flag or an attribute that was changed is not put back:
then the cell is not what it was, and who asks is told so.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from weft.recurrent.owned import Owned, owned


@contextmanager
def as_it_was(function: Callable[..., Any], before: Owned) -> Generator[bool]:
    """Inside, what `function` reads is `before`; yields whether that could be had."""
    now = owned(function)
    if now.key == before.key:
        yield True
        return
    then = {id(new): old for new, old in zip(now.tensors, before.tensors, strict=False)}
    slots = [(table, name, table[name]) for inside in now.holders for table in _tables(inside) for name in table]
    try:
        for table, name, tensor in slots:
            table[name] = then.get(id(tensor), tensor)
        yield owned(function).key == before.key
    finally:
        for table, name, tensor in slots:
            table[name] = tensor


def _tables(inside: dict[str, Any]) -> list[dict[str, Tensor | None]]:
    """The parameters and buffers of a module, by name; none for what is no module."""
    found = [inside.get(name) for name in ("_parameters", "_buffers")]
    return [cast("dict[str, Tensor | None]", each) for each in found if isinstance(each, dict)]
