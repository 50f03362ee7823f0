"""State that forward() writes between blocks, and that depends on no row, has the numbers of the undivided model."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close

# Reads and writes of the state, in the order of forward(); "block" is the split point.
ORDERS = (
    "write read block", "read write block", "read write read block", "write read write read block",
    "read block write", "write read block write", "read write block read", "block read write", "write block read",
)  # fmt: skip


class Stateful(nn.Module):
    counter: Tensor

    def __init__(self, kind: str, order: str, *, has_loss: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.kind, self.order, self.has_loss = kind, order.split(), has_loss
        self.register_buffer("counter", torch.ones(2, dtype=torch.float64))

    def write(self) -> None:
        if self.kind == "view":
            self.counter[0] += 1
        elif self.kind == "computed":
            self.counter.copy_((self.counter * 1.5).clamp(max=9.0))
        else:
            self.counter += 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for name in self.order:
            if name == "block":
                x = self.second(x)
            elif name == "read":
                x = x * (self.counter[0] * 1)
            else:
                self.write()
        return x.square().mean() if self.has_loss else x * 1


@pytest.mark.parametrize(("has_loss", "checkpoint"), [(True, "never"), (False, "always")], ids=("loss", "outputs"))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ("buffer", "view", "computed"))
def test_state_has_the_numbers_of_the_undivided_model(kind: str, order: str, checkpoint: Any, has_loss: bool) -> None:
    model = Stateful(kind, order, has_loss=has_loss).double()
    plain = copy.deepcopy(model)
    pipe = weft.Pipe(model, chunks=3, split=["second"], devices=["cpu"] * 2, executor="serial", checkpoint=checkpoint)
    for _ in range(3):
        x = torch.randn(6, 3, dtype=torch.float64)
        pairs = pipe(x), plain(x)
        for result in pairs:
            result.sum().backward()
        assert_close(pairs[0], pairs[1], 1e-12)
        assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-12)
        assert_close(model.counter, plain.counter, 0)


class Annealed(nn.Module):
    """A block whose own temperature is written by the code between blocks."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / (self.temperature * 1)


class Scheduled(nn.Module):
    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.first, self.second, self.late = Annealed(), nn.Linear(3, 3), late

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.first.temperature.mul_(0.5)
        x = self.first(x)
        if self.late:
            self.first.temperature.mul_(0.5)
        return self.second(x)


def test_state_of_a_block_is_written_before_the_block() -> None:
    model = Scheduled(late=False).double()
    plain = copy.deepcopy(model)
    pipe = weft.Pipe(model, chunks=3, split=["second"], devices=["cpu"] * 2)
    for _ in range(2):
        x = torch.randn(6, 3, dtype=torch.float64)
        assert_close(pipe(x), plain(x), 1e-12)
    assert_close(model.first.temperature, plain.first.temperature, 0)


def test_a_later_write_to_the_state_of_a_block_is_refused() -> None:
    pipe = weft.Pipe(Scheduled(late=True).double(), chunks=3, split=["second"], devices=["cpu"] * 2)
    with pytest.raises(weft.errors.InPlaceError, match=r"'first\.temperature' after block 'first' has used it"):
        pipe(torch.randn(6, 3, dtype=torch.float64))


class Mixed(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.mean.mul_(0.9)
        self.mean.add_(torch.rand(3))
        return self.second(x + self.mean)


def test_state_written_with_and_without_draws_is_refused() -> None:
    pipe = weft.Pipe(Mixed().double(), chunks=3, split=["second"], devices=["cpu"] * 2)
    with pytest.raises(weft.errors.InPlaceError, match=r"once per step of training, and .* once per micro-batch"):
        pipe(torch.randn(6, 3, dtype=torch.float64))


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.counter = torch.ones(2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.counter += 1
        return self.second(x * self.counter.sum())


def test_a_write_to_a_tensor_that_is_not_registered_is_refused() -> None:
    pipe = weft.Pipe(Unregistered().double(), chunks=3, split=["second"], devices=["cpu"] * 2)
    with pytest.raises(weft.errors.InPlaceError, match="register_buffer"):
        pipe(torch.randn(6, 3, dtype=torch.float64))


class Deciding(nn.Module):
    """Counts, and then takes a branch by its input and reads a number of its class."""

    counter: Tensor
    factor: ClassVar = [1.0]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        self.counter += 1
        x = x if bool(mask.all()) else x * mask
        return self.second(x * self.factor[0]).square().mean()


def test_state_is_written_once_in_a_step_that_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deciding().double()
    plain = copy.deepcopy(model)
    pipe = weft.Pipe(model, chunks=3, split=["second"], devices=["cpu"] * 2)
    for step in range(4):
        x, mask = torch.randn(6, 3, dtype=torch.float64), torch.ones(6, 1, dtype=torch.bool)
        mask[-1] = False  # of the last micro-batch, so that all rows take its branch
        monkeypatch.setattr(Deciding, "factor", [float(step // 2)])
        assert_close(pipe(x, mask), plain(x, mask), 1e-12)
        assert_close(model.counter, plain.counter, 0)
