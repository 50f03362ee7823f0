"""Hooks of parameters fire once per step, with the whole gradient. Hooks of modules fire once per micro-batch."""

import threading

import pytest
import torch
from torch import nn

import torchweft as weft
from tests.pipeline.pipe_cases import assert_alike, backward, chain, every_cut_run, every_run, piped, rows


@every_run
def test_a_hook_may_change_the_gradient(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    for model in (pipe, plain):
        model[0].weight.register_hook(lambda gradient: gradient * 10)
    assert_alike(pipe, plain)


@every_cut_run
def test_forward_hooks_of_modules_fire_per_micro_batch(executor: str, checkpoint: str) -> None:
    pipe, _ = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    seen: list[int] = []
    whole: list[int] = []
    pipe[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    pipe.register_forward_hook(lambda module, args, output: whole.append(len(output)))
    backward(pipe, rows(7, 4))
    recomputed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    assert sorted(seen[:3]) == [2, 2, 3] and len(seen) == 3 + recomputed
    assert whole == [7]


@every_run
def test_full_backward_hooks_of_modules_fire(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    seen: list[torch.Tensor] = []
    pipe[1].register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0]))
    assert_alike(pipe, plain)
    assert sorted(len(calls) for calls in seen) == [2, 2, 3]


class HalfUsed(nn.Module):
    """Has a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@every_run
def test_hooks_of_unused_parameters_do_not_fire(executor: str, checkpoint: str) -> None:
    layers = nn.Sequential(HalfUsed(), HalfUsed()).double()
    fired: list[str] = []
    for name, parameter in layers.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired.append(name))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: fired.append(name))
    pipe = weft.Pipe(layers, chunks=2, balance=[1, 1], devices=["cpu"] * 2, executor=executor, checkpoint=checkpoint)
    used = sorted(name for name, _ in layers.named_parameters() if ".used." in name)
    for _ in range(2):
        fired.clear()
        pipe(rows(4, 3)).sum().backward()
        assert sorted(fired) == sorted(used * 2)


def test_hooks_of_unused_parameters_survive_a_failed_backward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    layers = nn.Sequential(HalfUsed(), HalfUsed()).double()

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    layers[0].unused.weight.register_hook(hook)
    pipe = weft.Pipe(layers, chunks=2, balance=[1, 1], devices=["cpu"] * 2, executor="serial")
    x = rows(4, 3).requires_grad_()
    with pytest.raises(ArithmeticError):
        pipe(Broken.apply(x)).sum().backward()
    assert list(layers[0].unused.weight._backward_hooks.values()) == [hook]


def test_concurrent_pipe_fires_no_hooks_of_unused_parameters() -> None:
    layer = HalfUsed().double()
    pipe = weft.Pipe(nn.Sequential(layer), chunks=2, devices=["cpu"], executor="serial")
    other, _ = piped(chain(4, 5, 3), executor="serial")
    fired: list[str] = []

    def elsewhere(gradient: torch.Tensor) -> None:
        thread = threading.Thread(target=backward, args=(other, rows(4, 4)))
        thread.start()
        thread.join()
        with torch.enable_grad():
            layer.unused.weight.sum().backward()  # a separate backward that uses the parameter
        fired.append("used")

    layer.used.weight.register_hook(elsewhere)
    layer.unused.weight.register_hook(lambda gradient: fired.append("hook of the other backward"))
    layer.unused.bias.register_post_accumulate_grad_hook(lambda parameter: fired.append("unused"))
    backward(pipe, rows(4, 3))
    assert fired == ["hook of the other backward", "used"]


def test_hook_removed_while_muted_stays_removed() -> None:
    layer = HalfUsed().double()
    pipe = weft.Pipe(nn.Sequential(layer), chunks=2, devices=["cpu"], executor="serial")
    unused = list(layer.unused.parameters())
    handles = [parameter.register_hook(lambda gradient: gradient) for parameter in unused]
    layer.used.weight.register_hook(lambda gradient: handles[0].remove())
    backward(pipe, rows(4, 3))
    assert [len(parameter._backward_hooks or {}) for parameter in unused] == [0, 1]
