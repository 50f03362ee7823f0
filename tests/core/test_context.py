"""The execution context of a call reaches every worker, and is restored when a stage is recomputed."""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torchweft import Pipe
from torchweft.core.context import ExecutionContext, ProcessFlags, is_checkpointing, is_recomputing, set_phase
from torchweft.core.segment import Keep, MicroBatchContext, Segment
from torchweft.pipeline.executor import SerialExecutor, ThreadExecutor
from torchweft.pipeline.routing import OUTSIDE, Address, Message, Route, Wiring
from torchweft.pipeline.schedule import Schedule, gpipe
from torchweft.pipeline.step import StepState

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")
every_executor = pytest.mark.parametrize("executor_name", ["serial", "threads", "graph"])


@pytest.fixture(params=["serial", "threads"])
def executor(request: pytest.FixtureRequest) -> Iterator[SerialExecutor | ThreadExecutor]:
    if request.param == "serial":
        yield SerialExecutor()
        return
    threads = ThreadExecutor("ambient")
    yield threads
    threads.close()


def observe(executor: Any, look: Callable[[], Any], keep: Keep = "graph") -> dict[str, list[Any]]:
    """The results of `look` in every forward of two stages: first in this thread, then recomputed in a new thread."""
    ambient = ExecutionContext.capture(["cpu"])
    observed: dict[str, list[Any]] = {"first": [], "again": []}

    def function(context: MicroBatchContext, x: torch.Tensor) -> tuple[torch.Tensor]:
        observed["again" if is_recomputing() else "first"].append(look())
        return (x * 2,)

    routes = (Route("x", OUTSIDE, (0,)), Route("m", 0, (1,)), Route("y", 1, (OUTSIDE,)))
    segments = {0: Segment(function), 1: Segment(function)}
    contexts = [MicroBatchContext(i, ambient) for i in range(2)]
    run = StepState(Wiring(routes, 2), segments, contexts, [[keep] * 2] * 2, [None, None])

    def walk(schedule: Schedule, messages: Any) -> None:
        executor.walk(schedule, run.perform, messages, ambient)

    inputs = {Address(0, 0, i): Message(torch.ones(1, requires_grad=True)) for i in range(2)}
    walk(gpipe(2, 2).forward_only, {0: inputs})
    if keep == "inputs":
        gradients = {1: {Address(2, OUTSIDE, i): Message([torch.ones(1)]) for i in range(2)}}
        outside = threading.Thread(target=walk, args=(gpipe(2, 2).backward_only, gradients))
        outside.start()  # without the context of the caller
        outside.join(10)
        assert len(observed["again"]) == 4
    assert len(observed["first"]) == 4
    return observed


@contextmanager
def colored() -> Iterator[None]:
    token = color.set("blue")
    yield
    color.reset(token)


def product_dtype() -> torch.dtype:
    """The dtype of a product, which autocast changes."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("around", "look", "inside", "outside", "keep"),
    [
        (colored, color.get, "blue", "none", "inputs"),
        (lambda: torch.autocast("cpu", torch.bfloat16), product_dtype, torch.bfloat16, torch.float32, "inputs"),
        (torch.inference_mode, torch.is_inference_mode_enabled, True, False, "nothing"),
    ],
    ids=["context variable", "autocast", "inference mode"],
)
def test_context_reaches_workers_and_recomputations(
    executor: Any, around: Any, look: Any, inside: Any, outside: Any, keep: Keep
) -> None:
    with around():
        observed = observe(executor, look, keep)
    assert observed == {"first": [inside] * 4, "again": [inside] * (4 if keep == "inputs" else 0)}
    assert observe(executor, look)["first"] == [outside] * 4, "workers keep no context between calls"


def test_default_device_reaches_workers(executor: Any) -> None:
    with torch.device("meta"):
        ambient = ExecutionContext.capture(["cpu"])
    assert ambient.default_device == torch.device("meta")
    devices: list[str] = []
    executor.walk(gpipe(2, 1), lambda action, box, post: devices.append(torch.ones(1).device.type), {}, ambient)
    assert devices == ["meta"] * 4
    assert torch.ones(1).device.type == "cpu"


def test_process_flags_in_backward_are_those_of_forward() -> None:
    """The flags of the caller are restored afterwards, even after an error."""
    before = ProcessFlags.capture()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    of_forward = ProcessFlags.capture()
    ambient = ExecutionContext.capture(["cpu"])
    before.establish()
    assert of_forward != before
    with pytest.raises(KeyError), ambient.process_flags():
        assert ProcessFlags.capture() == of_forward
        raise KeyError
    assert ProcessFlags.capture() == before
    with ExecutionContext.capture(["cpu"]).process_flags():
        assert ProcessFlags.capture() == before


def set_precision(backend: Any, precision: str) -> None:
    """Set a precision by PyTorch's newer interface."""
    backend.fp32_precision = precision


BACKENDS: Any = torch.backends
PRECISIONS: dict[str, Callable[[], None]] = {
    "default": lambda: None,
    "older": lambda: torch.set_float32_matmul_precision("high"),
    "matmul": lambda: set_precision(BACKENDS.cuda.matmul, "tf32"),
    "all": lambda: set_precision(BACKENDS, "tf32"),
    "one of cudnn": lambda: set_precision(BACKENDS.cudnn.conv, "ieee"),
    "both interfaces": lambda: (
        torch.set_float32_matmul_precision("medium"),
        set_precision(BACKENDS.cuda.matmul, "ieee"),
    )[1],
}


@pytest.fixture
def restored_precision() -> Iterator[None]:
    before = ProcessFlags.capture()
    yield
    before.establish()


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("in_backward", PRECISIONS)
@pytest.mark.parametrize("in_forward", PRECISIONS)
def test_float32_precision_survives_both_interfaces(in_backward: str, in_forward: str) -> None:
    """Forward and backward keep exactly their own settings, whichever interface set them."""
    start = ProcessFlags.capture()
    PRECISIONS[in_forward]()
    forward = ExecutionContext.capture(["cpu"])
    start.establish()
    assert ProcessFlags.capture().precisions == start.precisions
    PRECISIONS[in_backward]()
    before = ProcessFlags.capture()
    with forward.process_flags():
        assert ProcessFlags.capture().precisions == forward.flags.precisions
        assert forward.flags.older in (None, ProcessFlags.capture().older)
    assert ProcessFlags.capture().precisions == before.precisions


@pytest.mark.usefixtures("restored_precision")
def test_inherited_precision_stays_inherited() -> None:
    """Settings that already match are not written, so that they still follow the general setting."""
    BACKENDS.fp32_precision = "tf32"
    with_tf32 = ExecutionContext.capture(["cpu"])
    BACKENDS.fp32_precision = "none"
    with with_tf32.process_flags():
        assert BACKENDS.mkldnn.matmul.fp32_precision == "tf32"
    BACKENDS.fp32_precision = "ieee"
    assert BACKENDS.mkldnn.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_pipe_runs_with_tf32_by_the_newer_interface(checkpoint: Any) -> None:
    """The older interface raises when it reads a precision that the newer one has set."""
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    pipe = Pipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), chunks=2, devices=["cpu"], checkpoint=checkpoint)
    pipe(torch.ones(4, 2)).sum().backward()


def test_phase_belongs_to_a_thread() -> None:
    """The phase is restored after an error."""
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((is_checkpointing(), is_recomputing()))

    with pytest.raises(KeyError), set_phase("checkpointing"):
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
        with set_phase("recomputing"):
            look()
        look()
        raise KeyError
    look()
    assert seen == [(True, False), (False, False), (False, True), (True, False), (False, False)]


class FlagReader(torch.nn.Module):
    """Records process-wide flags in every forward."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.read = read
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.read())
        return x.sin()


def read_flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@every_executor
def test_recomputation_has_the_flags_of_its_forward(executor_name: Any, checkpoint: Any) -> None:
    layers = [FlagReader(read_flags) for _ in range(2)]
    options = {"checkpoint": checkpoint, "executor": executor_name}
    pipe = Pipe(torch.nn.Sequential(*layers), chunks=2, devices=["cpu"] * 2, **options)
    before = ProcessFlags.capture()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True):
            y = pipe(torch.ones(2, 1, requires_grad=True))
    finally:
        torch.use_deterministic_algorithms(False)
    y.sum().backward()
    assert [layer.seen for layer in layers] == [[(True, False, True, True)] * (4 if checkpoint == "always" else 2)] * 2
    assert ProcessFlags.capture() == before


class Attention(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


def attention_gradient(executor_name: Any, checkpoint: Any, x: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    """The gradient from a pipe with the math kernel in forward, and any kernel in backward."""
    torch.manual_seed(0)
    layers, devices = torch.nn.Sequential(Attention(dropout), Attention(dropout)), [x.device] * 2
    pipe = Pipe(layers, chunks=2, devices=devices, checkpoint=checkpoint, executor=executor_name)
    x = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        y = pipe(x)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


@every_executor
def test_recomputation_has_the_attention_kernel_of_forward(executor_name: Any) -> None:
    """Gradients are compared bit for bit, because the kernels round differently."""
    x = torch.randn(4, 2, 64, 32)
    assert torch.equal(*(attention_gradient(executor_name, checkpoint, x) for checkpoint in ("never", "always")))
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.cuda
@pytest.mark.parametrize("executor_name", ["serial", "threads"])
def test_recomputed_attention_has_the_dropout_of_forward(executor_name: Any) -> None:
    """Another kernel would draw another mask from the same seed."""
    x = torch.randn(4, 2, 64, 32, device="cuda:0")
    kept, again = (attention_gradient(executor_name, mode, x, dropout=0.5) for mode in ("never", "always"))
    torch.testing.assert_close(again, kept, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("executor_name", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_autocast_around_backward_alone_changes_nothing(executor_name: Any, checkpoint: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = Pipe(model, chunks=2, devices=["cpu", "cpu"], executor=executor_name, checkpoint=checkpoint)
    x = torch.randn(4, 4)
    loss = pipe(x).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])
