"""Before the end of forward(), a row must not depend on other rows, and values must have rows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import assert_close, with_batch_norm
from tests.pipeline.split.test_losses import assert_trains_as, cut
from tests.pipeline.split.test_tail import Blocks, assert_trains
from torchweft.core.errors import BatchError

pytestmark = pytest.mark.usefixtures("double")

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0).values,
    "flip": lambda x: x.flip(0),
    "attention": lambda x: (x @ x.T).softmax(-1) @ x,
    "mean": lambda x: x - x.mean(0),
    "norm": lambda x: (x - x.mean(0)) / x.std(0),
    "number of rows": lambda x: x * len(x),
    "position": lambda x: x * torch.arange(1.0, 1 + len(x))[:, None],
    "largest": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "name",
    MIXING,
)
def test_mixed_rows_are_refused_between_blocks(name: str, training: bool) -> None:
    """The error names the line, in every step. At the end of forward() and with chunks=1, they are exact."""
    mix = MIXING[name]
    for end in (lambda _, x: x, lambda _, x: x.std()):
        pipe = cut(Blocks(end, lambda _, x: mix(x)), chunks=2).train(training)
        for _ in range(2):
            with pytest.raises(BatchError, match=r"(?s)depends on other rows.*test_(rows|tail)\.py:\d+\)"):
                pipe(torch.randn(8, 4))
    assert_trains(Blocks(lambda _, x: x, lambda _, x: mix(x)).train(training), chunks=1)
    assert_trains(Blocks(lambda _, x: mix(x)).train(training))


def test_mixed_rows_of_inputs_are_refused() -> None:
    for mix in (MIXING["mean"], MIXING["position"]):
        with pytest.raises(BatchError, match=r"(?s)depends on other rows.*\n  - \d: its rows differ"):
            cut(nn.Sequential(_Applied(mix), *Blocks(len).blocks), split=["2"])(torch.randn(8, 4))


class _Applied(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", ["mean", "attention"])
def test_mixed_rows_in_a_block_are_refused(name: str) -> None:
    class Mixing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return MIXING[name](super().forward(input))

    model = Blocks(lambda _, x: x.std())
    model.blocks[1] = Mixing(4, 4)
    with pytest.raises(BatchError, match=r"(?s)depends on other rows.*blocks\.1: its rows differ"):
        cut(model)(torch.randn(8, 4))


def test_mixed_rows_are_accepted_without_verification() -> None:
    model = Blocks(lambda _, x: x, lambda _, x: x - x.mean(0))
    x = torch.randn(8, 4)
    assert_close(cut(model, chunks=2, verify=False)(x), torch.cat([model(piece) for piece in x.split(4)]))


@with_batch_norm
def test_batch_norm_before_a_loss_is_that_of_micro_batches() -> None:
    model = Blocks(lambda _, x: (x, x.std()))
    model.blocks[1].append(nn.BatchNorm1d(4))
    plain = copy.deepcopy(model)
    rows, loss = cut(model, chunks=2)(x := torch.randn(8, 4))
    expected = torch.cat([plain(piece)[0] for piece in x.split(4)])
    assert_close((rows, loss), (expected, expected.std()))


class Experts(nn.Module):
    """Returns rows and a balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.softmax(-1).mean(0).square().sum()


class Balanced(nn.Module):
    """Adds up the balancing losses of its blocks. With `used`, it returns them."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.blocks, self.used = nn.ModuleList(Experts() for _ in range(4)), used

    def forward(self, x: Tensor) -> Any:
        total = x.new_zeros(())
        for block in self.blocks:
            y, balance = block(x)
            x, total = x + y, total + balance if self.used else total
        return (x, total) if self.used else x


def test_balancing_losses_of_blocks_are_refused_by_name() -> None:
    """A rule for them has to be stated, and is compared with the model."""
    for _ in range(2):
        with pytest.raises(
            BatchError,
            match=r"(?s)loss_reduction='mean' \(by rows\) or 'sum', with.*blocks\.0 makes a tensor of shape \(\)",
        ):
            cut(Balanced(used=True))(torch.randn(8, 4))
    with pytest.raises(BatchError, match="loss_reduction='mean' is stated"):
        cut(Balanced(used=True), loss_reduction="mean")(torch.randn(8, 4))
    model, x = Balanced(used=True), torch.randn(8, 4)
    expected = [model(piece)[1] for piece in x.split(4)]
    assert_close(cut(model, chunks=2, loss_reduction="sum", verify=False)(x)[1], sum(expected))


def test_balancing_losses_that_nobody_uses_are_left_out() -> None:
    model = Balanced(used=False)
    plain = copy.deepcopy(model)
    pipe = cut(model)
    assert_trains_as(pipe, plain, {"x": torch.randn(7, 4)})


def test_tables_without_rows_enter_as_they_are() -> None:
    """A table that a block makes from positions alone depends on no row."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, length: int) -> Tensor:
            return self.weight[:length].cos()

    class Rotated(Blocks):
        def forward(self, x: Tensor) -> Any:
            table = self.table(3)
            for block in self.blocks:
                x = x + block(x * table[1])
            return (x * table[0]).std() + table.std()

    model = Rotated(lambda _, x: x)
    model.table = Table()
    plain = copy.deepcopy(model)
    pipe = cut(model)
    for _ in range(2):
        assert_trains_as(pipe, plain, {"x": torch.randn(7, 4)})
