"""A settled function told to a person: which phases it has, and what is one pass over memory.

    backward
      main loop, step by step, last one first; each thread takes rows of the batch
        pass over 16 x 128          z0 = dh0 + dy0                    one line for each value that is made
                                    v3' = z0 * z1                     in one pass; what has no name below stays
        product    16 x 128         dh0' = z5 @ c3                    in a register
      bulk, all steps at once
        product    16 x 128         dx0 = z5 @ c1
        total      512 x 128        dp0 += z5 @ x0, over all steps

Names are those of the C text: x inputs, h states, y outputs, v kept, c constants, d gradients, p parameters; a dash
marks the row of the next step, and brackets a part or another look of a value, with the number that it begins from.
"""

from collections.abc import Sequence

from weft.recurrent.native.function import Function
from weft.recurrent.native.order import Order, Step
from weft.recurrent.native.values import AxisOp, Cat, Operand, Point, Product, Reduce, Ref, Total, Value

_WIDTH = 28
"""Where formulas begin."""


def outline(function: Function, order: Order) -> str:
    """All phases, one behind the other."""
    passes = sum(len(each.groups) for each in order.steps)
    workspace = sum(each.bytes for each in function.stacks)
    lines = [f"{function.name}: {passes} passes over memory and {workspace} bytes of workspace a step"]
    for step in order.steps:
        if step.bulk:
            lines.append("  bulk, all steps at once")
            lines += [line for value in step.bulk for line in _bulk(function, value)]
        if step.groups or step.main:
            lines.append(f"  {_loop(function, order, step)}")
            lines += [line for group in step.groups for line in _pass(function, group)]
    return "\n".join(lines)


def _loop(function: Function, order: Order, step: Step) -> str:
    if not step.main:
        return "loop, steps in any order, shared by threads"
    back = ", last one first" if function.backward else ""
    share = f"each thread takes some of {order.rows} rows" if order.axes is not None else "threads share products only"
    return f"main loop, step by step{back}; {share}"


def _bulk(function: Function, value: Value) -> list[str]:
    if not isinstance(value.made, Total):
        return _line("product", value, f"{_name(function, value)} = {_formula(function, value)}")
    of, into = value.made.of, dict(function.totals)[value]
    source = Value("", value.shape, value.dtype, None if isinstance(of, Ref) else of)
    text = _operand(function, of) if isinstance(of, Ref) else _formula(function, source)
    return _line("total", value, f"{_operand(function, into)} += {text}, over all steps")


def _pass(function: Function, group: Sequence[Value]) -> list[str]:
    kinds = {Point: "pass", Reduce: "reduction", AxisOp: "axis", Cat: "join", Product: "product"}
    kind = next(name for made, name in kinds.items() if isinstance(group[0].made, made))
    return _line(kind, group[0], *(f"{_name(function, each)} = {_formula(function, each)}" for each in group))


def _line(kind: str, value: Value, *formulas: str) -> list[str]:
    head = f"    {kind:<10} {' x '.join(map(str, value.shape)) or 'one number'}"
    heads = [head, *[""] * (len(formulas) - 1)]
    return [f"{each:<{_WIDTH}} {formula}" for each, formula in zip(heads, formulas, strict=True)]


def _formula(function: Function, value: Value) -> str:
    def name(operand: Operand) -> str:
        return _operand(function, operand)

    match value.made:
        case Point(expression=expression, operands=operands):
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


def _operand(function: Function, operand: Operand) -> str:
    if not isinstance(operand, Ref):
        return f"{operand:g}" if isinstance(operand, float) else str(operand)
    name, offset = _name(function, operand.value), int(operand.at.storage_offset())
    look = " x ".join(map(str, operand.shape)) + (f" from {offset}" if offset else "")
    return name if operand.whole else f"{name}[{look}]"


def _name(function: Function, value: Value) -> str:
    """As the argument that it is, if it is one."""
    home = function.homes.get(value)
    if home is None or value in function.slots or home.base.startswith(("s_", "l_")):
        return value.name
    return home.base + ("'" if home.row in ("next", "out") else "")
