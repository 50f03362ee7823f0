"""How the results of a sequence look, before any number is known: one step of the cell on tensors without content.

`torch.compile` and `torch.export` ask this of an operator. The cell runs once, on fake tensors, in the eager loop; what
comes out is stretched to T steps. T and N may be symbols.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from weft.core.tree import map_leaves
from weft.recurrent import eager
from weft.recurrent.backends import Plans
from weft.recurrent.rows import Rows


class Looks(Plans):
    """In place of a network's plans: it runs one step, and says what T steps would have looked like."""

    def run(self, job: eager.Job) -> eager.Unrolled:
        """See `Plans.run`; the values that it returns are arbitrary."""
        inputs, rows, steps = job.inputs, job.rows, job.inputs.steps
        if not steps:
            return job.run()
        one = replace(
            inputs, leaves=[leaf[:1] if isinstance(leaf, Tensor) else leaf for leaf in inputs.leaves], steps=1
        )
        tables = _Unread(*(None if each is None else each[:1] for each in (rows.valid, rows.reset)))
        outputs, last, states = replace(job, inputs=one, rows=tables).run()
        known: dict[int, Tensor] = {}

        def stretched(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return known.setdefault(id(leaf), leaf.new_empty((steps, *leaf.shape[1:])))

        return map_leaves(stretched, outputs), last, map_leaves(stretched, states)


@dataclass(frozen=True)
class _Unread(Rows):
    """Tables whose content cannot be looked at."""

    def valid_steps(self, steps: int) -> list[Tensor | None]:
        return [None] * steps if self.valid is None else list(self.valid.unbind(0))

    def reset_steps(self, steps: int) -> list[Tensor | None]:
        return [None] * steps if self.reset is None else list(self.reset.unbind(0))


def places(leaves: list[Any]) -> tuple[list[Tensor], list[int | None]]:
    """The tensors among the leaves, each memory once, and for each leaf which of them it is."""
    found: list[Tensor] = []
    at: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            at.append(None)
            continue
        same = next((i for i, each in enumerate(found) if _one(each, leaf)), None)
        at.append(len(found) if same is None else same)
        if same is None:
            found.append(leaf)
    return found, at


def _one(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    if a is b:
        return True
    if a.dtype != b.dtype or a.dim() != b.dim() or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
