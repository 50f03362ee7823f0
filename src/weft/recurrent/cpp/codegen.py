"""C++ text of one function, bulk products and loops over time, and its explanation for people.

    void forward(long thread, long threads, long steps, void **values, int *gate)
        pack the weights                                    each thread some panels
        bulk products                                       each thread some rows          then all meet
        for (t ...) groups of elementwise operators         each thread some steps         then all meet
        for (t ...) the carried step                        each thread some rows of the batch, without meeting;
                                                            or, where rows mix, one thread, products by all

The order of every sum is fixed by the kernels, not by threads, tiles or chunks of time.

Explanation of a function:

    backward
      main loop, step by step, last one first; each thread takes rows of the batch
        pass over 16 x 128          z0 = dh0 + dy0                    one line for each value that is made
                                    v3' = z0 * z1                     in one pass; what has no name below stays
        product    16 x 128         dh0' = z5 @ c3                    in a register
      bulk, all steps at once
        product    16 x 128         dx0 = z5 @ c1
        total      512 x 128        dp0 += z5 @ x0, over all steps

Names are those of the C text: x inputs, h states, y outputs, v kept, c constants, d gradients, p parameters; a dash
marks the row of the next step, and brackets a part or another view of a value, with the number that it begins from.
"""

from collections.abc import Mapping, Sequence

import torch

from weft.recurrent.cpp.gemm import ALIGN, MatrixProducts, PackedWeights, TimeReductions, aligned
from weft.recurrent.cpp.ir import (
    C_TYPES,
    AxisOp,
    Cat,
    Elementwise,
    Operand,
    Product,
    Reduce,
    TimeReduction,
    Value,
    View,
)
from weft.recurrent.cpp.loop_nests import axis_nest, copy_nest, group_nest, reduce_nest
from weft.recurrent.cpp.scheduling import Argument, LoopFunction, LoopSchedule, PhaseSchedule, schedule

_MEET = "kernels.meet(gate, threads);"


class Emitter:
    """Emit one scheduled function. `width` says how many columns a packed panel has, by dtype."""

    def __init__(self, function: LoopFunction, width: Mapping[torch.dtype, int]) -> None:
        self.function = function
        self.schedule = schedule(function)
        self._axes = self.schedule.axes
        self._packed = PackedWeights(width)
        self._products = MatrixProducts(function, self._packed)
        self._sums = TimeReductions(function, self._packed)
        self._local_bytes = sum(aligned(each.bytes) for each in function.locals)
        body = [line for phase in self.schedule.steps for line in self._phase(phase.bulk, phase.groups, phase.main)]
        if body and body[-1] == _MEET:
            del body[-1]  # the call ends when all threads have ended
        self.text = "\n".join([*self._head(), *self._packed.lines(), *body, "}"])
        """The whole function."""

    def workspace(self, steps: int, threads: int) -> int:
        """Bytes that the function works in, for so many steps and threads."""
        stacks = sum(aligned(each.bytes * steps) for each in self.function.stacks)
        return self._packed.bytes + threads * (self._sums.room + self._local_bytes) + stacks + ALIGN

    # -- pointers ---------------------------------------------------------------------------------------------------

    def _head(self) -> list[str]:
        """The signature and every pointer.

        workspace   packed weights | of each thread: room, its own locals | stacks
        """
        arguments = self.function.arguments
        room, own = self._sums.room, self._local_bytes
        start = self._packed.bytes
        return [
            f'extern "C" void {self.function.name}(long thread, long threads, long steps, void **values, int *gate) {{',
            *(_pointer(C_TYPES[each.dtype], each.name, f"values[{i}]") for i, each in enumerate(arguments)),
            f"char *const work = w_align((char *)values[{len(arguments)}]);",
            f"char *const room = work + {start}L + thread * {room + own}L, *const own = room + {room}L;",
            f"char *const first = work + {start + room}L;",
            f"char *stack = work + {start}L + threads * {room + own}L;",
            *self._locals(),
            *(line for each in self.function.stacks for line in _stack(each)),
            "(void)own; (void)first; (void)stack;",
        ]

    def _locals(self) -> list[str]:
        """Each thread has its own; but where the first computes for all, they are the first thread's."""
        shared: set[Value] = set()
        if self._axes is None:
            shared = {each for phase in self.schedule.steps if phase.main for group in phase.groups for each in group}
        lines: list[str] = []
        at = 0
        for value in self.function.locals:
            lines.append(
                _pointer(C_TYPES[value.dtype], f"l_{value}", f"({'first' if value in shared else 'own'} + {at}L)")
            )
            at += aligned(value.bytes)
        return lines

    # -- phases -----------------------------------------------------------------------------------------------------

    def _phase(self, bulk: Sequence[Value], groups: Sequence[Sequence[Value]], main: bool) -> list[str]:
        lines = self._bulk(bulk)
        if main:
            return [*lines, *self._main(groups), _MEET]
        if not groups:
            return lines
        share = "for (long t = steps * thread / threads; t < steps * (thread + 1) / threads; t++) {"
        return [*lines, share, *self._loop(groups), "}", _MEET]

    def _bulk(self, bulk: Sequence[Value]) -> list[str]:
        """Work for all steps at once. Between two sums into one argument all meet: threads may share them otherwise."""
        lines: list[str] = []
        target: Value | None = None
        for value in bulk:
            if not isinstance(value.made, TimeReduction):
                lines += self._products.bulk(value)
                continue
            before, target = target, self._sums.target(value)
            lines += [_MEET] if before is target else []
            lines += self._sums.write(value)
        return [*lines, _MEET] if lines else []

    def _main(self, groups: Sequence[Sequence[Value]]) -> list[str]:
        """The loop whose steps depend on each other."""
        function, rows = self.function, self.schedule.rows
        down = "for (long t = steps - 1; t >= 0; t--) {" if function.backward else "for (long t = 0; t < steps; t++) {"
        share = f"const long r0 = {rows} * thread / threads, r1 = {rows} * (thread + 1) / threads;"
        split = self._axes is not None
        return [
            *(["{", share, down] if split else ["{", down, "if (thread == 0) {"]),
            *(self._add(value, argument) for value, argument in function.added),
            *self._loop(groups, main=True),
            *(self._clear(start) for start, end in function.carried if end is None),
            *(["}", "}"] if split else ["}", "}", "}"]),
        ]

    def _add(self, value: Value, argument: Argument) -> str:
        """A gradient that comes in for the state after this step, added to the carried one."""
        low, high = self._mine(value)
        into = f"{self.function.layouts[value].here}[i] += {argument.name}[t * {argument.size}L + i];"
        return f"if ({argument.name}) for (long i = {low}; i < {high}; i++) {into}"

    def _clear(self, value: Value) -> str:
        """The carried gradient of a state that the step does not read: zeros."""
        low, high = self._mine(value)
        layout = self.function.layouts[value]
        base = f"{layout.base} + (t & 1) * {layout.size}L"
        return f"memset({base} + {low}, 0, ({high} - {low}) * {value.dtype.itemsize}L);"

    def _mine(self, value: Value) -> tuple[str, str]:
        """Which numbers of a carried value this thread has."""
        if self._axes is None:
            return "0", f"{value.size}L"
        row = value.size // value.shape[0]
        return f"r0 * {row}L", f"r1 * {row}L"

    # -- one step ---------------------------------------------------------------------------------------------------

    def _loop(self, groups: Sequence[Sequence[Value]], main: bool = False) -> list[str]:
        """The body of one step."""
        split = main and self._axes is not None
        lines: list[str] = []
        for group in groups:
            value = group[0]
            axis = self._axes.get(value) if split and self._axes is not None else None
            match value.made:
                case Elementwise():
                    lines += group_nest(group, self.function.layout, self.function.stored, axis)
                case Reduce():
                    source, own = self.function.layout(value.made.source), self.function.layouts[value]
                    # What every thread computes for itself, it may not build up in memory that they share.
                    lines += reduce_nest(value, source, own, axis, in_register=split and axis is None)
                case AxisOp():
                    layouts = [self.function.layout(each) for each in value.made.operands]
                    lines += axis_nest(value, layouts, self.function.layouts[value], axis)
                case Cat():
                    lines += self._cat(value, value.made, axis)
                case Product():
                    lines += self._product(value, value.made, axis, shared=main and not split)
                case _:
                    raise AssertionError(f"{value} cannot be made in a loop")
        return lines

    def _product(self, value: Value, made: Product, axis: int | None, shared: bool) -> list[str]:
        """In a shared loop, the text stands inside "if (thread == 0) {", and products by weights are by all threads."""
        if not shared or made.fixed is None:
            return self._products.step(value, axis)
        return ["}", _MEET, *self._products.step(value, None, by_panels=True), _MEET, "if (thread == 0) {"]

    def _cat(self, value: Value, made: Cat, axis: int | None) -> list[str]:
        """The pieces that were not made in place are copied."""
        lines: list[str] = []
        layout, before = self.function.layouts[value], 0
        for piece in made.pieces:
            if piece.value not in self.function.slots:
                to = layout.with_strides(layout.strides, layout.offset + before * layout.strides[made.axis])
                lines += copy_nest(piece.shape, self.function.layout(piece), to, axis)
            before += piece.shape[made.axis]
        return lines


def _pointer(kind: str, name: str, at: str) -> str:
    return f"{kind} *const {name} = ({kind} *){at};"


def _stack(value: Value) -> list[str]:
    size = f"(steps * {value.bytes}L + {ALIGN - 1}) / {ALIGN} * {ALIGN}"
    return [_pointer(C_TYPES[value.dtype], f"s_{value}", "stack"), f"stack += {size};"]


_WIDTH = 28
"""The column where formulas begin."""


def explain_function(function: LoopFunction, schedule: LoopSchedule) -> str:
    """All phases, one behind the other."""
    passes = sum(len(each.groups) for each in schedule.steps)
    workspace = sum(each.bytes for each in function.stacks)
    lines = [f"{function.name}: {passes} passes over memory and {workspace} bytes of workspace a step"]
    for step in schedule.steps:
        if step.bulk:
            lines.append("  bulk, all steps at once")
            lines += [line for value in step.bulk for line in _bulk(function, value)]
        if step.groups or step.main:
            lines.append(f"  {_loop(function, schedule, step)}")
            lines += [line for group in step.groups for line in _pass(function, group)]
    return "\n".join(lines)


def _loop(function: LoopFunction, schedule: LoopSchedule, step: PhaseSchedule) -> str:
    if not step.main:
        return "loop, steps in any order, shared by threads"
    back = ", last one first" if function.backward else ""
    share = (
        f"each thread takes some of {schedule.rows} rows"
        if schedule.axes is not None
        else "threads share products only"
    )
    return f"main loop, step by step{back}; {share}"


def _bulk(function: LoopFunction, value: Value) -> list[str]:
    if not isinstance(value.made, TimeReduction):
        return _row("product", value, f"{_name(function, value)} = {_formula(function, value)}")
    of, into = value.made.of, dict(function.totals)[value]
    source = Value("", value.shape, value.dtype, None if isinstance(of, View) else of)
    text = _operand(function, of) if isinstance(of, View) else _formula(function, source)
    return _row("total", value, f"{_operand(function, into)} += {text}, over all steps")


def _pass(function: LoopFunction, group: Sequence[Value]) -> list[str]:
    kinds = {Elementwise: "pass", Reduce: "reduction", AxisOp: "axis", Cat: "join", Product: "product"}
    kind = next(name for made, name in kinds.items() if isinstance(group[0].made, made))
    return _row(kind, group[0], *(f"{_name(function, each)} = {_formula(function, each)}" for each in group))


def _row(kind: str, value: Value, *formulas: str) -> list[str]:
    head = f"    {kind:<10} {' x '.join(map(str, value.shape)) or 'one number'}"
    heads = [head, *[""] * (len(formulas) - 1)]
    return [f"{each:<{_WIDTH}} {formula}" for each, formula in zip(heads, formulas, strict=True)]


def _formula(function: LoopFunction, value: Value) -> str:
    def name(operand: Operand) -> str:
        return _operand(function, operand)

    match value.made:
        case Elementwise(expression=expression, operands=operands):
            text = expression.format(*map(name, operands)).replace("w_", "")
            return text[1:-1] if text.startswith("(") else text
        case Reduce(kind=kind, source=source, axes=axes):
            return f"{kind} of {name(source)} along {', '.join(map(str, axes))}"
        case AxisOp(kind=kind, operands=operands, axis=axis):
            return f"{kind} of {', '.join(map(name, operands))} along {axis}"
        case Product(left=left, right=right, start=start):
            return f"{name(left)} @ {name(right)}" + ("" if start is None else f" + {name(start)}")
        case Cat(pieces=pieces, axis=axis):
            return f"{', '.join(map(name, pieces))} along {axis}"
        case _:
            return ""


def _operand(function: LoopFunction, operand: Operand) -> str:
    if not isinstance(operand, View):
        return f"{operand:g}" if isinstance(operand, float) else str(operand)
    name, offset = _name(function, operand.value), int(operand.at.storage_offset())
    shape = " x ".join(map(str, operand.shape)) + (f" from {offset}" if offset else "")
    return name if operand.whole else f"{name}[{shape}]"


def _name(function: LoopFunction, value: Value) -> str:
    """As the argument that it is, if it is one."""
    layout = function.layouts.get(value)
    if layout is None or value in function.slots or layout.base.startswith(("s_", "l_")):
        return value.name
    return layout.base + ("'" if layout.row in ("next", "out") else "")
