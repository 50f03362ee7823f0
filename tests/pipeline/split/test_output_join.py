"""Outputs of micro-batches are joined to the outputs of all rows, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, assert_gradients_equal
from torchweft.core.errors import BatchError
from torchweft.pipeline.split.record import ForwardRecorder

pytestmark = pytest.mark.usefixtures("double")

Loss = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # of logits [rows, tokens, 5], labels [rows, tokens], a mask like them


class WithLoss(nn.Module):
    """A model that returns a loss and its logits."""

    def __init__(self, loss: Loss, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm, self.head, self.dropout = nn.LayerNorm(4), nn.Linear(4, 5), nn.Dropout(dropout)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        logits = self.head(self.norm(x))
        return {"loss": self.loss(logits, labels, mask), "logits": logits}


def entropy(logits: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


def by_mask(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = entropy(logits, labels, reduction="none").reshape(labels.shape)
    return (losses * mask).sum() / mask.sum()


def float_labels(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    counted = labels.double() != -100.0
    return ((logits[..., 0] - labels).square() * counted).sum() / counted.sum()


def cut(model: nn.Module, *, chunks: int = 4, **settings: Any) -> weft.Pipe:
    return weft.Pipe(model, chunks=chunks, devices=["cpu"] * 2, split=["blocks.2"], **settings)


def batch(rows: int = 8, ignored: int | None = None) -> dict[str, Tensor]:
    """Rows of 3 tokens. In the first row, all labels but one are `ignored`, and their mask is zero."""
    labels, mask = torch.randint(5, (rows, 3)), torch.ones(rows, 3, dtype=torch.long)
    if ignored is not None:
        labels[0, 1:], mask[0, 1:] = ignored, 0
    return {"x": torch.randn(rows, 3, 4), "labels": labels, "mask": mask}


def assert_joined(model: nn.Module, inputs: dict[str, Tensor], pipe: weft.Pipe | None = None) -> None:
    """Check that outputs and gradients of the pipe are those of the model for all rows."""
    plain, pipe = copy.deepcopy(model), pipe or cut(model)
    model.zero_grad()
    plain.zero_grad()
    result, expected = pipe(**inputs), plain(**inputs)
    assert_close(result, expected)
    result["loss"].backward()
    expected["loss"].backward()
    assert_gradients_equal(pipe, plain, 1e-10)


RIGHT: dict[str, Loss] = {
    "mean": lambda logits, labels, _: entropy(logits, labels),
    "sum": lambda logits, labels, _: entropy(logits, labels, reduction="sum"),
    "masked sum": lambda logits, labels, mask: (
        entropy(logits, labels, reduction="none").reshape(labels.shape) * mask
    ).sum(),
    "mean of squares": lambda logits, *_: logits.square().mean(),
}
WRONG: dict[str, tuple[Loss, int]] = {  # with the ignored label
    "mask": (by_mask, 0),
    "-100": (lambda logits, labels, _: entropy(logits, labels), -100),
    "255": (lambda logits, labels, _: entropy(logits, labels, ignore_index=255), 255),
    "float -100": (float_labels, -100),
    "class weights": (lambda logits, labels, _: entropy(logits, labels, weight=torch.arange(1.0, 6.0)), 0),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("rows", [8, 7])
def test_means_and_sums_are_found_by_comparing(name: str, rows: int) -> None:
    assert_joined(WithLoss(RIGHT[name]), batch(rows, 0))


def test_dropout_and_batch_norm_hide_no_mean() -> None:
    """If two runs differ by chance, blocks are compared in eval mode. The step itself is unchanged."""
    model = WithLoss(RIGHT["mean"], dropout=0.5)
    assert cut(model)(**batch())["loss"].isfinite()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", WRONG)
def test_means_over_unequal_numbers_are_refused(name: str) -> None:
    """The error is raised in every step in which micro-batches ignore unequal numbers of labels. Other steps are
    exact."""
    loss, ignored = WRONG[name]
    with pytest.raises(BatchError, match=r"neither a mean by rows nor a sum(.|\n)*output\['loss'\]"):
        cut(WithLoss(loss))(**batch(ignored=ignored))
    if name == "class weights":
        return
    pipe = cut(model := WithLoss(loss))
    for _ in range(2):
        assert_joined(model, batch(), pipe)
        with pytest.raises(BatchError, match="loss_reduction="):
            pipe(**batch(ignored=ignored))


def test_equal_numbers_left_out_of_each_micro_batch_are_exact() -> None:
    inputs = batch()
    inputs["labels"][::2, 0] = -100  # a row of each micro-batch of two
    assert_joined(WithLoss(RIGHT["mean"]), inputs)


def test_functions_of_a_mean_are_refused_unless_stated() -> None:
    """The square of a mean is neither a mean nor a sum. With `loss_reduction`, losses are combined as stated."""
    model = WithLoss(lambda logits, *_: logits.mean().square())
    with pytest.raises(BatchError, match="neither a mean by rows nor a sum"):
        cut(model)(**(inputs := batch()))
    parts = [model(**{key: x[i : i + 2] for key, x in inputs.items()})["loss"] for i in (0, 2, 4, 6)]
    for reduction, expected in (("mean", sum(parts) / 4), ("sum", sum(parts))):
        assert_close(cut(model, loss_reduction=reduction)(**inputs)["loss"], expected)


def test_a_loss_that_draws_numbers_is_refused_with_the_reason() -> None:
    model = WithLoss(lambda logits, *_: (logits + torch.randn_like(logits)).square().mean())
    with pytest.raises(BatchError, match="draws random numbers in eval mode"):
        cut(model)(**batch())
    cut(model, loss_reduction="mean")(**batch())


def test_any_loss_is_accepted_with_one_micro_batch() -> None:
    assert_joined(model := WithLoss(by_mask), batch(ignored=0), cut(model, chunks=1))


class Others(nn.Module):
    """Returns values without one row per input row."""

    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.other = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), other

    def forward(self, x: Tensor) -> list[Tensor]:
        for block in self.blocks:
            x = block(x)
        return [x, self.other(x)]


@pytest.mark.parametrize(
    "other", [lambda x: x.new_ones(2, 4), lambda x: x @ x.T, lambda x: x.mean() * torch.arange(12.0), lambda x: x.T]
)
@pytest.mark.parametrize("rows", [8, 16])
def test_outputs_that_do_not_follow_the_rows_are_refused(other: Callable[[Tensor], Tensor], rows: int) -> None:
    """With 8 rows in 4 chunks, an output of shape [2, 4] could be mistaken for one row per input row."""
    with pytest.raises(BatchError, match=r"do not have the same number of rows(.|\n)*output\[1\] has shape"):
        cut(Others(other))(torch.randn(rows, 4))


def test_outputs_that_follow_the_rows_are_joined_at_any_size() -> None:
    model = Others(lambda x: x.flatten())
    for chunks, rows in ((4, 8), (4, 7), (3, 2), (1, 3)):
        assert_close(cut(model, chunks=chunks)(x := torch.randn(rows, 4)), model(x))


def test_changing_sizes_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison for one size holds for others, so that later steps do not run the model for a comparison."""
    calls: list[None] = []
    plain = ForwardRecorder.plain

    def counted(recorder: ForwardRecorder, *args: Any) -> Any:
        calls.append(None)
        return plain(recorder, *args)

    monkeypatch.setattr(ForwardRecorder, "plain", counted)
    pipe = cut(WithLoss(RIGHT["mean"]), verify=False)
    for rows in (8,) * 12:
        pipe(**batch(rows))
    calls.clear()
    for rows in (8, 12, 16):
        pipe(**batch(rows))
    assert not calls
