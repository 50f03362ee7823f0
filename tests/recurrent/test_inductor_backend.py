"""Compiled steps and recorded chunks give the numbers of the plan that Python runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close
from weft.core.pytree import flatten
from weft.recurrent import Recurrent
from weft.recurrent import inductor_backend as module

T, N, D, H = 5, 2, 3, 4


class Mixed(nn.Module):
    """A GRU, an output that is no state, an integer state, a buffer; its chunks are two steps long (see `short`)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, H)
        self.register_buffer("scale", torch.tensor(0.5))
        self.double()

    def forward(self, x: Tensor, state: Any) -> Any:
        h, n, source = state
        h = self.cell(x * self.scale + source, h)
        return h.sin(), (h, n + 1, source)


def state() -> Any:
    torch.manual_seed(2)
    h, source = (torch.randn(N, width, dtype=torch.float64, requires_grad=True) for width in (H, D))
    return h, torch.zeros(N, dtype=torch.int64), source


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in a sequence."""
    torch.manual_seed(0)
    monkeypatch.setattr("weft.recurrent.python_backend.chunk_length", lambda *_: 2)


def results(net: Recurrent, steps: int = T, all_states: bool = True, **call: Any) -> list[Tensor]:
    """All that comes out, or all but the states after every step, and all gradients, twice."""
    torch.manual_seed(steps)
    x, begin = torch.randn(steps, N, D, dtype=torch.float64, requires_grad=True), state()
    result = net(x, begin, **call)
    parts = result if all_states else result[:2]
    leaves = [leaf for part in parts for leaf in flatten(part)[0]]
    wanted = [x, begin[0], begin[2], *net.parameters()]
    loss = sum(leaf.sin().sum() for leaf in leaves if leaf.is_floating_point())
    one = torch.autograd.grad(loss, wanted, retain_graph=True)
    two = torch.autograd.grad(loss, wanted)
    assert all(map(torch.equal, one, two))
    return [*(leaf.detach() for leaf in leaves), *one]


@pytest.mark.long
def test_compiled_steps_give_the_numbers_of_the_eager_loop() -> None:
    net = Recurrent(Mixed(), backend="inductor")
    loop = Recurrent(net.cell, backend="eager")
    for steps in (T, 3):
        close(results(net, steps), results(loop, steps))
    assert [used for _, used, _ in net.why()] == ["inductor"]
    assert "a compiled step" in net.explain() and "launched step by step" in net.explain()


# -- recordings, without a GPU: what is recorded is run again into the same memory ----------------------------------


class Recorder:
    """As `cuda_recorder`, by running the function again; it counts."""

    def __init__(self, fails: bool = False) -> None:
        self.recorded, self.replayed, self.fails = 0, 0, fails

    def __call__(self, function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1
        outputs = [each.clone() for each in function()]

        def replay() -> None:
            self.replayed += 1
            for place, each in zip(outputs, function(), strict=True):
                place.copy_(each)

        for each in outputs:
            each.fill_(7)  # a recording computes nothing before it is replayed
        return outputs, replay


def recorded(monkeypatch: pytest.MonkeyPatch, recorder: Recorder, **options: Any) -> tuple[Recurrent, Recurrent]:
    """A network whose chunks are recorded (its steps run by Python, so nothing is compiled), and the eager loop."""
    monkeypatch.setattr(module, "_compiled", lambda graph, arguments: graph)
    monkeypatch.setattr(module, "cuda_recorder", recorder)
    monkeypatch.setattr(module, "_on_cuda", lambda captured: True)
    net = Recurrent(Mixed(), backend="inductor", **options)
    return net, Recurrent(net.cell, backend="eager")


@pytest.mark.parametrize("memory", ["full", "states", "sqrt"])
@pytest.mark.parametrize("call", [{}, {"lengths": [3, 2]}], ids=["whole", "lengths"])
def test_recorded_chunks_give_the_numbers_of_the_eager_loop(
    monkeypatch: pytest.MonkeyPatch, memory: Any, call: dict[str, Any]
) -> None:
    recorder = Recorder()
    net, loop = recorded(monkeypatch, recorder, memory=memory)
    for steps in (6, 3, 6):
        call["all_states"] = memory != "sqrt"
        close(results(net, steps, **call), results(loop, steps, **call))
    assert "recorded" in net.explain() and recorder.replayed > recorder.recorded


def test_a_length_is_recorded_once_whatever_becomes_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    net, loop = recorded(monkeypatch, recorder, verify="never")
    results(net, 4)
    assert recorder.recorded == 2  # forward and back
    results(net, 8)
    assert recorder.recorded == 2
    cell: Any = net.cell
    with torch.no_grad():
        cell.cell.weight_hh.mul_(2)
    close(results(net, 4), results(loop, 4))
    cell.cell.weight_hh.data = cell.cell.weight_hh.data.clone()
    close(results(net, 4), results(loop, 4))
    assert recorder.recorded == 2


def test_what_cannot_be_recorded_runs_step_by_step_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    net, loop = recorded(monkeypatch, Recorder(fails=True))
    close(results(net), results(loop))
    assert "not permitted when stream is capturing" in net.explain()


@pytest.mark.cuda
def test_on_a_gpu_chunks_are_recorded_and_auto_races_the_plans() -> None:
    x = torch.randn(T, N, D, dtype=torch.float64, device="cuda", requires_grad=True)
    nets = {name: Recurrent(nn.GRUCell(D, H).double().cuda(), backend=name) for name in ("inductor", "eager", "auto")}
    found: dict[str, list[Tensor]] = {}
    for name, net in nets.items():
        net.load_state_dict(nets["eager"].state_dict())
        for _ in range(2):
            result = net(x)
            loss = result.outputs.sin().sum() + result.states.cos().sum()
            found[name] = [result.outputs, *torch.autograd.grad(loss, [x, *net.parameters()])]
    for name in ("inductor", "auto"):
        close(found[name], found["eager"], 1e-11)
    assert "a chunk at a time, recorded" in nets["inductor"].explain()
    assert "inductor plan" in nets["auto"].why()[0][2]
