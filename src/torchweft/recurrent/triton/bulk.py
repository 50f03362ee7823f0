"""The work of a function that PyTorch does for all steps at once: products that need not wait, and sums over time.

x W + b of T x N rows          one product, by cuBLAS
sum over time of dz' h         one product with an inner axis T x N
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.triton.memory import StepMemory


def unexpanded(view: ir.View) -> ir.View:
    """A view without the repetition along expanded axes, which keep size 1."""
    at = view.at
    for axis, stride in enumerate(view.at.stride()):
        at = at if stride else at.narrow(axis, 0, 1)
    return ir.View(view.value, at)


class BulkWork:
    """Bulk work on the memory of one run: tensors by the variables that stand for their addresses in kernels."""

    def __init__(self, memory: StepMemory, tensors: Mapping[str, Tensor | None], steps: int, rows: int) -> None:
        self._memory, self._tensors, self._steps, self._rows = memory, tensors, steps, rows
        self._totals = dict(memory.function.signature.totals)

    def run(self, value: ir.LoopValue) -> None:
        match value.operation:
            case ir.TimeReduction(of=of):
                self._add_total(of, self._totals[value])
            case ir.Product(left=left, right=right, start=start):
                self._write_product(value, self._stacked(left), self._stacked(right), start)
            case _:
                raise AssertionError(f"{value} is not bulk work")

    def _stacked(self, view: ir.View) -> Tensor:
        """A view in all steps, T x ..., or without T if it is the same in all."""
        layout = self._memory.layout_of(view)
        tensor = self._tensors[layout.base]
        assert tensor is not None
        return self._memory.over_steps(tensor, layout, self._steps, self._rows, self._memory.view_shape(view))

    def _write_product(self, value: ir.LoopValue, left: Tensor, right: Tensor, start: ir.View | None) -> None:
        to = self._stacked(ir.whole_view(value))
        if start is None and to.is_contiguous() and left.dim() + right.dim() > 2 * len(value.shape):
            torch.matmul(left, right, out=to)
            return
        result = torch.matmul(left, right)
        to.copy_(result if start is None else result.add_(self._stacked(unexpanded(start))))

    def _add_total(self, of: ir.Product | ir.Reduce | ir.View, into: ir.View) -> None:
        base = self._tensors[self._memory.layouts[into.value].base]
        if base is None:
            return
        at = into.at
        target = base.as_strided(at.size(), at.stride(), base.storage_offset() + int(at.storage_offset()))
        target.add_(self._total(of))

    def _total(self, of: ir.Product | ir.Reduce | ir.View) -> Tensor:
        match of:
            case ir.View():
                return self._sum_of_steps(of)
            case ir.Reduce(source=source, axes=axes, keep=keep):
                x, lead = self._stacked(source), self._varies(source)
                total = x.sum([axis + lead for axis in axes], keepdim=keep)
                return total.sum(0) if lead else total * self._steps
            case ir.Product(left=left, right=right):
                a, b = self._stacked(left), self._stacked(right)
                if self._varies(left) and self._varies(right) and len(left.shape) == 2:
                    # One product with an inner axis of T x N replaces T products and their sum.
                    return a.permute(1, 0, 2).reshape(a.shape[1], -1) @ b.reshape(-1, b.shape[2])
                product = a @ b
                return product.sum(0) if self._varies(left) or self._varies(right) else product * self._steps

    def _sum_of_steps(self, view: ir.View) -> Tensor:
        x = self._stacked(view)
        return x.sum(0) if self._varies(view) else x * self._steps

    def _varies(self, view: ir.View) -> bool:
        return self._memory.layout_of(view).row != "same"
