"""Modes of PyTorch mean the same inside and outside a Pipe."""

import re
import shutil

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tests.pipeline.pipe_cases import (
    CHECKPOINTS,
    EXECUTORS,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    every_run,
    piped,
    rows,
)
from torchweft import Pipe
from torchweft.pipeline.microbatch import split


class Spy(nn.Module):
    """Records the modes around every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x):
        self.seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), x.requires_grad))
        return x * 2


@every_run
def test_under_no_grad_nothing_is_recorded(executor: str, checkpoint: str) -> None:
    spy = Spy()
    model = nn.Sequential(*chain(4, 5, 3), spy)
    pipe, _ = piped(model, executor=executor, checkpoint=checkpoint)
    for _ in range(2):
        with torch.no_grad():
            output = pipe(rows(7, 4).requires_grad_())
        assert not output.requires_grad and output.grad_fn is None
    assert set(spy.seen) == {(False, False, False)}
    assert_close(output, model(rows(7, 4)))


@every_run
def test_under_inference_mode_the_output_is_an_inference_tensor(executor: str, checkpoint: str) -> None:
    spy = Spy()
    model = nn.Sequential(*chain(4, 5, 3), spy)
    pipe, _ = piped(model, executor=executor, checkpoint=checkpoint)
    for _ in range(2):
        with torch.inference_mode():
            output = pipe(rows(7, 4))
        assert output.is_inference()
    assert {inference for _, inference, _ in spy.seen} == {True}
    backward(pipe, rows(7, 4))  # training still works
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@every_run
def test_autocast_equals_plain_autocast_per_micro_batch(executor: str, checkpoint: str) -> None:
    model = chain(4, 5, 5, 3).float()
    pipe, plain = piped(model, balance=[3, 2], executor=executor, checkpoint=checkpoint)
    x = rows(7, 4).float()
    for _ in range(2):
        pipe.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = pipe(x)
        output.float().square().sum().backward()  # outside autocast, as PyTorch recommends
    expected = []
    for piece in split(x, 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected.append(plain(piece))
    torch.cat(expected).float().square().sum().backward()
    assert output.dtype == torch.bfloat16 and torch.equal(output, torch.cat(expected))
    assert_gradients_equal(pipe, plain, 1e-6)
    assert pipe(x).dtype == torch.float32, "autocast ends with its block"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_grad_forward_inside_autocast_keeps_later_gradients(executor: str) -> None:
    """The cache of autocast can hold weights that were cast without a graph."""
    pipe, _ = piped(chain(4, 5, 3).float(), executor=executor, checkpoint="always")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            pipe(rows(7, 4).float())
        output = pipe(rows(7, 4).float())
    output.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in pipe.parameters())


class Poison(nn.Module):
    """Layer whose backward computes 0 / 0, which is nan."""

    def forward(self, x):
        return (x * 0).sqrt()


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_anomaly_mode_finds_the_nan_and_the_note_names_the_stage(executor: str, checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Poison(), nn.Tanh()).double()
    pipe, _ = piped(model, executor=executor, checkpoint=checkpoint, balance=[2, 2])
    with torch.autograd.detect_anomaly():
        output = pipe(rows(6, 4))
        with pytest.raises(RuntimeError, match=r"MulBackward0.*nan") as caught:
            output.sum().backward()
    assert re.search(r"backward of stage 1, micro-batch \d", "\n".join(caught.value.__notes__))


@every_run
def test_operators_can_be_counted_backward_too(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 6, 6, 3), executor=executor, checkpoint=checkpoint)
    counted: list[int] = []
    for model in (pipe, plain):
        x = rows(7, 4).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            backward(model, x)
        counted.append(counter.get_total_flops())
    assert_gradients_equal(pipe, plain)
    if checkpoint == "never":
        assert counted[0] == counted[1]


class LinearCounter(TorchFunctionMode):
    """Mode that counts the calls of `linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.nn.functional.linear
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_modes_and_hooks_of_the_caller_see_every_step_alike(executor: str) -> None:
    """This includes steps that would otherwise use workers or be measured."""
    pipe, plain = piped(chain(4, 6, 6, 3), executor=executor)
    x, counts = rows(7, 4), list[tuple[int, int, int]]()
    for model in (*[pipe] * 14, plain):
        saved: list[None] = []

        def pack(tensor, saved=saved):
            saved.append(None)
            return tensor

        with FlopCounterMode(display=False) as counter, LinearCounter() as linears:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(x).sum()
            loss.backward()
        counts.append((counter.get_total_flops(), linears.calls, len(saved)))
    *steps, (flops, calls, tensors) = counts
    assert set(steps) == {(flops, 3 * calls, 3 * tensors)}
    for _ in range(2):  # backward alone
        loss = pipe(x).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        assert 0 < counter.get_total_flops() < flops
    with torch.device("cpu"):  # the mode is passed to the workers
        pipe(x)
    assert not pipe.statistics()["chosen"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_compiled_layers_run_inside_a_pipe(executor: str, checkpoint: str) -> None:
    """The layers are traced with their derivatives, but without code generation, which needs a compiler."""
    model = chain(4, 5, 3)
    pipe, plain = piped(model, balance=[2, 1], executor=executor, checkpoint=checkpoint)
    torch._dynamo.reset()
    layers = [torch.compile(layer, backend="aot_eager") for layer in pipe]
    compiled, _ = piped(nn.Sequential(*layers), balance=[2, 1], executor=executor, checkpoint=checkpoint)
    for _ in range(2):
        backward(compiled, rows(6, 4))
        backward(plain, rows(6, 4))
    for seen, expected in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert_close(seen.grad, expected.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")
def test_layers_compiled_to_machine_code_run_in_worker_threads() -> None:
    torch._dynamo.reset()
    pipe, plain = piped(chain(4, 5, 3), balance=[2, 1], executor="threads", checkpoint=["always", "never"])
    pipe[1].compile()
    assert_alike(pipe, plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own, in 2.15
def test_layers_may_be_compiled_in_place() -> None:
    torch._dynamo.reset()
    pipe, plain = piped(chain(4, 5, 3), executor="threads")
    for layer in pipe:
        layer.compile(backend="eager")
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert_alike(pipe, plain)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_gradient_of_a_gradient_is_refused_with_advice(executor: str) -> None:
    pipe, _ = piped(chain(4, 5, 3), executor=executor)
    x = rows(6, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="executor='graph'"):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_graph_executor_has_gradients_of_gradients(checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor="graph", checkpoint=checkpoint)
    for model in (pipe, plain):
        x = rows(6, 4).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
    assert_gradients_equal(pipe, plain, 1e-10)


@every_run
def test_backward_runs_twice_only_with_retain_graph(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    for model in (pipe, plain):
        loss = model(rows(7, 4)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()
    assert_gradients_equal(pipe, plain)


@every_run
def test_autograd_grad_of_some_parameters_works(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 5, 3), balance=[3, 2], executor=executor, checkpoint=checkpoint)
    gradients = [
        torch.autograd.grad(model(rows(7, 4)).square().sum(), [model[2].weight, model[4].bias])
        for model in (pipe, plain)
    ]
    for seen, expected in zip(*gradients, strict=True):
        assert_close(seen, expected)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_functional_call_replaces_parameters_for_one_step() -> None:
    pipe, plain = piped(chain(4, 5, 3), executor="serial")
    fresh = {name: torch.ones_like(parameter) for name, parameter in pipe.named_parameters()}
    seen = torch.func.functional_call(pipe, fresh, (rows(6, 4),))
    assert_close(seen, torch.func.functional_call(plain, fresh, (rows(6, 4),)))
    assert isinstance(pipe, Pipe) and pipe[0].weight is not fresh["0.weight"]
