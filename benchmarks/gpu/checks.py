"""Laws that must hold on one or two GPUs. Each is a function of the devices of two stages that raises on failure.

    python -m benchmarks.gpu.checks NAME cuda:0 cuda:1     runs one, in this process

With one GPU both places are ``cuda:0``, so that the stages have different streams of one device. ``cpu cpu`` shows that
the functions run. Values and gradients are compared with those of plain modules on the CPU in float64.
"""

import copy
import importlib.util
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.gpu.jobs import ROOT, SKIPPED, run_job
from torchweft.errors import UsageError

Places = tuple[str, str]
Check = Callable[[Places], None]
SLEEP = 5_000_000  # cycles of a sleeping kernel: several milliseconds


class Skipped(Exception):
    """The check cannot run on this machine; the message says why."""


class SlowBackward(torch.autograd.Function):
    """Identity whose backward first sleeps on the GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        sleep(gradients[0])
        return gradients[0] * 1


def sleep(tensor: Tensor) -> None:
    """Delay the current stream of the tensor's GPU."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            torch.cuda._sleep(SLEEP)


def synchronize(places: Places) -> None:
    for place in {place for place in places if place != "cpu"}:
        torch.cuda.synchronize(place)


def layers() -> nn.Sequential:
    """Model for two stages: layers 0 to 1 and 2 to 4."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).double()


def floats(step: int, *shape: int) -> Tensor:
    """Random float64 numbers, seeded by the step."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Compare on the CPU, in float64."""
    actual = actual.detach().cpu()
    actual = (actual.to_dense() if actual.layout != torch.strided else actual).double()
    expected = expected.to_dense() if expected.layout != torch.strided else expected
    torch.testing.assert_close(
        actual, expected.detach().double(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )


def assert_trains_as_on_the_cpu(
    make: Callable[[], nn.Module],
    place: str,
    wrap: Callable[[nn.Module], nn.Module],
    draw: Callable[[int], Tensor] = lambda step: floats(step, 9, 64),
    *,
    steps: int = 4,
    tolerance: float = 1e-9,
) -> None:
    """Compare SGD steps of `wrap(make())`, whose inputs are on `place`, with those of `make()` on the CPU."""
    plain, model = make(), make()
    trained = wrap(model)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, model)]
    for step in range(steps):
        x = draw(step)
        values = []
        for module, inputs in ((plain, x), (trained, x.to(place))):
            value = module(inputs).square().mean()
            value.backward()
            values.append(value)
        assert_close(values[1], values[0], tolerance, f"the loss of step {step}")
        for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert expected.grad is not None and actual.grad is not None, f"step {step}: {name} has no gradient"
            assert_close(actual.grad, expected.grad, tolerance, f"step {step}, gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def piped(places: Places, **options: Any) -> Callable[[nn.Module], nn.Module]:
    """Function that puts a model into a pipe over these places, by default with four micro-batches."""
    return lambda model: weft.Pipe(model, **{"chunks": 4, "devices": list(places), **options})


# -- 1, 2: the first steps of a process -----------------------------------------------------------------------------


def gradients_without_stream_warnings(places: Places) -> None:
    """Gradients equal those of the CPU with every executor, and PyTorch does not warn about their streams."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for executor in ("serial", "threads", "graph", "auto"):
            for checkpoint in ("never", "always"):
                wrap = piped(places, balance=[2, 3], executor=executor, checkpoint=checkpoint)
                assert_trains_as_on_the_cpu(layers, places[0], wrap, steps=2)
    messages = {str(warning.message) for warning in caught if "AccumulateGrad" in str(warning.message)}
    assert not messages, f"PyTorch warns: {messages}"


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def split_before_cuda_starts(places: Places) -> None:
    """A split pipe, and one without parameters, can be made and run before CUDA is initialised."""
    assert not torch.cuda.is_initialized(), "CUDA is initialised already"
    assert_trains_as_on_the_cpu(TwoBlocks, places[0], piped(places, split=["b"], chunks=2))
    x = floats(0, 6, 4)
    pipe = weft.Pipe(nn.Sequential(nn.ReLU(), nn.Tanh()), chunks=2, devices=list(places), balance=[1, 1])
    assert_close(pipe(x.to(places[0])), torch.tanh(torch.relu(x)), 1e-12, "a pipe without parameters")


# -- 3, 4, 5: recorded chunks of recurrent networks -----------------------------------------------------------------


class RecurrentOutputs(nn.Module):
    def __init__(self, cell: nn.Module, backend: Any) -> None:
        super().__init__()
        self.net = weft.Recurrent(cell, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).outputs


def gru(backend: Any, seed: int = 0, width: int = 16, hidden: int = 16) -> RecurrentOutputs:
    torch.manual_seed(seed)
    return RecurrentOutputs(nn.GRUCell(width, hidden).double(), backend)


def with_backend(model: nn.Module, backend: Any) -> nn.Module:
    """Set the backend of all recurrent networks in the model, and return the model."""
    for module in model.modules():
        if isinstance(module, RecurrentOutputs):
            module.net = weft.Recurrent(module.net.cell, backend=backend)
    return model


def assert_recorded(net: weft.Recurrent, places: Places) -> None:
    """Check that the chunks of the network were recorded, on a GPU."""
    print(net.why())
    if places[0] != "cpu":
        lines = [line for line in net.explain().splitlines() if "launched" in line or "because" in line]
        assert "recorded" in "".join(lines) and "could not" not in "".join(lines), f"not recorded: {lines or net.why()}"


def two_recorded_networks(places: Places) -> None:
    """Networks recorded on the first and then on the second GPU have the values of the eager loop."""
    for place in places:
        nets: list[weft.Recurrent] = []

        def wrap(model: nn.Module, place: str = place, nets: list[weft.Recurrent] = nets) -> nn.Module:
            recorded = with_backend(model.to(place), "python")
            nets.append(recorded.net)
            return recorded

        for steps in (12, 7):
            assert_trains_as_on_the_cpu(
                lambda: gru("eager"), place, wrap, lambda step, steps=steps: floats(step, steps, 4, 16), steps=3
            )
        for net in nets:
            assert_recorded(net, places)


def recorded_network_shared_by_threads(places: Places) -> None:
    """Four threads that share a recorded network each get the results of their own inputs."""
    place, plain = places[0], gru("eager")
    shared = with_backend(copy.deepcopy(plain).to(place), "python")
    inputs = [floats(number, 12, 4, 16) for number in range(4)]
    wrong, errors = [0] * len(inputs), list[BaseException]()
    with torch.no_grad():
        expected = [plain(x).to(place) for x in inputs]
        on_device = [x.to(place) for x in inputs]
        shared(on_device[0])

    def call_often(number: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(place)) if place != "cpu" else nullcontext():
                for _ in range(150):
                    wrong[number] += not torch.allclose(shared(on_device[number]), expected[number], atol=1e-9)
        except BaseException as error:
            errors.append(error)

    synchronize(places)
    threads = [threading.Thread(target=call_often, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_recorded(shared.net, places)
    assert not errors and not any(wrong), f"wrong results per thread, of 150: {wrong}; errors: {errors}"


def pipe_of_recorded_networks(places: Places) -> None:
    """A threaded pipe of two recorded networks trains as on the CPU, and with dropout as in one thread."""

    def make() -> nn.Module:
        return nn.Sequential(gru("eager", 0), gru("eager", 1))

    def draw(step: int) -> Tensor:
        return floats(step, 12, 8, 16)

    def wrap(model: nn.Module) -> nn.Module:
        return piped(places, balance=[1, 1], executor="threads", chunks=2, batch_dim=1)(with_backend(model, "python"))

    assert_trains_as_on_the_cpu(make, places[0], wrap, draw, steps=3)
    gradients: dict[str, list[Tensor]] = {}
    for executor in ("serial", "threads"):
        one, other = gru("python", 0), gru("python", 1)
        model = nn.Sequential(one, nn.Dropout(0.5), other)
        options = {"balance": [1, 1, 1], "devices": [*places, places[0]], "batch_dim": 1}
        pipe = weft.Pipe(model, chunks=2, executor=executor, **options)
        for step in range(3):
            torch.manual_seed(step)
            pipe(draw(step).to(places[0])).square().mean().backward()
        gradients[executor] = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        assert_recorded(one.net, places)
        assert_recorded(other.net, places)
    assert len(gradients["serial"]) == 8
    for number, (expected, actual) in enumerate(zip(gradients["serial"], gradients["threads"], strict=True)):
        assert_close(actual, expected, 1e-9, f"with dropout, gradient {number}")


# -- 6, 7, 9, 10: values and gradients that move --------------------------------------------------------------------


class SlowMean(nn.Module):
    """Mean whose gradient is an expanded tensor that is computed with a delay."""

    def forward(self, x: Tensor) -> Tensor:
        return SlowBackward.apply(x.mean(1))


def strided_gradients_arrive(places: Places) -> None:
    """A delayed, expanded gradient arrives complete at the previous stage, for 50 steps."""
    if torch.cuda.device_count() > 1:
        print("peer access:", torch.cuda.can_device_access_peer(0, 1))

    def make() -> nn.Module:
        return nn.Sequential(layers(), SlowMean())

    for executor in ("threads", "serial"):
        wrap = piped(places, balance=[1, 1], executor=executor)
        assert_trains_as_on_the_cpu(make, places[0], wrap, steps=50 if executor == "threads" else 5)


class StoringLayer(nn.Module):
    """Stores a tensor that depends on its input."""

    def forward(self, x: Tensor) -> Tensor:
        self.stored = x * 1
        return x * 1


def tensor_kept_by_a_layer(places: Places) -> None:
    """A loss that reads a tensor stored by a layer has the full gradient or raises, never a partial gradient."""
    torch.manual_seed(0)
    layer = StoringLayer()
    model = nn.Sequential(nn.Linear(3, 3), layer)
    pipe = weft.Pipe(model, chunks=1, devices=list(places), balance=[1, 1], executor="serial")
    output = pipe(torch.ones(2, 3, device=places[0]))
    try:
        (output.sum() + layer.stored.to(output.device).sum()).backward()
    except UsageError as error:
        print(f"raises {error}"[:200])
    else:
        assert_close(model[0].weight.grad, torch.full((3, 3), 4.0), 1e-6, "the gradient")


def sparse_gradients(places: Places) -> None:
    """Sparse gradients of an embedding equal those of the CPU, with both stages on the first GPU, in threads."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 64, sparse=True), nn.Linear(64, 8)).double()

    def draw(step: int) -> Tensor:
        return torch.randint(50, (32,), generator=torch.Generator().manual_seed(step))

    wrap = piped((places[0], places[0]), balance=[1, 1], executor="threads")
    assert_trains_as_on_the_cpu(make, places[0], wrap, draw, steps=10)


def graph_over_places(places: Places) -> None:
    """The executor "graph" moves values between places, and second derivatives equal those of the CPU."""
    assert_trains_as_on_the_cpu(layers, places[0], piped(places, balance=[2, 3], executor="graph"))
    plain, model, x = layers(), layers(), floats(0, 8, 64)
    pipe = piped(places, balance=[2, 3], executor="graph")(model)
    gradients: list[Tensor] = []
    for module, inputs in ((plain, x), (pipe, x.to(places[0]))):
        leaf = inputs.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
        first.square().sum().backward()
        gradients.append(leaf.grad)
    assert_close(gradients[1], gradients[0], 1e-8, "the gradient of a gradient")


def recorded_steps_have_the_bits_of_ordinary_ones(places: Places) -> None:
    """Steps that are replayed as CUDA graphs have the losses and gradients of the executor "serial", bit by bit."""
    if places[0] == "cpu":
        raise Skipped("a CUDA graph needs a GPU")
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        for checkpoint in ("never", "always"):
            options = {"balance": [2, 3], "schedule": schedule, "checkpoint": checkpoint, "loss": nn.MSELoss()}
            pipes = [piped(places, executor=executor, **options)(layers()) for executor in ("cuda_graph", "serial")]
            optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5) for pipe in pipes]
            for step in range(20):
                x, target = floats(step, 12, 64).to(places[0]), floats(step, 12, 8).to(places[1])
                values: list[list[Tensor]] = []
                for pipe, optimizer in zip(pipes, optimizers, strict=True):
                    loss = pipe(x, target=target)
                    loss.backward()
                    values.append([loss.detach(), *(p.grad.clone() for p in pipe.parameters() if p.grad is not None)])
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=bool(step % 2))
                assert len(values[0]) == len(values[1])
                assert all(map(torch.equal, *values)), f"{schedule}, {checkpoint}: step {step} differs"
            figures = pipes[0].statistics()["cuda_graph"]
            assert figures["replayed"] == 18, f"{schedule}, {checkpoint}: {figures}"


# -- 8: reduced precision -------------------------------------------------------------------------------------------


def pipe_with_tf32(places: Places) -> None:
    """With ``fp32_precision = "tf32"`` a pipe trains as on the CPU, up to the rounding of TF32."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"

    def make() -> nn.Module:
        return layers().float()

    for executor in ("serial", "threads"):
        wrap = piped(places, balance=[2, 3], executor=executor)
        draw = lambda step: floats(step, 9, 64).float()  # noqa: E731
        assert_trains_as_on_the_cpu(make, places[0], wrap, draw, tolerance=2e-2)


class ConvCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 3, 3, padding=1)

    def initial_state(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.conv(torch.cat([x, h], 1)))
        return h, h


def plans_with_tf32(places: Places) -> None:
    """With TF32, a GRU with one row and a convolutional cell have plans, and correct values up to rounding."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    warnings.simplefilter("error", weft.recurrent.NoPlanWarning)
    for make, shape in ((lambda: nn.GRUCell(32, 64), (20, 1, 32)), (ConvCell, (20, 2, 3, 8, 8))):
        torch.manual_seed(0)
        plain = RecurrentOutputs(make(), "eager").double()
        for backend in ("python", "triton"):
            net = with_backend(copy.deepcopy(plain).float().to(places[0]), backend)
            x = floats(0, *shape)
            actual, expected = net(x.float().to(places[0])), plain(x)
            actual.square().sum().backward()
            plain.zero_grad()
            expected.square().sum().backward()
            assert_close(actual, expected, 1e-2, f"outputs by {backend}")
            for (name, one), other in zip(plain.named_parameters(), net.parameters(), strict=True):
                scale = one.grad.abs().max()
                assert_close(
                    other.grad.cpu() / scale.float(), one.grad / scale, 2e-2, f"gradient of {name} by {backend}"
                )
            print(backend, net.net.why())


# -- 11: memory -----------------------------------------------------------------------------------------------------


def peak_memory(
    places: Places, chunks: int, checkpoint: Any, autocast: bool, executor: str = "threads", rows: int = 4096
) -> tuple[int, int]:
    """Peak bytes of active blocks and of allocated tensors in the third step of a pipe of four stages."""
    # cuBLAS keeps a workspace of 32 MiB per stream on an H200. Every pipe has new streams, so they would add up.
    clear_workspaces: Any = torch._C._cuda_clearCublasWorkspaces
    clear_workspaces()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)]
    devices = [places[number % 2] for number in range(4)]
    pipe = weft.Pipe(
        nn.Sequential(*blocks),
        chunks=chunks,
        devices=devices,
        balance=[4] * 4,
        checkpoint=checkpoint,
        executor=executor,
    )
    x = torch.randn(rows, 1024, device=places[0])
    for step in range(3):
        if step == 2:
            synchronize(places)
            torch.cuda.reset_peak_memory_stats(places[0])
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = pipe(x).float().square().mean()
        loss.backward()
        pipe.zero_grad()
    synchronize(places)
    statistics = torch.cuda.memory_stats(places[0])
    return statistics["active_bytes.all.peak"], statistics["allocated_bytes.all.peak"]


def memory_does_not_grow_with_micro_batches(places: Places) -> None:
    """16 micro-batches take at most 1.25 times the memory of one, with recomputation 1.1 times."""
    if places[0] == "cpu":
        raise Skipped("memory is measured on a GPU")
    faults: list[str] = []
    for checkpoint, autocast, limit in (("never", False, 1.25), ("always", False, 1.1), ("always", True, 1.1)):
        peaks = {chunks: peak_memory(places, chunks, checkpoint, autocast)[0] for chunks in (1, 2, 8, 16)}
        print(checkpoint, "bf16" if autocast else "fp32", {key: f"{peak >> 20} MiB" for key, peak in peaks.items()})
        if peaks[16] > limit * peaks[1]:
            faults.append(f"{checkpoint}, autocast {autocast}: {peaks[16] / peaks[1]:.2f} times")
    assert not faults, f"16 micro-batches take more memory than one: {faults}"


# -- 12: streams of the caller --------------------------------------------------------------------------------------


class SlowIdentity(nn.Module):
    """Identity with a slow backward."""

    def forward(self, x: Tensor) -> Tensor:
        return SlowBackward.apply(x)


def caller_on_own_stream(places: Places) -> None:
    """If the caller makes another stream of the output's device current, optimizer steps see complete gradients."""

    def make() -> nn.Module:
        model = layers()
        return nn.Sequential(model[0], model[1], SlowIdentity(), model[2], SlowIdentity(), model[3], model[4])

    stream = torch.cuda.stream(torch.cuda.Stream(places[1])) if places[1] != "cpu" else nullcontext()
    with stream:
        for executor in ("threads", "serial"):
            wrap = piped(places, balance=[3, 4], executor=executor)
            assert_trains_as_on_the_cpu(make, places[0], wrap, steps=10)


# -- 13, 14: buffers ------------------------------------------------------------------------------------------------


class Tally(nn.Module):
    """Sums its inputs in a buffer, so that lost additions are detected in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1 << 16, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        self.count += 1
        return x * 1


def buffers_shared_by_stages(places: Places) -> None:
    """A module in two stages of one GPU loses no write to its buffers in 200 steps."""
    tallies: dict[str, Tally] = {}
    for executor in ("serial", "threads"):
        tally = tallies[executor] = Tally()
        model = nn.Sequential(tally, nn.Tanh(), tally)
        pipe = piped((places[0], places[0]), balance=[2, 1], executor=executor)(model)
        with torch.no_grad():
            for step in range(200):
                pipe(floats(step, 8, 64).to(places[0]))
    assert tallies["threads"].count.item() == tallies["serial"].count.item() == 200 * 4 * 2
    assert_close(tallies["threads"].total, tallies["serial"].total.cpu(), 1e-9, "the sum")


class FailingLayer(nn.Module):
    """Raises while the previous stage still runs on the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("expected")


class SlowForward(nn.Module):
    """Identity with a slow forward."""

    def forward(self, x: Tensor) -> Tensor:
        sleep(x)
        return x * 1


def buffers_after_a_failure(places: Places) -> None:
    """After a step has raised, the caller reads buffers with all writes of launched work."""
    for _ in range(5):
        norm = nn.BatchNorm1d(64).double()
        model = nn.Sequential(SlowForward(), norm, FailingLayer())
        pipe = piped(places, balance=[2, 1], executor="threads")(model)
        try:
            pipe(floats(0, 32, 64).to(places[0]))
        except ArithmeticError:
            pass
        else:
            raise AssertionError("the error of the layer did not arrive")
        first = norm.running_mean.clone()
        synchronize(places)
        assert torch.equal(first, norm.running_mean), "statistics changed after the step had raised"


# -- 15: the sanitizer, tied parameters -----------------------------------------------------------------------------


def device_tests_under_the_sanitizer(places: Places) -> None:
    """PyTorch's CUDA sanitizer finds no race in the tests of stage devices."""
    if places[0] == "cpu":
        raise Skipped("the sanitizer watches a GPU")
    for package in ("pytest", "pytest_timeout", "hypothesis", "beartype"):
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"the tests need {package}")
    argv = ["-m", "pytest", "-q", "-m", "cuda", "-x", "-p", "no:cacheprovider", "tests/pipeline/test_device.py"]
    argv += ["-k", "gradients_on_cuda or share or streams_of_its_own"]  # slow, and fails for sparse tensors
    outcome = run_job(argv, 80.0, TORCH_CUDA_SANITIZER="1")
    print(outcome.output[-4000:])
    assert outcome.code == 0, f"pytest ended with {outcome.code}"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.head = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(ids))))


def tied_weights_of_a_split_model(places: Places) -> None:
    """A weight that two stages share is copied and its gradient summed, for ten steps of an optimizer."""

    def draw(step: int) -> Tensor:
        return torch.randint(40, (12, 6), generator=torch.Generator().manual_seed(step))

    for executor in ("threads", "serial"):
        wrap = piped(places, split=["head"], executor=executor)
        assert_trains_as_on_the_cpu(Tied, places[0], wrap, draw, steps=10)


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        device_tests_under_the_sanitizer,  # long ones first, because several checks run at a time
        two_recorded_networks,
        pipe_of_recorded_networks,
        plans_with_tf32,
        recorded_network_shared_by_threads,
        gradients_without_stream_warnings,
        split_before_cuda_starts,
        strided_gradients_arrive,
        tensor_kept_by_a_layer,
        pipe_with_tf32,
        sparse_gradients,
        graph_over_places,
        recorded_steps_have_the_bits_of_ordinary_ones,
        memory_does_not_grow_with_micro_batches,
        caller_on_own_stream,
        buffers_shared_by_stages,
        buffers_after_a_failure,
        tied_weights_of_a_split_model,
    )
}


def main(name: str, first: str, second: str) -> int:
    """Run one check; return the exit code of its process."""
    begun = time.perf_counter()
    try:
        CHECKS[name]((first, second))
        synchronize((first, second))  # raises asynchronous errors of this check
    except Skipped as reason:
        print(reason)
        return SKIPPED
    print(f"holds, after {time.perf_counter() - begun:.1f} s; torch {torch.__version__}, {ROOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
