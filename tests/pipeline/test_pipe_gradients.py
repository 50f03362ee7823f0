"""Gradients and their absence are those of plain PyTorch, in every mode."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.pipeline.pipe_cases import (
    CHECKPOINTS,
    CUTS,
    EXECUTORS,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    every_run,
    piped,
    rows,
    runs,
)


@pytest.mark.parametrize("to_none", [True, False])
@every_run
def test_training_equals_plain_and_keeps_old_gradients(executor: str, checkpoint: str, to_none: bool) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (pipe, plain)]
    for step in range(5):
        kept = [parameter.grad for parameter in pipe.parameters()]
        copies = [None if gradient is None else gradient.clone() for gradient in kept]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        assert_alike(pipe, plain, lambda model, step=step: backward(model, rows(7, 4, seed=step)))
        if to_none:
            assert all(a is None or (b is not None and torch.equal(a, b)) for a, b in zip(kept, copies, strict=True))
        for optimizer in optimizers:
            optimizer.step()
    assert_close(list(pipe.parameters()), list(plain.parameters()), 1e-10)


@every_run
def test_parameters_may_be_frozen_and_thawed_between_steps(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 5, 3), balance=[3, 2], executor=executor, checkpoint=checkpoint)
    for frozen, tracked in product(([0], [2, 4], [4], [], [0, 2], [0, 2, 4]), (False, True)):

        def step(model: nn.Module, frozen: list[int] = frozen, tracked: bool = tracked) -> Tensor | None:
            model.zero_grad()
            for index in (0, 2, 4):
                model[index].requires_grad_(index not in frozen)
            x = rows(7, 4).requires_grad_(tracked)
            output = model(x)
            assert output.requires_grad == (tracked or len(frozen) < 3)
            if output.requires_grad:
                output.square().sum().backward()
            return x.grad

        assert_alike(pipe, plain, step)


@pytest.mark.parametrize(("executor", "checkpoint"), [*runs(*CUTS, "auto"), ("graph", "never")])
@pytest.mark.parametrize("schedule", ["gpipe", "0F0,0F1,0F2,0I0,0W0,0I1,0I2,0W1,0W2\n1F0,1F1,1F2,1I0,1W0,1B1,1B2\n"])
@pytest.mark.parametrize("frozen", ["0", "2.weight", ""])
def test_parameters_may_be_frozen_between_forward_and_backward(
    executor: str, checkpoint: str, schedule: str, frozen: str
) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint, schedule=schedule)
    for model in (pipe, plain):
        loss = model(rows(7, 4)).square().sum()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        loss.backward()
    assert_gradients_equal(pipe, plain)


class SomeRows(nn.Module):
    """Uses its weight only in a micro-batch whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight if x[0, 0] > 0 else x * 2


@every_run
def test_parameter_of_some_micro_batches_gets_their_gradient(executor: str, checkpoint: str) -> None:
    pipe, _ = piped(nn.Sequential(SomeRows(), SomeRows()), executor=executor, checkpoint=checkpoint, chunks=2)
    x = torch.ones(4, 4, dtype=torch.float64)
    x[2:] = -1
    pipe(x).sum().backward()
    for layer in pipe:
        assert torch.equal(layer.weight.grad, torch.full((4,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("executor", CUTS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
def test_sparse_embedding_gradients_stay_sparse(executor: str, checkpoint: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True).double(), nn.Tanh(), nn.Linear(4, 2).double())
    pipe, plain = piped(model, executor=executor, checkpoint=checkpoint, balance=[2, 1])
    words = torch.tensor([[1, 2], [2, 3], [9, 9], [0, 1], [1, 1]])
    for _ in range(2):
        for model in (pipe, plain):
            backward(model, words)
    assert pipe[0].weight.grad.is_sparse
    assert_close(pipe[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())
    assert_close(pipe[2].weight.grad, plain[2].weight.grad)


class Turn(nn.Module):
    """Multiplies by a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor([0.3 + 0.4j, 1 - 1j], dtype=torch.complex128))

    def forward(self, x):
        return x * self.by + x.conj()


@every_run
def test_complex_tensors_cross_the_cuts(executor: str, checkpoint: str) -> None:
    def step(model: nn.Module) -> Tensor | None:
        z = torch.complex(rows(5, 2), rows(5, 2, seed=1)).requires_grad_()
        model(z).abs().sum().backward()
        return z.grad

    assert_alike(*piped(nn.Sequential(Turn(), Turn()), executor=executor, checkpoint=checkpoint), step)


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    chunks=st.integers(1, 5),
    executor=st.sampled_from([*EXECUTORS, "auto"]),
    checkpoint=st.sampled_from(CHECKPOINTS),
)
def test_the_batch_size_may_change_from_step_to_step_and_be_zero(
    counts: list[int], chunks: int, executor: str, checkpoint: str
) -> None:
    pipe, plain = piped(chain(3, 4, 2), chunks=chunks, executor=executor, checkpoint=checkpoint)
    for count in counts:
        assert_alike(pipe, plain, lambda model, count=count: backward(model, rows(count, 3, seed=count)))
