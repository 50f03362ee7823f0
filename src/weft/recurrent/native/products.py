"""The C text of matrix products: in one step, or of all steps at once.

    w_product   by a packed weight, by kernels.cpp; threads share its rows, or its panels
    w_some      the same for some of the rows, see live.py
    w_small     of two matrices that both change from step to step, by loops.h

A product whose left side is the fixed one is written as its transpose, (A B)' = B' A'.
"""

from dataclasses import dataclass

import torch

from weft.recurrent.native.c_types import TYPES
from weft.recurrent.native.function import Function
from weft.recurrent.native.packs import Packs, call
from weft.recurrent.native.place import Place
from weft.recurrent.native.values import Product, Ref, Value


@dataclass(frozen=True)
class _Oriented:
    """C = start + A B, turned so that the fixed side, if there is one, is B. C is rows x columns, A rows x inner."""

    a: Place
    b: Place
    c: Place
    start: Place | None
    batch: int | None
    rows: int
    columns: int
    inner: int
    row_axis: int
    """Which axis of the value the rows are."""
    fixed: Ref | None
    turned: bool
    kind: str
    """The type in C."""
    live: Place | None
    """A mask of the rows of A."""

    def starting(self, low: str, left: str = "0") -> tuple[str, int, int]:
        """The start's address and strides in a step; a null pointer if there is none."""
        if self.start is None:
            return f"({self.kind} *)0", 0, 0
        return self.start.at(self.batch, low, left), self.start.strides[-2], self.start.strides[-1]


class Products:
    """Writes the products of one function."""

    def __init__(self, function: Function, packs: Packs) -> None:
        self._function, self._packs = function, packs

    def step(self, value: Value, axis: int | None, *, by_panels: bool = False) -> list[str]:
        """One step's product. `axis` is the row axis of the batch, of which a thread has r0 to r1."""
        it = self._oriented(value)
        low, high = ("r0", "r1") if axis == it.row_axis else ("0", str(it.rows))
        if it.fixed is None:
            line = self._small(it, low, high, by_columns=axis is not None and axis == len(value.shape) - 1)
        else:
            line = self._packed(it, value.dtype, low, high, by_panels)
        if it.batch is None:
            return [line]
        first, last = ("r0", "r1") if axis == 0 else ("0", str(it.batch))
        return [f"for (long b = {first}; b < {last}; b++) {{", line, "}"]

    def bulk(self, value: Value) -> list[str]:
        """The products of all steps: one, if their rows lie one behind the other, else step by step by all threads."""
        merged = self._merged(value)
        if merged is not None:
            return merged
        share = "for (long t = steps * thread / threads; t < steps * (thread + 1) / threads; t++) {"
        return [share, *self.step(value, None), "}"]

    def _oriented(self, value: Value) -> _Oriented:
        made, place, dims = _made(value), self._function.place, len(value.shape)
        a, b, c = place(made.left), place(made.right), self._function.homes[value]
        start = None if made.start is None else place(made.start)
        inner, batch = made.left.shape[-1], value.shape[0] if dims > 2 else None
        rows, columns = value.shape[-2:]
        kind = TYPES[value.dtype]
        if made.fixed != "left":
            fixed = made.right if made.fixed else None
            live = None if made.live is None else place(made.live)
            return _Oriented(a, b, c, start, batch, rows, columns, inner, dims - 2, fixed, False, kind, live)
        start = None if start is None else start.turned()
        turned = (b.turned(), a.turned(), c.turned(), start)
        return _Oriented(*turned, batch, columns, rows, inner, dims - 1, made.left, True, kind, None)

    def _weight(self, it: _Oriented) -> tuple[str, bool]:
        """The packed weight."""
        assert it.fixed is not None
        shape = it.fixed.shape
        shape = (*shape[:-2], shape[-1], shape[-2]) if it.turned else shape
        return self._packs.pointer(it.b, shape, it.fixed.value.dtype)

    def _packed(self, it: _Oriented, dtype: torch.dtype, low: str, high: str, by_panels: bool) -> str:
        packed, several = self._weight(it)
        if several:
            packed = f"{packed} + b * {self._packs.numbers(it.inner, it.columns, dtype)}L"
        panels = self._packs.panels(it.columns, dtype)
        share = (f"{panels} * thread / threads", f"{panels} * (thread + 1) / threads") if by_panels else (0, panels)
        return call(
            "w_product" if it.live is None else "w_some",
            *(f"{high} - {low}", it.columns, it.inner),
            *(it.a.at(it.batch, low), *it.a.strides[-2:], packed),
            *(it.c.at(it.batch, low), *it.c.strides[-2:]),
            *it.starting(low),
            *share,
            *([] if it.live is None else [f"{it.live.pointer} + {low}"]),
        )

    def _small(self, it: _Oriented, low: str, high: str, by_columns: bool) -> str:
        """Of which a thread may have columns, too: where the batch's rows are columns here."""
        left, right = ("r0", "r1") if by_columns else ("0", str(it.columns))
        return call(
            "w_small",
            *(f"{high} - {low}", f"{right} - {left}", it.inner),
            *(it.a.at(it.batch, low), *it.a.strides[-2:]),
            *(it.b.at(it.batch, "0", left), *it.b.strides[-2:]),
            *(it.c.at(it.batch, low, left), *it.c.strides[-2:]),
            *it.starting(low, left),
        )

    # -- all steps at once ------------------------------------------------------------------------------------------

    def _merged(self, value: Value) -> list[str] | None:
        """One product over the rows of all steps, where the rows of one step follow those of the step before."""
        it = self._oriented(value)
        if it.fixed is None or it.batch is not None:
            return None
        a_row, c_row, start_row = _step_row(it.a, it.rows), _step_row(it.c, it.rows), _start_row(it)
        if a_row is None or c_row is None or start_row is None:
            return None
        packed, _ = self._weight(it)
        start = it.starting("0")
        if it.start is not None:
            start = (f"{it.start.first} + m0 * {start_row}L", start_row, it.start.strides[1])
        live = it.live if it.live is not None and it.live.lasting and it.live.size == it.rows else None
        line = call(
            "w_product" if live is None else "w_some",
            *("m1 - m0", it.columns, it.inner),
            *(f"{it.a.first} + m0 * {a_row}L", a_row, it.a.strides[1], packed),
            *(f"{it.c.first} + m0 * {c_row}L", c_row, it.c.strides[1]),
            *start,
            *(0, self._packs.panels(it.columns, value.dtype)),
            *([] if live is None else [f"{live.first} + m0"]),
        )
        m0, m1 = (f"{it.rows} * steps * {each} / threads" for each in ("thread", "(thread + 1)"))
        return [f"{{ const long m0 = {m0}, m1 = {m1};", line, "}"]


def _step_row(place: Place, rows: int) -> int | None:
    """The stride of a matrix' rows, if those of the next step go on with it."""
    if not place.lasting:
        return None
    if rows == 1:
        return place.size
    return place.strides[0] if place.size == rows * place.strides[0] else None


def _start_row(it: _Oriented) -> int | None:
    """The same for what sums start with, which may be one row for all steps."""
    if it.start is None:
        return 0
    if it.start.row == "same":
        return 0 if it.rows == 1 or it.start.strides[0] == 0 else None
    return _step_row(it.start, it.rows)


def _made(value: Value) -> Product:
    assert isinstance(value.made, Product)
    assert len(value.shape) <= 3, "a product has at most one batch axis"
    return value.made
