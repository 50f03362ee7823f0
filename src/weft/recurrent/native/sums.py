"""The C text of sums over all steps: parameters' gradients, added to what the caller gives.

w_gather    a product whose inner axis runs over the rows of all steps        a weight's gradient
w_columns   the sum of the rows of all steps                                  a bias's gradient
otherwise   step by step, by the first thread
"""

from weft.recurrent.native.c_types import TYPES
from weft.recurrent.native.function import Function
from weft.recurrent.native.packs import Packs, aligned, call
from weft.recurrent.native.place import Place
from weft.recurrent.native.reductions import total_nest
from weft.recurrent.native.values import Product, Reduce, Ref, Total, Value

BLOCK, TALL = 256, 12
"""As in kernels.cpp: so many rows are packed at a time, and so many are in a tile."""


class Sums:
    """Writes the sums of one function."""

    def __init__(self, function: Function, packs: Packs) -> None:
        self._function, self._packs = function, packs
        self._into = dict(function.totals)
        self.room = max([0, *(self._room(each) for each in self._into)])
        """Bytes that `w_gather` wants for each thread."""

    def write(self, value: Value) -> list[str]:
        """Add one sum to where it belongs."""
        made, to = _made(value), self._function.place(self._into[value])
        if isinstance(made, Product):
            return [self._gather(made, to)]
        source = made if isinstance(made, Ref) else made.source
        axes = () if isinstance(made, Ref) else made.axes
        columns = self._columns(source, axes, to)
        if columns is not None:
            return [columns]
        keep = isinstance(made, Reduce) and made.keep
        loops = total_nest(source.shape, axes, keep, self._function.place(source), to)
        return ["if (thread == 0) for (long t = 0; t < steps; t++) {", *loops, "}"]

    def target(self, value: Value) -> Value:
        """The argument that a sum is added to."""
        return self._into[value].value

    def _room(self, value: Value) -> int:
        made = _made(value)
        if not isinstance(made, Product):
            return 0
        columns = max(made.right.shape[-1], made.left.shape[-2])  # either side may be packed
        numbers = self._packs.numbers(BLOCK, columns, value.dtype) + BLOCK * TALL
        return aligned(numbers * value.dtype.itemsize)

    def _columns(self, source: Ref, axes: tuple[int, ...], to: Place) -> str | None:
        """The sum of rows, if they lie one behind the other in all steps."""
        place, rows = self._function.place(source), source.shape[0] if axes else 1
        flat = axes in ((), (0,)) and len(source.shape) == 1 + len(axes)
        if not flat or not source.value.dtype.is_floating_point or not place.lasting:
            return None
        row = place.strides[0] if rows > 1 else place.size
        near = place.strides[-1] == 1 and to.strides[-1] == 1
        if not near or place.size != rows * row:
            return None
        return call("w_columns", f"{rows} * steps", source.shape[-1], place.first, row, to.first, "thread", "threads")

    def _gather(self, made: Product, to: Place) -> str:
        """A weight's gradient; step by step where a side has no row for each step."""
        left, right = self._function.place(made.left), self._function.place(made.right)
        (rows, inner), columns = made.left.shape, made.right.shape[1]
        down, across = (_inner_step(p, p.strides[i], inner) for p, i in ((left, 1), (right, 0)))
        merged = down is not None and across is not None
        if down is None or across is None:
            down, across = left.strides[1], right.strides[0]
        sides = [
            (rows, left.first if merged else left.pointer, left.strides[0], down, to.strides[0]),
            (columns, right.first if merged else right.pointer, right.strides[1], across, to.strides[1]),
        ]
        if to.strides[1] != 1 and to.strides[0] == 1:  # as its transpose, so that columns are neighbours
            sides.reverse()
        (M, a, a_row, a_col, c_row), (N, b, b_col, b_row, c_col) = sides
        live = None if made.live is None else self._function.place(made.live)
        mask = "(const boolean *)0" if live is None else live.first if merged else live.pointer
        line = call(
            "w_gather",
            *(M, N, f"{inner} * steps" if merged else inner),
            *(a, a_row, a_col, b, b_row, b_col),
            *(to.first, c_row, c_col, f"({TYPES[made.left.value.dtype]} *)room", "thread", "threads", mask),
        )
        return line if merged else f"for (long t = 0; t < steps; t++) {line}"


def _inner_step(place: Place, stride: int, inner: int) -> int | None:
    """The stride of the inner axis, if that of the next step goes on with it."""
    if not place.lasting:
        return None
    if inner == 1:
        return place.size
    return stride if place.size == inner * stride else None


def _made(value: Value) -> Product | Reduce | Ref:
    assert isinstance(value.made, Total)
    return value.made.of
