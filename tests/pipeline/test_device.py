"""Stage devices: received tensors are on the right device, and on CUDA complete and safe in any order of streams."""

import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft import Pipe
from torchweft.core.errors import UsageError
from torchweft.core.segment import detached_leaf
from torchweft.pipeline.routing import CudaStageDevice, Message, StageDevice, join_walk, leave_walk, message_of

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("event", [None, object()])
def test_only_values_of_another_device_are_moved(event: Any) -> None:
    """A CPU tensor does not wait for `event`, a stand-in for the event of a GPU tensor in the same message."""
    x, constant = torch.ones(2, requires_grad=True), torch.ones(2)
    arrived = StageDevice(CPU).receive(Message({"x": x, "n": 3, "none": None}, event))
    assert arrived["x"] is x and arrived["n"] == 3 and arrived["none"] is None
    moved = StageDevice(META).receive(Message((x, constant), event))
    assert [(tensor.device, tensor.requires_grad, tensor.is_leaf) for tensor in moved] == [
        (META, True, True),
        (META, False, True),
    ]


def test_a_moved_leaf_lets_no_gradient_accumulate() -> None:
    """Otherwise, a loss on an input that a layer stored would lose the gradient of the earlier stages."""
    kept = StageDevice(META).receive(Message(detached_leaf(torch.ones(2), True)))
    with pytest.raises(UsageError, match="made inside a stage is used outside"):
        (kept * 2).sum().backward()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_graph_moves_values_between_devices(monkeypatch: pytest.MonkeyPatch, checkpoint: Any) -> None:
    """The target moves to the last device, for the loss. No gradient can return from the meta device."""
    on = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "meta" and on(kind))  # it rejects "meta"
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    pipe = Pipe(model, chunks=2, devices=["cpu", "meta"], executor="graph", loss=nn.MSELoss(), checkpoint=checkpoint)
    loss = pipe(torch.ones(4, 2), target=torch.ones(4, 1))
    loss.backward()
    assert loss.device == META
    assert [parameter.grad.device for parameter in model.parameters() if parameter.grad is not None] == [META, META]


def test_on_the_cpu_nothing_waits() -> None:
    place, x = StageDevice(CPU), torch.ones(2)
    assert message_of(x).ready is None and place.send(x).ready is None
    join_walk([place, None])
    leave_walk([place, None], [x, None])


def test_gradients_on_cpu_are_those_of_the_undivided_model() -> None:
    assert_gradients_are_plain(["cpu", "cpu"], checkpoint="always")
    assert_gradients_are_plain(["cpu", "cpu"], schedule="1f1b", loss=mean_square)


CUDA = "cuda:0"
TWO_GPUS = pytest.param(
    [CUDA, "cuda:1"],
    id="cuda:0-cuda:1",
    marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
)
LARGE = 1 << 20


def layers() -> nn.Sequential:
    """A model for two stages that are large enough to overlap."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).double()


def assert_gradients_are_plain(devices: list[str], **options: Any) -> None:
    """Compare steps of a pipe on these devices with the undivided model on the CPU."""
    plain, model = layers(), layers()
    pipe = Pipe(model, chunks=4, devices=devices, balance=[2, 3], **options)
    for step in range(4):
        x = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        x_pipe, x_plain = x.to(devices[0], copy=True).requires_grad_(), x.clone().requires_grad_()
        loss = pipe(x_pipe, target=x) if "loss" in options else pipe(x_pipe).square().mean()
        expected = plain(x_plain).square().mean()
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(x_pipe.grad.cpu(), x_plain.grad, rtol=1e-9, atol=1e-9)
        with torch.no_grad():  # the next step must see these weights, which are written on the caller's stream
            for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.cpu(), its.grad, rtol=1e-9, atol=1e-9)
                mine -= 0.1 * mine.grad
                its -= 0.1 * its.grad
        model.zero_grad()
        plain.zero_grad()


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Loss that ignores the target."""
    return output.square().mean()


@pytest.mark.cuda
@pytest.mark.parametrize("devices", [[CUDA, CUDA], [CUDA, "cpu"], ["cpu", CUDA]], ids="-".join)
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # "auto" changes streams while it measures
@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
def test_gradients_on_cuda_are_those_of_the_undivided_model(devices: list[str], checkpoint: Any, executor: Any) -> None:
    assert_gradients_are_plain(devices, checkpoint=checkpoint, executor=executor)


@pytest.mark.cuda
@pytest.mark.parametrize("devices", [[CUDA, CUDA], [CUDA, "cpu"], ["cpu", CUDA]], ids="-".join)
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_1f1b_on_cuda_has_the_gradients_of_the_undivided_model(devices: list[str], executor: Any) -> None:
    assert_gradients_are_plain(devices, schedule="1f1b", loss=mean_square, executor=executor)


@pytest.mark.cuda
def test_stages_on_one_gpu_run_in_streams_of_their_own() -> None:
    streams: list[tuple[int, torch.cuda.Stream]] = []

    class Probe(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: Tensor) -> Tensor:
            streams.append((self.stage, torch.cuda.current_stream(x.device)))
            return x * 2

    pipe = Pipe(nn.Sequential(Probe(0), Probe(1)), chunks=2, devices=[CUDA] * 2, balance=[1, 1], executor="threads")
    pipe(torch.ones(2, 4, device=CUDA))
    of_stage = [{stream.cuda_stream for stage, stream in streams if stage == number} for number in range(2)]
    assert [len(values) for values in of_stage] == [1, 1]
    assert len({*of_stage[0], *of_stage[1], torch.cuda.current_stream(CUDA).cuda_stream}) == 3


@pytest.mark.cuda
def test_a_value_that_arrives_is_ready() -> None:
    place, other = CudaStageDevice(torch.device(CUDA)), CudaStageDevice(torch.device(CUDA))
    x = torch.zeros(LARGE, device=CUDA)
    torch.cuda.synchronize()
    with place.stream_context():
        torch.cuda._sleep(50_000_000)  # tens of milliseconds on the device
        x += 1
        sent = place.send(x)
    with other.stream_context():
        seen = other.receive(sent) * 2
    leave_walk([place, other], [seen])
    assert seen.min().item() == seen.max().item() == 2


@pytest.mark.cuda
def test_the_caller_and_the_places_wait_for_each_other() -> None:
    place, x = CudaStageDevice(torch.device(CUDA)), torch.zeros(LARGE, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    x += 1  # late, on the caller's stream
    join_walk([place])
    with place.stream_context():
        y = x * 2
        torch.cuda._sleep(50_000_000)
        y += 1  # late, on the stream of the stage device
    leave_walk([place], [y])
    assert (y * 1).min().item() == (y * 1).max().item() == 3


@pytest.mark.cuda
def test_memory_is_not_given_away_while_another_stream_reads_it() -> None:
    # The sender drops its tensor at once and allocates memory of the same size, while the reader is delayed.
    place, other = CudaStageDevice(torch.device(CUDA)), CudaStageDevice(torch.device(CUDA))
    results: list[Tensor] = []
    torch.cuda.synchronize()
    for number in range(20):
        with place.stream_context():
            sent = place.send(torch.full((LARGE,), float(number), device=CUDA))
        with other.stream_context():
            value = other.receive(sent)
            torch.cuda._sleep(5_000_000)
            results.append(value + 0)
            del value
        del sent
        with place.stream_context():
            torch.full((LARGE,), -1.0, device=CUDA)
    leave_walk([place, other], results)
    for number, result in enumerate(results):
        assert result.min().item() == result.max().item() == number


class Noise(nn.Module):
    """Allocates and frees memory of the size of its input, which overwrites a block that was freed too early."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            torch.full_like(x, float("nan"))
        return x * 1


@pytest.mark.cuda
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_are_exact_while_memory_is_reused(checkpoint: Any) -> None:
    """The `Noise` layers make the allocator reuse every freed block."""
    plain, model = layers().to(CUDA), layers()
    noisy = nn.Sequential(*[module for layer in model for module in (Noise(), layer)], Noise())
    pipe = Pipe(noisy, chunks=8, devices=[CUDA] * 2, balance=[5, 6], checkpoint=checkpoint, executor="threads")
    for _ in range(10):
        x = torch.randn(64, 64, dtype=torch.float64, device=CUDA)
        pipe(x).square().mean().backward()
        plain(x).square().mean().backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.cuda
def test_copy_from_the_gpu_is_complete_when_it_is_read() -> None:
    place = CudaStageDevice(torch.device(CUDA))
    with place.stream_context():
        torch.cuda._sleep(50_000_000)
        sent = place.send(torch.ones(LARGE, device=CUDA))
    arrived = StageDevice(CPU).receive(sent)
    assert arrived.min() == arrived.max() == 1


@pytest.mark.cuda
def test_dropout_on_cuda_is_bit_equal_under_all_executors() -> None:
    """Recomputation draws the same values too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5)).to(CUDA)
    x, gradients = torch.ones(8, 64, device=CUDA), []
    for executor in ("serial", "threads"):
        for checkpoint in ("never", "always"):
            pipe = Pipe(model, chunks=4, devices=[CUDA] * 2, balance=[2, 2], executor=executor, checkpoint=checkpoint)
            for seed in range(5):
                torch.manual_seed(seed)
                model.zero_grad()
                pipe(x).square().sum().backward()
                gradients.append((seed, [p.grad.clone() for p in model.parameters()]))
    expected = dict(gradients[:5])
    assert all(torch.equal(a, b) for seed, grads in gradients for a, b in zip(grads, expected[seed], strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_sparse_gradients_cross_streams(executor: Any) -> None:
    """Their memory must be recorded on other streams, which `Tensor.record_stream` cannot do."""

    def embedding() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3)).double()

    plain, model = embedding(), embedding()
    pipe = Pipe(model, chunks=4, devices=[CUDA] * 2, balance=[2, 1], executor=executor)
    for seed in range(3):
        x = torch.randint(50, (16, 4), generator=torch.Generator().manual_seed(seed))
        pipe(x.to(CUDA)).square().mean().backward()
        plain(x).square().mean().backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.layout == its.grad.layout
        torch.testing.assert_close(mine.grad.to_dense().cpu(), its.grad.to_dense(), rtol=1e-9, atol=1e-9)


class Tally(nn.Module):
    """Counts its calls with a delay, so that a stage that does not wait reads a stale count."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(LARGE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.total.clone()
        torch.cuda._sleep(1_000_000)
        self.total.copy_(seen + 1)
        return x * 1


class NewTally(Tally):
    """Replaces its buffer by a new one, which frees the memory of the old one."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(1_000_000)
        self.total = self.total + 1
        return x * 1


@pytest.mark.cuda
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [Tally, NewTally])
def test_stages_of_one_gpu_share_a_buffer(kind: type[Tally], checkpoint: Any) -> None:
    """No count is lost, because the stream of a stage waits for that of the stage before it."""
    tally, chunks, steps = kind(), 8, 3
    model = nn.Sequential(nn.Linear(4, 4), tally, nn.Linear(4, 4), tally)
    pipe = Pipe(model, chunks=chunks, devices=[CUDA] * 2, balance=[2, 2], checkpoint=checkpoint, executor="threads")
    for _ in range(steps):
        pipe(torch.ones(chunks, 4, device=CUDA)).sum().backward()
    assert tally.total.min().item() == tally.total.max().item() == steps * chunks * 2


class StreamProbe(nn.Module):
    """Records the current stream and device of its forward, and the stream on which its gradient arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.streams = set[int]()
        self.devices = set[int]()
        self.gradients = set[int]()
        self.weight.register_hook(lambda gradient: self.gradients.add(self.stream_of(gradient)))

    @staticmethod
    def stream_of(x: Tensor) -> int:
        return torch.cuda.current_stream(x.device).cuda_stream

    def forward(self, x: Tensor) -> Tensor:
        self.streams.add(self.stream_of(x))
        self.devices.add(torch.cuda.current_device())
        return x * self.weight


@pytest.mark.cuda
def test_gradients_accumulate_on_the_streams_of_stages() -> None:
    """Otherwise every gradient of a walk would wait for the stream of the caller, which waits for all stages."""
    model = nn.Sequential(StreamProbe(), StreamProbe())
    pipe = Pipe(model, chunks=2, devices=[CUDA] * 2, balance=[1, 1], executor="threads")
    loss = None
    for _ in range(2):  # the previous loss keeps the nodes of its step alive
        loss = pipe(torch.ones(4, 4, device=CUDA)).sum()
        loss.backward()
    probes = [layer for layer in model if isinstance(layer, StreamProbe)]
    assert [len(layer.streams) for layer in probes] == [1, 1]
    assert [layer.gradients for layer in probes] == [layer.streams for layer in probes]
    assert probes[0].streams.isdisjoint(probes[1].streams)


@pytest.mark.cuda
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("devices", [[CUDA, CUDA], TWO_GPUS])
def test_no_gradient_accumulates_across_streams(devices: list[str], executor: Any) -> None:
    """PyTorch warns about it once per process, unless warnings are set to "always"."""
    pipe = Pipe(layers(), chunks=4, devices=devices, balance=[2, 3], executor=executor)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe(torch.ones(8, 64, dtype=torch.float64, device=CUDA)).square().mean().backward()
    finally:
        torch.set_warn_always(always)
    assert not [str(warning.message) for warning in seen if "AccumulateGrad" in str(warning.message)]


class DelayedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.cuda._sleep(2_000_000)
        return gradient * 1


class Delayed(nn.Module):
    """Identity whose gradient is delayed."""

    def forward(self, x: Tensor) -> Tensor:
        return DelayedBackward.apply(x)  # type: ignore[no-any-return]


@pytest.mark.cuda
@pytest.mark.parametrize("devices", [[CUDA, CUDA], TWO_GPUS])
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b", "loss": mean_square}], ids=["gpipe", "1f1b"])
def test_the_caller_may_have_streams_of_its_own(devices: list[str], executor: Any, options: Any) -> None:
    """The streams differ from those of the backward thread, and the weights are updated between the steps."""
    plain, model = layers(), layers()
    late = nn.Sequential(*[module for layer in model for module in (layer, Delayed())])
    pipe = Pipe(late, chunks=4, devices=devices, balance=[4, 6], executor=executor, **options)
    x = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    streams = [torch.cuda.Stream(device) for device in dict.fromkeys(devices)]
    for stream in streams:
        torch.cuda.synchronize(stream.device)
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        for _ in range(3):
            moved = x.to(devices[0])
            loss = pipe(moved, target=moved) if options else pipe(moved).square().mean()
            loss.backward()
            plain(x).square().mean().backward()
            with torch.no_grad():
                for parameter in (*model.parameters(), *plain.parameters()):
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
            plain.zero_grad()
    for stream in streams:
        stream.synchronize()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), its, rtol=1e-9, atol=1e-9)


@pytest.mark.cuda
@pytest.mark.parametrize("devices", [TWO_GPUS])
@pytest.mark.parametrize("executor", ["serial", "threads", "graph"])
def test_the_current_device_is_that_of_the_stage(devices: list[str], executor: Any) -> None:
    """Triton kernels run on the current device, whatever the device of their tensors."""
    model = nn.Sequential(StreamProbe(), StreamProbe())
    pipe = Pipe(model, chunks=2, devices=devices, balance=[1, 1], executor=executor)
    pipe(torch.ones(4, 4, device=CUDA))
    assert [layer.devices for layer in model if isinstance(layer, StreamProbe)] == [{0}, {1}]
