"""Gradients and their absence are those of plain PyTorch, in every mode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.pipeline.pipe_cases import (
    CHECKPOINTS,
    CUTS,
    EXECUTORS,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    every_run,
    piped,
    rows,
    runs,
)


@every_run
def test_gradients_accumulate_over_steps(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    for step in range(4):
        for model in (pipe, plain):
            backward(model, rows(5 + step, 4, seed=step))
    assert_gradients_equal(pipe, plain)


@pytest.mark.parametrize("to_none", [True, False])
@every_run
def test_zero_grad_starts_anew_and_old_gradients_stay_as_they_were(
    executor: str, checkpoint: str, to_none: bool
) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    backward(pipe, rows(7, 4, seed=1))
    kept = [each.grad for each in pipe.parameters()]
    copies = [each.clone() for each in kept]
    pipe.zero_grad(set_to_none=to_none)
    backward(pipe, rows(7, 4, seed=2))
    backward(plain, rows(7, 4, seed=2))
    assert_gradients_equal(pipe, plain)
    if to_none:
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@every_run
def test_training_with_an_optimizer_equals_plain_training(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    for model in (pipe, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            backward(model, rows(7, 4, seed=step))
            optimizer.step()
    for seen, wanted in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert_close(seen, wanted, 1e-10)


@every_run
def test_parameters_may_be_frozen_and_thawed_between_steps(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 5, 3), balance=[3, 2], executor=executor, checkpoint=checkpoint)
    for frozen in ([0], [2, 4], [], [0, 2], [0, 2, 4]):
        for model in (pipe, plain):
            model.zero_grad()
            for index in (0, 2, 4):
                model[index].requires_grad_(index not in frozen)
            output = model(rows(7, 4))
            assert output.requires_grad == (len(frozen) < 3)
            if output.requires_grad:
                output.square().sum().backward()
        assert_gradients_equal(pipe, plain)


@pytest.mark.parametrize(("executor", "checkpoint"), [*runs(*CUTS, "auto"), ("graph", "never")])
@pytest.mark.parametrize("schedule", ["gpipe", "0F0,0F1,0F2,0I0,0W0,0I1,0I2,0W1,0W2\n1F0,1F1,1F2,1I0,1W0,1B1,1B2\n"])
@pytest.mark.parametrize("frozen", ["0", "2.weight", ""])
def test_parameters_may_be_frozen_between_forward_and_backward(
    executor: str, checkpoint: str, schedule: str, frozen: str
) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint, schedule=schedule)
    for model in (pipe, plain):
        loss = model(rows(7, 4)).square().sum()
        for name, each in model.named_parameters():
            each.requires_grad_(not name.startswith(frozen))
        loss.backward()
    assert_gradients_equal(pipe, plain)


@every_run
@pytest.mark.parametrize("frozen", [[0, 1, 2], [3, 4]])
def test_a_whole_stage_may_be_frozen(executor: str, checkpoint: str, frozen: list[int]) -> None:
    pipe, plain = piped(chain(4, 5, 5, 3), balance=[3, 2], executor=executor, checkpoint=checkpoint)
    for model in (pipe, plain):
        for index in frozen:
            model[index].requires_grad_(False)
        x = rows(7, 4).requires_grad_()
        backward(model, x)
        assert x.grad is not None
    assert_gradients_equal(pipe, plain)


@every_run
@pytest.mark.parametrize("leaf", [True, False])
def test_the_input_gets_its_gradient_if_it_wants_one(executor: str, checkpoint: str, leaf: bool) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    found = []
    for model in (pipe, plain):
        x = rows(7, 4).requires_grad_()
        backward(model, x if leaf else x * 2)
        found.append(x.grad)
    assert_close(*found)
    assert_gradients_equal(pipe, plain)
    unwanted = rows(7, 4)
    backward(pipe, unwanted)
    assert unwanted.grad is None


class Partial(nn.Module):
    """Has more than it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4).double()
        self.idle = nn.Linear(4, 4).double()

    def forward(self, x):
        return self.used(x)


@every_run
def test_unused_parameters_get_none(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(nn.Sequential(Partial(), nn.Tanh(), Partial()), executor=executor, checkpoint=checkpoint)
    for model in (pipe, plain):
        backward(model, rows(7, 4))
    assert pipe[0].idle.weight.grad is None
    assert_gradients_equal(pipe, plain)


class SomeRows(nn.Module):
    """Uses its weight in the micro-batch that has a positive first number only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight if x[0, 0] > 0 else x * 2


@every_run
def test_a_parameter_that_only_some_micro_batches_use_gets_their_gradient(executor: str, checkpoint: str) -> None:
    pipe, _ = piped(nn.Sequential(SomeRows(), SomeRows()), executor=executor, checkpoint=checkpoint, chunks=2)
    x = torch.ones(4, 4, dtype=torch.float64)
    x[2:] = -1
    pipe(x).sum().backward()
    for layer in pipe:
        assert torch.equal(layer.weight.grad, torch.full((4,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
def test_sparse_embedding_gradients_stay_sparse(executor: str, checkpoint: str) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(10, 4, sparse=True).double(), nn.Tanh(), nn.Linear(4, 2).double())

    pipe, plain = piped(model(), executor=executor, checkpoint=checkpoint, balance=[2, 1])
    words = torch.tensor([[1, 2], [2, 3], [9, 9], [0, 1], [1, 1]])
    for _ in range(2):
        for each in (pipe, plain):
            backward(each, words)
    assert pipe[0].weight.grad.is_sparse
    assert_close(pipe[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())
    assert_close(pipe[2].weight.grad, plain[2].weight.grad)


@every_run
def test_complex_tensors_cross_the_cuts(executor: str, checkpoint: str) -> None:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor([0.3 + 0.4j, 1 - 1j], dtype=torch.complex128))

        def forward(self, x):
            return x * self.by + x.conj()

    pipe, plain = piped(nn.Sequential(Turn(), Turn()), executor=executor, checkpoint=checkpoint)
    found = []
    for model in (pipe, plain):
        z = torch.complex(rows(5, 2), rows(5, 2, seed=1)).requires_grad_()
        model(z).abs().sum().backward()
        found.append(z.grad)
    assert_close(*found)
    assert_gradients_equal(pipe, plain)


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    chunks=st.integers(1, 5),
    executor=st.sampled_from(EXECUTORS),
    checkpoint=st.sampled_from(CHECKPOINTS),
)
def test_the_batch_size_may_change_from_step_to_step(
    counts: list[int], chunks: int, executor: str, checkpoint: str
) -> None:
    pipe, plain = piped(chain(3, 4, 2), chunks=chunks, executor=executor, checkpoint=checkpoint)
    for count in counts:
        for model in (pipe, plain):
            assert len(backward(model, rows(count, 3, seed=count))) == count
    assert_gradients_equal(pipe, plain)


@every_run
def test_a_mini_batch_without_rows_gives_an_output_without_rows(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    for model in (pipe, plain):
        assert backward(model, rows(0, 4)).shape == (0, 3)
    assert_gradients_equal(pipe, plain)
