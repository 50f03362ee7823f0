"""Expressions of C as text of Triton: every one is translated or rejected, and means the same."""

import math
from typing import Any

import pytest
import torch

from tests.recurrent.recurrent_cases import at_once
from tests.recurrent.triton.triton_cases import needs_triton
from torchweft.recurrent.cpp.ir import Elementwise, LoopValue, Unsupported, whole_view
from torchweft.recurrent.cpp.operators import ARITHMETIC, COMPARISON
from torchweft.recurrent.triton import toolchain
from torchweft.recurrent.triton.expressions import computed, converted, literal, translate

VALUES = torch.tensor([-2.5, -1.0, -0.3, 0.0, 0.4, 1.0, 1.5, 3.0]).double()


def test_every_expression_of_c_is_known_here() -> None:
    for template in {*ARITHMETIC.values(), *COMPARISON.values()}:
        text = translate(template)
        assert "w_" not in text and "?" not in text and "&&" not in text, text


@pytest.mark.parametrize("template", ["w_unheard({0})", "({0}?{1}:{2})", "({0}<{1}&&{2})", "(!{0}+1)"])
def test_unknown_expressions_are_rejected(template: str) -> None:
    with pytest.raises(Unsupported, match="do not know the expression"):
        translate(template)


@needs_triton
@at_once(("operator", "template"), [*ARITHMETIC.items(), *COMPARISON.items()])
def test_expressions_have_the_values_of_pytorch(operator: Any, template: str) -> None:
    name, overload = str(operator).removeprefix("aten.").split(".")
    kind = torch.int64 if name.startswith("bitwise_") else torch.float64
    count = len({part[0] for part in template.split("{")[1:]})
    if name in ("_to_copy", "lift_fresh_copy"):  # copies, without an operator to compare with
        return
    operands: list[Any] = [VALUES.to(kind).roll(i) for i in range(count)]
    arguments = list(operands)
    if name == "threshold_backward":
        arguments[2] = operands[2] = 0.4
    elif name == "where":
        arguments[0] = operands[0] != 0
    elif overload == "Scalar" and count > 1:
        arguments[1] = operands[1] = 2 if kind == torch.int64 else 0.7
    expected = operator(*arguments)
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    names = [f"e{i}" if isinstance(x, torch.Tensor) else literal(x, kind) for i, x in enumerate(operands)]
    views = [whole_view(LoopValue(f"e{i}", (8,), kind)) for i in range(count)]
    text = computed(Elementwise(template, views, kind), [converted(n, kind, kind) for n in names], expected.dtype)
    loads = "\n".join(f"    e{i} = tl.load(p{i} + places)" for i in range(len(tensors)))
    pointers = ", ".join(f"p{i}" for i in range(len(tensors)))
    kernel = (
        f"@triton.jit\ndef f({pointers}, out):\n    places = tl.arange(0, 8)[None, :]\n{loads}\n"
        f"    tl.store(out + places, {text})\n"
    )
    result = torch.empty_like(expected)
    with toolchain.quiet():
        toolchain.load_kernel("f", kernel)[(1,)](*tensors, result)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_literals_keep_their_value() -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        assert literal(1, dtype)
    names = {"tl": None}
    assert math.isinf(eval(literal(math.inf, torch.float32), names)) and eval(literal(0.1, torch.float32), names) == 0.1
    assert literal(0.1, torch.float64).startswith("tl.full(")
