"""C++ text of one function, bulk products and loops over time, and its explanation for people.

    void forward(long thread, long threads, long steps, void **values, int *gate)
        pack the weights                                    each thread some panels
        bulk products                                       each thread some rows          then all meet
        for (t ...) groups of elementwise operators         each thread some steps         then all meet
        for (t ...) the carried step                        each thread some rows of the batch, without meeting;
                                                            or, where rows mix, one thread, products by all

The order of every sum is fixed by the kernels, not by threads, tiles or chunks of time.

In an explanation, names are those of the C text: x inputs, h states, y outputs, v kept, c constants, d gradients,
p parameters; a dash marks the row of the next step, and brackets a part or another view of a value, with the number
that it begins from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.recurrent.cpp.gemm import ALIGN, MatrixProducts, PackedWeights, TimeReductions, aligned
from weft.recurrent.cpp.ir import (
    C_TYPES,
    AxisOp,
    Cat,
    Elementwise,
    Operand,
    Operation,
    Product,
    Reduce,
    TimeReduction,
    Value,
    View,
)
from weft.recurrent.cpp.loop_nests import axis_nest, copy_nest, group_nest, reduce_nest
from weft.recurrent.cpp.scheduling import Argument, LoopFunction, LoopSchedule, schedule

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

    def _head(self) -> list[str]:
        """The signature and every pointer.

        workspace   packed weights | of each thread: room, its own locals | stacks
        """
        arguments = self.function.arguments
        room, own, start = self._sums.room, self._local_bytes, self._packed.bytes
        return [
            f'extern "C" void {self.function.name}(long thread, long threads, long steps, void **values, int *gate) {{',
            *(_pointer(C_TYPES[each.dtype], each.name, f"values[{i}]") for i, each in enumerate(arguments)),
            f"char *const work = w_align((char *)values[{len(arguments)}]);",
            f"char *const room = work + {start}L + thread * {room + own}L, *const own = room + {room}L;",
            f"char *const first = work + {start + room}L;",
            f"char *stack = work + {start}L + threads * {room + own}L;",
            *self._locals(),
            *(line for each in self.function.stacks for line in self._stack(each)),
            "(void)own; (void)first; (void)stack;",
        ]

    def _locals(self) -> list[str]:
        """Each thread has its own; but where the first computes for all, they are the first thread's."""
        mains = [group for phase in self.schedule.steps if phase.main for group in phase.groups]
        shared = {each for group in mains for each in group} if self._axes is None else set[Value]()
        lines: list[str] = []
        at = 0
        for value in self.function.locals:
            base = f"({'first' if value in shared else 'own'} + {at}L)"
            lines.append(_pointer(C_TYPES[value.dtype], f"l_{value}", base))
            at += aligned(value.bytes)
        return lines

    def _stack(self, value: Value) -> list[str]:
        size = f"(steps * {value.bytes}L + {ALIGN - 1}) / {ALIGN} * {ALIGN}"
        return [_pointer(C_TYPES[value.dtype], f"s_{value}", "stack"), f"stack += {size};"]

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
        base = f"{self.function.layouts[value].base} + (t & 1) * {value.size}L"
        return f"memset({base} + {low}, 0, ({high} - {low}) * {value.dtype.itemsize}L);"

    def _mine(self, value: Value) -> tuple[str, str]:
        """Which numbers of a carried value this thread has."""
        row = value.size if self._axes is None else value.size // value.shape[0]
        return ("0", f"{row}L") if self._axes is None else (f"r0 * {row}L", f"r1 * {row}L")

    def _loop(self, groups: Sequence[Sequence[Value]], main: bool = False) -> list[str]:
        """The body of one step."""
        axes = self._axes if main else None
        layout, layouts = self.function.layout, self.function.layouts
        lines: list[str] = []
        for group in groups:
            value = group[0]
            axis = None if axes is None else axes.get(value)
            match value.made:
                case Elementwise():
                    lines += group_nest(group, layout, self.function.stored, axis)
                case Reduce(source=source):
                    # What every thread computes for itself, it may not build up in memory that they share.
                    alone = axes is not None and axis is None
                    lines += reduce_nest(value, layout(source), layouts[value], axis, in_register=alone)
                case AxisOp(operands=operands):
                    lines += axis_nest(value, [layout(each) for each in operands], layouts[value], axis)
                case Cat() as made:
                    lines += self._cat(value, made, axis)
                case Product(fixed=fixed) if main and axes is None and fixed is not None:
                    # The text stands inside "if (thread == 0) {", and products by weights are by all threads.
                    product = self._products.step(value, None, by_panels=True)
                    lines += ["}", _MEET, *product, _MEET, "if (thread == 0) {"]
                case Product():
                    lines += self._products.step(value, axis)
                case _:
                    raise AssertionError(f"{value} cannot be made in a loop")
        return lines

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


_WIDTH = 28
"""The column where formulas begin."""
_KINDS: dict[Any, str] = {Elementwise: "pass", Reduce: "reduction", AxisOp: "axis", Cat: "join", Product: "product"}


def explain_function(function: LoopFunction, schedule: LoopSchedule) -> str:
    """All phases, one behind the other."""
    passes = sum(len(each.groups) for each in schedule.steps)
    workspace = sum(each.bytes for each in function.stacks)
    lines = [f"{function.name}: {passes} passes over memory and {workspace} bytes of workspace a step"]
    for step in schedule.steps:
        if step.bulk:
            lines.append("  bulk, all steps at once")
            lines += [line for value in step.bulk for line in _explained(function, [value])]
        if step.main:
            back = ", last one first" if function.backward else ""
            rows = f"each thread takes some of {schedule.rows} rows"
            lines.append(f"  main loop, step by step{back}; {rows if schedule.axes else 'threads share products only'}")
        elif step.groups:
            lines.append("  loop, steps in any order, shared by threads")
        lines += [line for group in step.groups for line in _explained(function, group)]
    return "\n".join(lines)


def _explained(function: LoopFunction, group: Sequence[Value]) -> list[str]:
    """A line for each value that is made in one go."""
    made = group[0].made
    if isinstance(made, TimeReduction):
        into = _operand(function, dict(function.totals)[group[0]])
        of = made.of
        text = _operand(function, of) if isinstance(of, View) else _formula(function, of)
        kind, formulas = "total", [f"{into} += {text}, over all steps"]
    else:
        kind = _KINDS[type(made)]
        formulas = [f"{_name(function, each)} = {_formula(function, each.made)}" for each in group]
    head = f"    {kind:<10} {' x '.join(map(str, group[0].shape)) or 'one number'}"
    heads = [head, *[""] * (len(formulas) - 1)]
    return [f"{each:<{_WIDTH}} {formula}" for each, formula in zip(heads, formulas, strict=True)]


def _formula(function: LoopFunction, made: Operation | None) -> str:
    def name(operand: Operand) -> str:
        return _operand(function, operand)

    match made:
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
