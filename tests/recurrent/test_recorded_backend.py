"""Recorded chunks have the results of the eager loop."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.cells.zoo_cases import ZooCase, sampled
from tests.recurrent.recurrent_cases import as_the_loop, close, learned
from torchweft.core import recording
from torchweft.core.pytree import flatten, map_leaves
from torchweft.recurrent import Recurrent, backend_registry, recordings
from torchweft.recurrent import recorded_backend as module

T, N, D, H = 5, 2, 3, 4


class Mixed(nn.Module):
    """A GRU with an output that is not a state, an integer state and a buffer. Chunks have two steps (see `short`)."""

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
    """Chunks of two steps, so that sequences have several."""
    torch.manual_seed(0)
    monkeypatch.setattr("torchweft.recurrent.python_backend.chunk_length", lambda *_: 2)
    monkeypatch.setattr(module, "CHUNK_STEPS", 1)


def results(net: Recurrent, steps: int = T, all_states: bool = True, **call: Any) -> list[Tensor]:
    """All results, with the states of every step if `all_states`, and all gradients. Checks that backward repeats."""
    torch.manual_seed(steps)
    x, begin = torch.randn(steps, N, D, dtype=torch.float64, requires_grad=True), state()
    result = net(x, begin, **call)
    parts = result if all_states else result[:2]
    leaves = [leaf for part in parts for leaf in flatten(part)[0]]
    tensors = [x, begin[0], begin[2], *net.parameters()]
    loss = sum(leaf.sin().sum() for leaf in leaves if leaf.is_floating_point())
    one = torch.autograd.grad(loss, tensors, retain_graph=True)
    two = torch.autograd.grad(loss, tensors)
    assert all(map(torch.equal, one, two))
    return [*(leaf.detach() for leaf in leaves), *one]


# -- recordings, without a GPU: a replay runs the function again into the same memory --------------------------------


class Recorder:
    """Substitute for `cuda_recorder` that runs the function again. Counts recordings and replays."""

    def __init__(self, fails: bool = False) -> None:
        self.recorded, self.replayed, self.fails = 0, 0, fails

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            function()

        return replay


def recorded(
    monkeypatch: pytest.MonkeyPatch, recorder: recordings.Recorder, cell: nn.Module | None = None, **options: Any
) -> tuple[Recurrent, Recurrent]:
    """A network whose chunks are recorded, and the eager loop."""
    monkeypatch.setattr(module, "cuda_recorder", recorder)
    monkeypatch.setattr(backend_registry, "runs_on_cuda", lambda captured: True)
    net = Recurrent(Mixed() if cell is None else cell, backend="python", **options)
    return net, Recurrent(net.cell, backend="eager")


@pytest.mark.long
@pytest.mark.parametrize("memory", ["full", "states", "sqrt"])
@pytest.mark.parametrize("call", [{}, {"lengths": [3, 2]}], ids=["whole", "lengths"])
def test_recorded_chunks_equal_the_eager_loop(
    monkeypatch: pytest.MonkeyPatch, memory: Any, call: dict[str, Any]
) -> None:
    recorder = Recorder()
    net, loop = recorded(monkeypatch, recorder, memory=memory)
    for steps in (6, 3, 6):
        call["all_states"] = memory != "sqrt"
        close(results(net, steps, **call), results(loop, steps, **call))
    assert "recorded" in net.explain() and recorder.replayed > recorder.recorded


@sampled()
def test_zoo_by_recorded_steps(case: ZooCase, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    cell, x = recorded(monkeypatch, recorder, case.cell())[0].cell, case.inputs(4, 2)
    state = map_leaves(lambda leaf: None if leaf is None else learned(leaf.detach()), case.state(cell, x))
    as_the_loop(cell, "python", x, state, verify="never")
    assert recorder.replayed >= 2 * recorder.recorded > 0  # checked, then used


def test_new_weights_need_no_new_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    net, loop = recorded(monkeypatch, recorder, verify="never")
    results(net, 4)
    assert recorder.recorded == 2  # forward and backward
    results(net, 8)
    assert recorder.recorded == 2
    cell: Any = net.cell
    with torch.no_grad():
        cell.cell.weight_hh.mul_(2)
    close(results(net, 4), results(loop, 4))
    cell.cell.weight_hh.data = cell.cell.weight_hh.data.clone()
    close(results(net, 4), results(loop, 4))
    assert recorder.recorded == 2


def record_nothing(function: Callable[[], None]) -> Callable[[], None]:
    """Like a graph that missed the kernels: its buffers keep the first results."""
    function()
    return lambda: None


def record_stale(function: Callable[[], None]) -> Callable[[], None]:
    """A replay computes all values again, but from the memory at the time of recording."""
    function()
    buffers = {id(buffer): buffer for cell in function.__closure__ or () for buffer in _tensors(cell.cell_contents)}
    first = [(tensor, tensor.clone()) for tensor in buffers.values()]
    return lambda: [tensor.copy_(old) for tensor, old in first] and None


@pytest.mark.parametrize(
    ("recorder", "words"),
    [
        (Recorder(fails=True), "not permitted when stream is capturing"),
        (record_nothing, "could not be recorded: a value of its replay is NaN at other places"),
        (record_stale, "could not be recorded: a value of its replay differs"),
    ],
    ids=["fails", "empty", "stale"],
)
def test_wrong_recordings_launch_step_by_step(monkeypatch: pytest.MonkeyPatch, recorder: Any, words: str) -> None:
    """A check with other values detects wrong recordings."""
    net, loop = recorded(monkeypatch, recorder)
    for steps in (T, T, 4):
        close(results(net, steps), results(loop, steps))
    assert words in net.explain()


def _tensors(value: Any) -> list[Tensor]:
    tables = value.values() if isinstance(value, dict) else ()
    return [item for table in tables for item in table if isinstance(item, Tensor)]


def test_threads_share_a_recorded_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads share the one set of buffers of a recording."""
    net, loop = recorded(monkeypatch, Recorder())
    begin, inputs = state(), [torch.randn(T, N, D, dtype=torch.float64) for _ in range(4)]
    expected = [loop(x, begin).outputs.detach() for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(30):
            outputs = net(inputs[number], begin).outputs.detach()
            wrong.extend([number] * (not torch.allclose(outputs, expected[number])))

    run_all([partial(call, number) for number in range(4)])
    assert not wrong


def test_networks_are_recorded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch records one graph per process. A concurrent one would fail, or get the kernels of the first."""
    within, overlaps = [0], list[int]()
    record = Recorder()

    def slow(function: Callable[[], None]) -> Callable[[], None]:
        within[0] += 1
        time.sleep(0.05)  # another thread would begin
        overlaps.append(within[0])
        within[0] -= 1
        return record(function)

    nets = [recorded(monkeypatch, slow, verify="never")[0] for _ in range(3)]
    for net in nets:
        results(net, 4)  # makes the plans, which is slow. The calls below only record another chunk length.
    run_all([partial(results, net, 1) for net in nets])
    assert set(overlaps) == {1} and len(overlaps) == record.recorded == 3 * 4


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


class FakeStream:
    """A stream that records the streams it waits for."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.waits = device, list[Any]()

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append(other)


def test_each_device_has_its_own_recording_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is current on its own device, because a graph on the stream of another device would be empty. It and
    the stream of the caller wait for each other, also after an error."""
    devices = [torch.device("cuda", number) for number in range(2)]
    current = {device: FakeStream(device) for device in devices}
    entered: list[FakeStream] = []

    @contextmanager
    def stream(which: FakeStream) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(recording, "_streams", {})
    for name, fake in (("Stream", FakeStream), ("current_stream", current.__getitem__), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, fake)
    for device in (*devices, devices[1]):
        with pytest.raises(KeyError), recording.recording_stream(device):
            assert entered[-1].device == device
            assert entered[-1].waits[-1] is current[device] and len(current[device].waits) < len(entered[-1].waits)
            raise KeyError
        assert current[device].waits[-1] is entered[-1]
    assert entered[1] is entered[2] is not entered[0]


@pytest.mark.cuda
def test_gpu_records_chunks() -> None:
    x = torch.randn(T, N, D, dtype=torch.float64, device="cuda", requires_grad=True)
    nets = {name: Recurrent(nn.GRUCell(D, H).double().cuda(), backend=name) for name in ("python", "eager", "auto")}
    found: dict[str, list[Tensor]] = {}
    for name, net in nets.items():
        net.load_state_dict(nets["eager"].state_dict())
        for _ in range(2):
            result = net(x)
            loss = result.outputs.sin().sum() + result.states.cos().sum()
            found[name] = [result.outputs, *torch.autograd.grad(loss, [x, *net.parameters()])]
    for name in ("python", "auto"):
        close(found[name], found["eager"], 1e-11)
    assert "a chunk at a time, recorded" in nets["python"].explain()
    assert "triton plan" in nets["auto"].why()[0][2]
