"""The check of a new plan rejects every plan whose results are not those of its cell."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import BACKENDS, by_plan, grid
from tests.recurrent.step_cases import CASES, Case, engine_of
from tests.recurrent.test_autograd import sequence
from torchweft.core.context import ProcessFlags
from torchweft.recurrent import python_backend as python_engine
from torchweft.recurrent.capture import capture
from torchweft.recurrent.python_backend import PythonBackend
from torchweft.recurrent.step_plan import partition
from torchweft.recurrent.verify import PlanError, rounded_factors, verify


@grid(make=CASES, backend=BACKENDS)
def test_correct_plan_passes_without_gradients_left(make: Callable[[], Case], backend: str) -> None:
    case = make()
    xs, states = sequence(case)
    for memory in ("full", "states", "sqrt", 10_000_000):
        verify(engine_of(backend, case), case.cell, xs, states, memory)
    assert all(tensor.grad is None for tensor in [*xs, *states, *case.parameters])


@pytest.mark.parametrize(
    ("part", "words"),
    [("loop", "output 0 differs"), ("loop_back", "gradient of initial state"), ("after_back", "gradient of parameter")],
)
def test_incorrect_plan_is_rejected_with_all_values(part: str, words: str) -> None:
    """One operator of the plan is replaced, as by an error of the analysis."""
    case = CASES["RNN"]()
    captured = capture(case.cell, case.x, case.state, case.parameters)
    swap: dict[str, tuple[Any, Any]] = {
        "loop": (torch.ops.aten.tanh.default, torch.ops.aten.sin.default),
        "loop_back": (torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor),
        "after_back": (torch.ops.aten.sum.dim_IntList, torch.ops.aten.amax.default),
    }
    right, wrong = swap[part]
    node = next(node for node in getattr(partition(captured), part) if node.target is right)
    node.target = wrong
    xs, states = sequence(case)
    with pytest.raises(PlanError, match=words):
        verify(PythonBackend(captured), case.cell, xs, states)


def test_fault_of_single_steps_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swapped(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        return x + h, (c, h)

    def one_after_another(places: Any, values: Any) -> None:  # overwrites a place before it is read
        for place, value in zip(places, values, strict=True):
            place.copy_(value)

    monkeypatch.setattr(python_engine, "copy_into", one_after_another)
    x, state = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64).unbind()
    engine = engine_of("python", Case(swapped, x, state, []))
    with pytest.raises(PlanError, match="gradient of initial state"):
        verify(engine, swapped, [torch.randn(4, 2, 3, dtype=torch.float64)], list(state))


class Shifted(PythonBackend):
    """A plan whose states are off by less than a rounding of TF32."""

    def run_forward(self, *given: Any) -> Any:
        outputs, states, kept = super().run_forward(*given)
        return outputs, [state * (1 + 5e-4) for state in states], kept


@pytest.fixture
def precision() -> Iterator[Any]:
    """PyTorch's settings of precision, which are restored after the test."""
    before = ProcessFlags.capture()
    yield torch.backends
    before.establish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correct_plan_passes_with_tf32(precision: Any, dtype: torch.dtype) -> None:
    """With TF32, kernels for one step and for all steps round differently. In full precision, that is a fault."""

    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x, x @ weight + state

    weight, x, state = (torch.randn(*shape, dtype=dtype) for shape in ((3, 4), (4, 2, 3), (2, 4)))
    plan = Shifted(engine_of("python", Case(cell, x[0], state, [])).captured)
    with torch.no_grad():
        with pytest.raises(PlanError, match="state 0 differs"):
            verify(plan, cell, [x], [state])
        precision.mkldnn.matmul.fp32_precision = "tf32"
        with nullcontext() if dtype is torch.float32 else pytest.raises(PlanError):
            verify(plan, cell, [x], [state])


def test_only_convolutions_use_tf32_by_default(precision: Any) -> None:
    """This is the default on CUDA. A step without a convolution is compared as strictly as without TF32."""

    def convolved(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x, nn.functional.conv1d(state, weight)

    weight, x = torch.randn(3, 3, 1), torch.randn(2, 3, 4)
    steps = [capture(cell, x, x, [weight]) for cell in (convolved, lambda x, state: (x, state @ x.mT @ x))]
    assert [rounded_factors(step, "cuda") for step in steps] == [2e-3, 0]
    precision.cudnn.conv.fp32_precision = "ieee"
    assert [rounded_factors(step, "cuda") for step in steps] == [0, 0]
    precision.cuda.matmul.fp32_precision = "tf32"
    assert [rounded_factors(step, "cuda") for step in steps] == [2e-3, 2e-3]
    assert [rounded_factors(step, "cpu") for step in steps] == [0, 0]


@by_plan
def test_nan_in_the_same_places_is_accepted(backend: str) -> None:
    def root(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return (x - 10).sqrt() + state, state + x

    x = torch.randn(2, 3, dtype=torch.float64)
    verify(engine_of(backend, Case(root, x, x, [])), root, [torch.randn(4, 2, 3, dtype=torch.float64)], [x])


@by_plan
def test_check_of_a_drawing_cell_restores_the_generator(backend: str) -> None:
    def dropping(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        after = state + nn.functional.dropout(x, 0.5)
        return after, after

    x, xs = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64)
    engine, before = engine_of(backend, Case(dropping, x, x, [])), torch.get_rng_state()
    verify(engine, dropping, [xs], [x])
    assert torch.equal(torch.get_rng_state(), before)
