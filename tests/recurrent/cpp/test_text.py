"""The text of the generated loops: what runs step by step, and that nothing else does."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.recurrent.cells_for_tests import CASES, Case, Told, engine_of
from tests.recurrent.recurrent_cases import needs_compiler
from weft.recurrent.cpp.backend import NativeEngine

pytestmark = needs_compiler
DOWN, UP = "for (long t = steps - 1; t >= 0; t--) {", "for (long t = 0; t < steps; t++) {"


def function(engine: NativeEngine, name: str) -> str:
    """The text of one of the three functions."""
    return engine.program.text.split(f'extern "C" void {name}(')[1].split('extern "C" void ')[0]


def block(text: str, head: str) -> str:
    """What stands between the braces behind `head`, which is there once."""
    assert text.count(head) == 1
    inside, depth = text.split(head)[1], 1
    for at, letter in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return inside[:at]
    raise AssertionError("the braces do not match")


def wide(make: Callable[[], nn.Module], states: int) -> Case:
    cell = Told(make()).double()
    state = tuple(torch.randn(5, 4).double() for _ in range(states))
    return Case(cell, torch.randn(5, 3).double(), state if states > 1 else state[0], list(cell.parameters()))


CLASSIC = {
    "LSTM": lambda: wide(lambda: nn.LSTMCell(3, 4), 2),
    "GRU": lambda: wide(lambda: nn.GRUCell(3, 4), 1),
    "RNN": lambda: wide(lambda: nn.RNNCell(3, 4), 1),
}


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
def test_each_loop_of_the_classic_cells_holds_one_matrix_product_and_no_gradient_of_a_parameter(
    make: Callable[[], Case],
) -> None:
    engine = engine_of("c", make())
    for name, head in (("forward", UP), ("backward", DOWN)):
        loop = block(function(engine, name), head)
        assert len(re.findall(r"\bw_product\(", loop)) == 1
        assert not re.findall(r"\b(w_gather|w_columns|w_small|dp\d)", loop)


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
def test_a_weights_gradient_is_one_product_over_all_steps_after_the_loop(make: Callable[[], Case]) -> None:
    text = function(engine_of("c", make()), "backward")
    behind = text.split(DOWN)[1]
    assert len(re.findall(r"\bw_gather\(.*\* steps", behind)) == 2, "one for each weight"
    assert len(re.findall(r"\bw_columns\(", behind)) >= 1, "and sums of rows for the biases"


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
def test_what_is_made_again_from_known_states_carries_nothing(make: Callable[[], Case]) -> None:
    text = function(engine_of("c", make()), "again")
    assert UP not in text and DOWN not in text, "threads take steps, since steps are apart"


def test_the_text_does_not_depend_on_values() -> None:
    case = CASES["LSTM"]()
    one, other = engine_of("c", case), engine_of("c", case._replace(x=torch.randn_like(case.x)))
    assert one.program.text == other.program.text
