"""What surrounds a call reaches every worker, and is found again when a stage is recomputed."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from weft import Pipe
from weft.core.context import ExecutionContext, ProcessFlags, is_checkpointing, is_recomputing, phase
from weft.core.segment import Keep, MicroBatchContext, Segment
from weft.pipeline.executor import SerialExecutor, ThreadExecutor
from weft.pipeline.routing import OUTSIDE, Address, Message, Route, Wiring
from weft.pipeline.schedule import Schedule, gpipe
from weft.pipeline.step import StepState

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


@pytest.fixture(params=["serial", "threads"])
def executor(request: pytest.FixtureRequest) -> Iterator[SerialExecutor | ThreadExecutor]:
    if request.param == "serial":
        yield SerialExecutor()
        return
    threads = ThreadExecutor("ambient")
    yield threads
    threads.close()


def seen_by(executor: Any, look: Callable[[], Any], keep: Keep = "graph") -> dict[str, list[Any]]:
    """What `look` returns inside every forward of two stages: called here, and going back outside of it."""
    ambient = ExecutionContext.capture(["cpu"])
    found: dict[str, list[Any]] = {"first": [], "again": []}

    def function(context: MicroBatchContext, x: torch.Tensor) -> tuple[torch.Tensor]:
        found["again" if is_recomputing() else "first"].append(look())
        return (x * 2,)

    routes = (Route("x", OUTSIDE, (0,)), Route("m", 0, (1,)), Route("y", 1, (OUTSIDE,)))
    segments = {0: Segment(function), 1: Segment(function)}
    contexts = [MicroBatchContext(i, ambient) for i in range(2)]
    run = StepState(Wiring(routes, 2), segments, contexts, [[keep] * 2] * 2, [None, None])
    given = {0: {Address(0, 0, i): Message(torch.ones(1, requires_grad=True)) for i in range(2)}}

    def walk(schedule: Schedule, given: Any) -> None:
        executor.walk(schedule, run.perform, given, ambient)

    walk(gpipe(2, 2).forward_only, given)
    if keep == "inputs":
        back = {1: {Address(2, OUTSIDE, i): Message([torch.ones(1)]) for i in range(2)}}
        outside = threading.Thread(target=walk, args=(gpipe(2, 2).backward_only, back))
        outside.start()  # a new thread knows nothing of the user's surroundings
        outside.join(10)
        assert len(found["again"]) == 4
    assert len(found["first"]) == 4
    return found


@contextmanager
def colored() -> Iterator[None]:
    """A context variable that is set."""
    token = color.set("blue")
    yield
    color.reset(token)


def product() -> torch.dtype:
    """The type of a product, which autocast changes."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("around", "look", "inside", "outside", "keep"),
    [
        (colored, color.get, "blue", "none", "inputs"),
        (lambda: torch.autocast("cpu", torch.bfloat16), product, torch.bfloat16, torch.float32, "inputs"),
        (torch.inference_mode, torch.is_inference_mode_enabled, True, False, "nothing"),
    ],
    ids=["context variable", "autocast", "inference mode"],
)
def test_what_is_around_a_call_reaches_every_worker_and_a_recomputation(
    executor: Any, around: Any, look: Any, inside: Any, outside: Any, keep: Keep
) -> None:
    with around():
        found = seen_by(executor, look, keep)
    assert found == {"first": [inside] * 4, "again": [inside] * (4 if keep == "inputs" else 0)}
    assert seen_by(executor, look)["first"] == [outside] * 4, "a worker remembers nothing"


def test_the_default_device_reaches_every_worker_and_a_recomputation(executor: Any) -> None:
    with torch.device("meta"):
        ambient = ExecutionContext.capture(["cpu"])
    assert ambient.default_device == torch.device("meta")
    devices: list[str] = []
    executor.walk(gpipe(2, 1), lambda action, box, post: devices.append(torch.ones(1).device.type), {}, ambient)
    assert devices == ["meta"] * 4
    assert torch.ones(1).device.type == "cpu"


def test_the_flags_of_the_process_are_those_of_forward_while_going_back() -> None:
    before = ProcessFlags.capture()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    wanted = ProcessFlags.capture()
    ambient = ExecutionContext.capture(["cpu"])
    before.establish()
    assert wanted != before
    with pytest.raises(KeyError), ambient.process_flags():
        assert ProcessFlags.capture() == wanted
        raise KeyError
    assert ProcessFlags.capture() == before, "also after an error"
    with ExecutionContext.capture(["cpu"]).process_flags():
        assert ProcessFlags.capture() == before


def older(name: str) -> None:
    torch.set_float32_matmul_precision(name)


def newer(backend: Any, precision: str) -> None:
    backend.fp32_precision = precision


BACKENDS: Any = torch.backends
PRECISIONS: dict[str, Callable[[], None]] = {
    "default": lambda: None,
    "older": lambda: older("high"),
    "matmul": lambda: newer(BACKENDS.cuda.matmul, "tf32"),
    "all": lambda: newer(BACKENDS, "tf32"),
    "one of cudnn": lambda: newer(BACKENDS.cudnn.conv, "ieee"),
    "both interfaces": lambda: (older("medium"), newer(BACKENDS.cuda.matmul, "ieee"))[1],
}


@pytest.fixture
def restored_precision() -> Iterator[None]:
    before = ProcessFlags.capture()
    yield
    before.establish()


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("here", PRECISIONS)
@pytest.mark.parametrize("there", PRECISIONS)
def test_float32_precision_survives_both_interfaces(here: str, there: str) -> None:
    """Whichever interface set the precision in forward and around backward: each has its own settings, exactly."""
    start = ProcessFlags.capture()
    PRECISIONS[there]()
    forward = ExecutionContext.capture(["cpu"])
    start.establish()
    assert ProcessFlags.capture().precisions == start.precisions
    PRECISIONS[here]()
    before = ProcessFlags.capture()
    with forward.process_flags():
        assert ProcessFlags.capture().precisions == forward.flags.precisions
        assert forward.flags.older in (None, ProcessFlags.capture().older)
    assert ProcessFlags.capture().precisions == before.precisions


@pytest.mark.usefixtures("restored_precision")
def test_an_inherited_precision_stays_inherited() -> None:
    """Establishing flags writes no setting that reads right already, so the general setting still governs it."""
    BACKENDS.fp32_precision = "tf32"
    with_tf32 = ExecutionContext.capture(["cpu"])
    BACKENDS.fp32_precision = "none"
    with with_tf32.process_flags():
        assert BACKENDS.mkldnn.matmul.fp32_precision == "tf32"
    BACKENDS.fp32_precision = "ieee"
    assert BACKENDS.mkldnn.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_pipe_runs_with_tf32_by_the_newer_interface(checkpoint: Any) -> None:
    """The older interface raises when it is asked for a precision that the newer one has set."""
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    pipe = Pipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), chunks=2, devices=["cpu"], checkpoint=checkpoint)
    pipe(torch.ones(4, 2)).sum().backward()


def test_the_phase_belongs_to_a_thread_and_is_restored_on_error() -> None:
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((is_checkpointing(), is_recomputing()))

    with pytest.raises(KeyError), phase("checkpointing"):
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
        with phase("recomputing"):
            look()
        look()
        raise KeyError
    look()
    assert seen == [(True, False), (False, False), (False, True), (True, False), (False, False)]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("who", ["serial", "threads", "graph"])
def test_a_recomputation_has_the_deterministic_flag_of_its_forward(who: Any, checkpoint: Any) -> None:
    flags: list[bool] = []

    class Looking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flags.append(torch.are_deterministic_algorithms_enabled())
            return x.sin()

    pipe = Pipe(
        torch.nn.Sequential(Looking(), Looking()), chunks=2, devices=["cpu"] * 2, checkpoint=checkpoint, executor=who
    )
    x = torch.ones(2, 1, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        y = pipe(x)
    finally:
        torch.use_deterministic_algorithms(False)
    y.sum().backward()
    assert flags == [True] * (8 if checkpoint == "always" else 4)
    assert not torch.are_deterministic_algorithms_enabled()


class Attention(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


def attention_gradient(who: Any, checkpoint: Any, x: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    """Of a pipe with the plain kernel in forward, and any in backward."""
    torch.manual_seed(0)
    layers, devices = torch.nn.Sequential(Attention(dropout), Attention(dropout)), [x.device] * 2
    pipe = Pipe(layers, chunks=2, devices=devices, checkpoint=checkpoint, executor=who)
    x = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        y = pipe(x)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("who", ["serial", "threads", "graph"])
def test_a_recomputation_has_the_attention_kernel_of_forward(who: Any) -> None:
    """Bit for bit, because the kernels round differently."""
    x = torch.randn(4, 2, 64, 32)
    assert torch.equal(*(attention_gradient(who, checkpoint, x) for checkpoint in ("never", "always")))
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.cuda
@pytest.mark.parametrize("who", ["serial", "threads"])
def test_a_recomputed_attention_has_the_dropout_of_forward(who: Any) -> None:
    """Another kernel would draw another mask from the same seed."""
    x = torch.randn(4, 2, 64, 32, device="cuda:0")
    kept, again = (attention_gradient(who, checkpoint, x, dropout=0.5) for checkpoint in ("never", "always"))
    torch.testing.assert_close(again, kept, rtol=1e-3, atol=1e-3)


def test_a_recomputation_has_the_cudnn_flags_of_its_forward() -> None:
    seen: list[tuple[bool, ...]] = []

    class Looking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cudnn = torch.backends.cudnn
            seen.append((cudnn.enabled, cudnn.benchmark, cudnn.deterministic))
            return x.sin()

    pipe = Pipe(torch.nn.Sequential(Looking()), chunks=2, devices=["cpu"], checkpoint="always", executor="serial")
    before = ProcessFlags.capture()
    with torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True):
        y = pipe(torch.ones(2, 1, requires_grad=True))
    y.sum().backward()
    assert seen == [(False, True, True)] * 4
    assert ProcessFlags.capture() == before


@pytest.mark.parametrize("who", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_autocast_around_backward_alone_changes_nothing(who: Any, checkpoint: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = Pipe(model, chunks=2, devices=["cpu", "cpu"], executor=who, checkpoint=checkpoint)
    x = torch.randn(4, 4)
    loss = pipe(x).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, [each.grad for each in model.parameters()])
