"""The choice of a backend and its reason, and plans for calls of every form."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import (
    BACKENDS,
    as_the_loop,
    by_plan,
    close,
    eagerly,
    grid,
    needs_compiler,
    outcome,
    planned,
    run_by,
)
from torchweft.core.errors import UsageError
from torchweft.recurrent import Recurrent, planned_call
from torchweft.recurrent.cpp.cpp_backend import CppBackend
from torchweft.recurrent.cpp.ir import Unsupported
from torchweft.recurrent.plan_cache import NoPlanWarning, PlanCache, PlannedCall
from torchweft.recurrent.recurrent import check_arguments
from torchweft.recurrent.verify import PlanError

ONE, ZERO = torch.randn(4, 2, 3), torch.zeros(2, 3)


# -- plans --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_auto_replaces_c_with_a_reason() -> None:
    net = Recurrent(lambda x, h: (h, torch.fft.fft(h).real + x), verify="never")
    net(ONE, ZERO)
    ((_, name, why),) = net.why()
    assert name in ("python", "eager") and "_fft_" in why and "32 steps took" in why


@pytest.mark.parametrize("first", [1, 2, 7, 40])
def test_choice_of_auto_ignores_the_first_length(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager loop is faster for one step, a plan for many. A longer sequence repeats a race that the plan lost."""

    def seconds(run: Callable[[], Any], parameters: Any, device: Any) -> float:
        steps = float(len(run()[0]))
        return 4.0 + steps / 8 if isinstance(run, partial) else steps

    monkeypatch.setattr("torchweft.recurrent.planned_call.time_with_backward", seconds)
    net = Recurrent(lambda x, h: (x + h, torch.fft.fft(h).real.tanh()), verify="never")
    names: list[str] = []
    for steps in (first, 200, 1):
        net(torch.randn(steps, 2, 3), ZERO)
        ((_, name, why),) = net.why()
        names.append(name)
    assert names == ["python" if first > 4 else "eager", "python", "python"]
    assert "8000.00 ms by the python plan and 32000.00 ms by the eager" in why or first == 7


class Table(nn.Module):
    """Counts its steps, and reads a table of 8 rows by that number. C has no sorted states."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        h, t = state
        h = (x + h + self.table(t)).tanh().sort(-1).values
        return h, (h, t + 1)


def test_race_stays_within_the_steps_of_the_sequence() -> None:
    net = Recurrent(Table(), verify="never")
    assert net(ONE, (ZERO, torch.zeros(2, dtype=torch.int64))).outputs.shape == (4, 2, 3)
    ((_, _, why),) = net.why()
    assert "32 steps took" in why and "as 8 sequences of 4" in why


def test_plan_that_fails_in_a_race_is_lost_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("too long")

    monkeypatch.setattr(PlannedCall, "race", fails)
    net = Recurrent(lambda x, h: (h, torch.fft.fft(h).real + x), verify="never")
    with pytest.warns(NoPlanWarning, match="in a race it raised MemoryError: too long"):
        seen = net(ONE, ZERO)
    assert torch.equal(seen.last, eagerly(net.cell)(ONE, ZERO).last) and run_by(net) == {"eager"}


@by_plan
def test_one_plan_serves_all_lengths_of_one_kind(backend: str) -> None:
    """`why` and `explain` describe the plan."""
    net = planned(nn.GRUCell(3, 4), backend, verify="never")
    assert net.explain() == "" and net.why() == []
    for shape in [(3, 2, 3), (9, 2, 3), (1, 2, 3)]:
        net(torch.randn(shape))
    ((kind, name, why),) = net.why()
    assert name == backend and why and "(2, 3)" in kind
    assert net.explain().startswith(kind)
    net(torch.randn(3, 5, 3))
    net(torch.randn(3, 5, 3).requires_grad_())
    net(torch.randn(3, 5, 3), lengths=[3, 2, 1, 3, 3])
    assert len(net.why()) == 4
    assert run_by(net) == {backend}


def test_least_recently_used_plan_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.recurrent.plan_cache.MAX_PLANS", 2)
    net = planned(nn.RNNCell(3, 4), "python", verify="never")
    for rows in (1, 2, 1, 3):
        net(torch.randn(2, rows, 3))
    assert [kind.split("(")[1][0] for kind, _, _ in net.why()] == ["1", "3"]


@by_plan
def test_plans_see_new_weights_and_copies_get_their_own(backend: str) -> None:
    net = planned(nn.GRUCell(3, 4).double(), backend, verify="never")
    x = ONE.double()
    net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        close(other(x).outputs, eagerly(other.cell)(x).outputs)
        close(net(x).outputs, eagerly(net.cell)(x).outputs)
    assert len(net.why()) == 1, "values of tensors are not part of the key"


def test_only_cells_that_are_always_new_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchweft.recurrent.plan_cache.MAX_UNUSED_PLANS", 2)
    net = planned(nn.RNNCell(3, 4), "python", verify="never")
    for rows in range(1, 6):
        net(torch.randn(2, rows, 3))
    assert run_by(net) == {"python"}
    plans = PlanCache("python", "full", "never")
    nets = [Recurrent(lambda x, h, k=k: (x + h * k, h)) for k in range(4)]
    for net in nets[:2]:
        net.run_plainly(ONE, ZERO, plans=plans)
    with pytest.warns(NoPlanWarning, match="is always new") as warned:
        for net in nets[2:]:
            net.run_plainly(ONE, ZERO, plans=plans)
    assert len(warned) == 1


@pytest.mark.parametrize("asked", ["auto", "triton"])
def test_plans_on_cuda_are_tried_in_order(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels first. Recorded steps serve the cells that they cannot take."""
    tried: list[str] = []

    def make(call: PlannedCall, name: str) -> Any:
        tried.append(name)
        raise Unsupported("nothing here is on a GPU")

    monkeypatch.setattr(PlannedCall, "make", make)
    begin = PlannedCall.__init__

    def on_cuda(call: PlannedCall, job: Any) -> None:
        begin(call, job)
        call.inputs = replace(call.inputs, device=torch.device("cuda"))

    monkeypatch.setattr(PlannedCall, "__init__", on_cuda)
    with pytest.warns(NoPlanWarning, match="runs by the eager loop: not triton or python"):
        Recurrent(nn.GRUCell(3, 4), backend=asked)(torch.randn(2, 1, 3))
    assert tried == ["triton", "python"]


@needs_compiler
def test_incorrect_plan_warns_even_if_another_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    check = PlannedCall.verify

    def suspicious(call: PlannedCall, engine: Any, memory: Any) -> None:
        check(call, engine, memory)
        if isinstance(engine, CppBackend):
            raise PlanError("state 0 differs")

    monkeypatch.setattr(PlannedCall, "verify", suspicious)
    net = Recurrent(nn.GRUCell(3, 64))
    with pytest.warns(NoPlanWarning, match=r"runs by the (python plan|eager loop): not c: state 0 differs") as warned:
        net(torch.randn(200, 2, 3))
    assert len(warned) == 1
    net(torch.randn(200, 2, 3))


# -- calls of every form ------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Tensor], tuple[Tensor, Any]]] = {
    "strided inputs": lambda x: (x.transpose(0, 1).contiguous().transpose(0, 1), None),
    "every second step": lambda x: (x[::2], None),
    "one step": lambda x: (x[:1], None),
    "one input for all rows": lambda x: (x[:, :1].expand(-1, 2, -1), None),
    "an expanded state": lambda x: (x, torch.randn(1, 4).double().expand(2, 4)),
    "one state for all rows": lambda x: (x, torch.randn(1, 4).double()),
    "a state that is a view": lambda x: (x, torch.randn(4, 2).double().t()),
}


@grid(form=FORMS, backend=BACKENDS)
def test_any_memory_layout_of_inputs_and_states(form: Any, backend: str) -> None:
    x, state = form(ONE.double())
    as_the_loop(
        nn.GRUCell(3, 4).double(), backend, x, None if state is None else state.requires_grad_(), verify="never"
    )


@grid(rows=[1, 2], backend=BACKENDS)
def test_batch_first_chunks_and_steps_equal_the_whole(rows: int, backend: str) -> None:
    cell = nn.LSTMCell(3, 4).double()
    net = planned(cell, backend, batch_first=True, verify="never")
    x = torch.randn(rows, 6, 3).double()
    whole = net(x)
    close(tuple(whole), tuple(eagerly(cell, batch_first=True)(x)), 1e-11)
    first = net(x[:, :2])
    second = net(x[:, 2:], first.last)
    close(torch.cat([first.outputs, second.outputs], 1), whole.outputs)
    y, _ = net.step(x[:, 2], first.last)
    close(y, whole.outputs[:, 2])
    assert run_by(net) == {backend}


@by_plan
def test_frozen_tensors_get_no_gradient(backend: str) -> None:
    cell = nn.GRUCell(3, 4).double()
    cell.bias_hh.requires_grad_(False)
    net = planned(cell, backend, verify="never")
    net(ONE.double()).outputs.sum().backward()
    assert cell.bias_hh.grad is None
    with torch.no_grad():
        assert not net(ONE.double()).outputs.requires_grad
    cell.requires_grad_(False)
    assert not net(ONE.double()).outputs.requires_grad
    x = ONE.double().requires_grad_()
    expected = torch.autograd.grad(eagerly(cell)(x).outputs.sum(), x)
    close(torch.autograd.grad(net(x).outputs.sum(), x), expected, 1e-11)
    assert run_by(net) == {backend}


@by_plan
def test_network_trains_after_inference_mode(backend: str) -> None:
    cell = nn.GRUCell(3, 4).double()
    net, x = planned(cell, backend), ONE.double()
    with torch.inference_mode():
        close(net(x).outputs, eagerly(cell)(x).outputs)
        close(net(x * 1).outputs, eagerly(cell)(x).outputs)
    x.requires_grad_()
    close(outcome(net, x), outcome(eagerly(cell), x), 1e-11)
    assert run_by(net) == {backend}


class Counting(nn.Module):
    """A cell with states of three dtypes, one of them invariant."""

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> Any:
        h, count, seen, fixed = state
        h = torch.tanh(h + x * fixed) * (1 + count[:, None])
        seen = seen | (h.sum(1) > 0)
        return {"h": h, "seen": seen, "count": count}, (h, count + seen, seen, fixed)


@by_plan
def test_integer_bool_and_invariant_states(backend: str) -> None:
    fixed = torch.randn(2, 3).double().requires_grad_()
    state = (ZERO.double(), torch.tensor([1, -2]), torch.tensor([False, True]), fixed)
    as_the_loop(Counting(), backend, ONE.double().requires_grad_(), state, 1e-12)


def test_invalid_settings_are_listed_together() -> None:
    with pytest.raises(UsageError) as caught:
        check_arguments(nn.GRUCell(2, 2), None, None, False, None, "none", "cuda", "later")
    text = str(caught.value)
    assert "backend is 'cuda'" in text and "verify is 'later'" in text and "memory is 'none'" in text


@by_plan
def test_lazily_negated_gradient_keeps_its_sign(backend: str) -> None:
    cell = nn.GRUCell(3, 4).double()
    x, results = ONE.double(), []
    marked = torch._neg_view(torch.randn(4, 2, 4).double())
    assert marked.is_neg()
    for net in (planned(cell, backend), eagerly(cell)):
        result = net(x)
        gradients = [marked, marked[-1], marked]
        results.append(
            torch.autograd.grad([result.outputs, result.last, result.states], [*cell.parameters()], gradients)
        )
    close(results[0], results[1], 1e-12)


@pytest.mark.parametrize("verify", ["first", "never"])
def test_complex_state_has_a_gradient(verify: Any) -> None:
    h = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)
    x, results = torch.randn(4, 2, 3, dtype=torch.complex128), []
    for net in (planned(rotate, "python", verify=verify), eagerly(rotate)):
        result = net(x, h)
        results.append(torch.autograd.grad(result.outputs.abs().sum(), [h])[0])
    close(results[0], results[1], 1e-12)


def rotate(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = h * x + 1j
    return h, h


def test_timed_run_waits_for_devices_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[set[torch.device]] = []
    meta, cpu = torch.device("meta"), torch.device("cpu")

    def time_after(devices: Any) -> float:
        waits.append(set(devices))
        return float(len(waits))

    monkeypatch.setattr(planned_call, "time_after", time_after)

    def run() -> Any:
        return ONE, ZERO, None

    assert planned_call.time_with_backward(run, [torch.ones(1, device=meta)], cpu) == 1.0
    assert waits == [{meta, cpu}] * 2
