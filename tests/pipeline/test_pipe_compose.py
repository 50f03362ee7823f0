"""Steps that live at the same time, pipes inside pipes, and pipes that share layers."""

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import (
    CHECKPOINTS,
    CUTS,
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


@every_run
@pytest.mark.parametrize("first", [0, 1])
def test_two_live_steps_can_run_backward_in_any_order(executor: str, checkpoint: str, first: int) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    losses = [pipe(rows(7, 4, seed=seed)).square().sum() for seed in (1, 2)]
    losses[first].backward()
    losses[1 - first].backward()
    for seed in (1, 2):
        backward(plain, rows(7, 4, seed=seed))
    assert_gradients_equal(pipe, plain)


@every_run
def test_one_step_may_feed_the_next_of_the_same_pipe(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 4), executor=executor, checkpoint=checkpoint)
    assert_alike(pipe, plain, lambda model: backward(model, model(rows(7, 4))))


@pytest.mark.parametrize("inner", CUTS)
@pytest.mark.parametrize("outer", CUTS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_pipe_may_be_a_layer_of_a_pipe(inner: str, outer: str, checkpoint: str) -> None:
    flat = chain(4, 5, 5, 3)
    inside = Pipe(nn.Sequential(*flat[1:4]), chunks=2, devices=["cpu"] * 2, executor=inner, checkpoint=checkpoint)
    pipe = Pipe(
        nn.Sequential(flat[0], inside, flat[4]), chunks=2, devices=["cpu"] * 2, executor=outer, checkpoint=checkpoint
    )
    seen = backward(pipe, rows(7, 4))
    gradients = [parameter.grad for parameter in pipe.parameters()]
    pipe.zero_grad()
    assert_close(seen, backward(flat, rows(7, 4)))
    assert_close(gradients, [parameter.grad for parameter in flat.parameters()])


def outputs_of_drawing_pipe(
    seed: int, outer: str, inner: str, checkpoint: str, *, inside_draws: bool
) -> list[torch.Tensor]:
    """Output and gradients of a pipe that draws random numbers, with another pipe in its first stage."""
    torch.manual_seed(7)
    many = [layer for _ in range(8) for layer in (nn.Dropout(0.5), nn.Identity())]
    layers = [nn.Linear(4, 4), nn.Dropout(0.5 if inside_draws else 0.0), nn.Linear(4, 4)]
    settings = {"chunks": 4, "devices": ["cpu"] * 2, "checkpoint": checkpoint}
    inside = Pipe(nn.Sequential(*layers), executor=inner, **settings)
    inside(rows(8, 4).float())  # so that it can know that it draws nothing
    pipe = Pipe(nn.Sequential(inside, *many, nn.Linear(4, 4)), executor=outer, balance=[1, 17], **settings)
    torch.manual_seed(seed)
    for _ in range(3):
        output = backward(pipe, rows(8, 4).float())
    return [output.detach(), *(parameter.grad for parameter in pipe.parameters())]


@pytest.mark.long
@pytest.mark.parametrize("inside_draws", [True, False])
@pytest.mark.parametrize("inner", CUTS)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_draws_of_a_nested_pipe_do_not_depend_on_timing(inner: str, checkpoint: str, inside_draws: bool) -> None:
    for seed in range(5):
        expected = outputs_of_drawing_pipe(seed, "serial", "serial", "never", inside_draws=inside_draws)
        seen = outputs_of_drawing_pipe(seed, "threads", inner, checkpoint, inside_draws=inside_draws)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True)), seed


@every_run
def test_two_pipes_may_share_layers(executor: str, checkpoint: str) -> None:
    model = chain(4, 5, 5, 3)
    one = Pipe(model, chunks=2, devices=["cpu"] * 2, balance=[1, 4], executor=executor, checkpoint=checkpoint)
    two = Pipe(model, chunks=3, devices=["cpu"] * 2, balance=[3, 2], executor=executor, checkpoint=checkpoint)
    (one(rows(7, 4)) * two(rows(7, 4))).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(rows(7, 4)).square().sum().backward()
    assert_close(gradients, [parameter.grad for parameter in model.parameters()])
