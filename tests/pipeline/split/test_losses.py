"""Any loss at the end of forward() is that of all rows: in values, gradients and buffers, from the step in which its
special case begins."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close
from torchweft.core.pytree import flatten

pytestmark = pytest.mark.usefixtures("double")

CHUNKS, ROWS, TOKENS, CLASSES = 3, 7, 3, 5
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "serial": {"executor": "serial"},
    "threads": {"executor": "threads"},
    "graph": {"executor": "graph"},
    "always": {"executor": "serial", "checkpoint": "always"},
}
Inputs = dict[str, Any]


class Criterion(nn.Module):
    """A loss with a buffer that counts its calls, and a parameter that is zero at first."""

    def __init__(self, name: str, begin: int = 0) -> None:
        super().__init__()
        self.name, self.begin = name, begin
        self.gain = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: Tensor, inputs: Inputs) -> Tensor:
        return LOSSES[self.name](self, logits, inputs)


class WithLoss(nn.Module):
    """A model that returns a loss and its logits. `place` of the loss: open code, or a block at the end."""

    def __init__(self, criterion: Criterion, place: str = "open") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head, self.criterion, self.place = nn.Linear(4, CLASSES), criterion, place

    def forward(self, x: Tensor, **inputs: Any) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        if self.place == "block":
            return {"loss": self.criterion(logits, inputs), "logits": logits}
        return {"loss": LOSSES[self.criterion.name](self.criterion, logits, inputs), "logits": logits}


def entropy(logits: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


def _mask(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    losses = entropy(logits, inputs["labels"].clamp(min=0), reduction="none").view_as(inputs["mask"])
    return (losses * inputs["mask"]).sum() / inputs["mask"].sum()


def _indexed(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    chosen = inputs["mask"] > 0
    return (logits - inputs["target"])[chosen].square().mean()


def _float_mark(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    counted = inputs["target"] != -1.0
    return ((logits - inputs["target"]).square() * counted).sum() / counted.sum()


def _missing(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    target = inputs["target"].masked_fill(inputs["target"] == -1.0, torch.nan)
    known = ~target.isnan()
    return (logits[known] - target[known]).square().mean()


def _contrastive(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    one, other = (functional.normalize(x.flatten(1)) for x in (logits, inputs["target"]))
    return functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def _by_argument(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    return logits.square().mean() + inputs["w"] * logits.std()


def _by_buffer(self: Criterion, logits: Tensor, _: Inputs) -> Tensor:
    self.calls += 1
    return logits.square().mean() + (self.calls - self.begin).clamp(min=0) * logits.mean().square()


def _by_counter(self: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    self.calls += 1
    if self.calls.item() > self.begin:
        return logits.std() + inputs["target"].mean()
    return logits.square().mean()


def _by_parameter(self: Criterion, logits: Tensor, _: Inputs) -> Tensor:
    return logits.square().mean() + self.gain * logits.mean().square() + self.gain.square()


def _hardest(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    losses = entropy(logits, inputs["labels"].clamp(min=0), reduction="none")
    return losses.topk(losses.numel() // 3).values.mean()


def _flooding(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    loss = entropy(logits, inputs["labels"].clamp(min=0))
    level = 4.0 * inputs["w"]
    return (loss - level).abs() + level


def _in_training(self: Criterion, logits: Tensor, _: Inputs) -> Tensor:
    return logits.square().mean() + (logits.std() if self.training else 0.0)


def _pseudo_labels(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        sure, labels = logits.softmax(-1).max(-1)
        kept = sure > 0.2 + 0.1 * inputs["w"]
    losses = entropy(logits, labels, reduction="none").view_as(kept)
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def _weights(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    return entropy(logits, inputs["labels"], weight=torch.arange(1.0, 1 + CLASSES))


def _dice(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    chance, truth = logits.sigmoid(), inputs["target"].sigmoid()
    return 1 - 2 * (chance * truth).sum() / (chance.sum() + truth.sum())


def _divergence(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    truth = inputs["target"].log_softmax(-1)
    return functional.kl_div(logits.log_softmax(-1), truth, reduction="batchmean", log_target=True)


def _given_number(_: Criterion, logits: Tensor, inputs: Inputs) -> Tensor:
    count = inputs.get("num_items_in_batch")
    total = entropy(logits, inputs["labels"], reduction="sum")
    return total / ((inputs["labels"] != -100).sum() if count is None else count)


LOSSES: dict[str, Callable[[Criterion, Tensor, Inputs], Tensor]] = {
    "masked mean": _mask,
    "mean of chosen ones": _indexed,
    "class weights": _weights,
    "-100": lambda _, logits, inputs: entropy(logits, inputs["labels"]),
    "255": lambda _, logits, inputs: entropy(
        logits, inputs["labels"].masked_fill(inputs["labels"] == -100, 255), ignore_index=255
    ),
    "float mark": _float_mark,
    "NaN": _missing,
    "contrastive": _contrastive,
    "ramp by argument": _by_argument,
    "ramp by buffer": _by_buffer,
    "ramp by counter": _by_counter,
    "ramp by parameter": _by_parameter,
    "hardest": _hardest,
    "flooding": _flooding,
    "in training": _in_training,
    "pseudo-labels": _pseudo_labels,
    "dice": _dice,
    "batchmean": _divergence,
    "number of items": _given_number,
    "square of a mean": lambda _, logits, inputs: (logits - inputs["target"]).mean().square(),
}


def batch(special: bool, rows: int = ROWS, w: float | None = None) -> dict[str, Any]:
    """Arguments of the model. In a `special` one, the first row has one label, and its mask is zero elsewhere."""
    labels, mask = torch.randint(CLASSES, (rows, TOKENS)), torch.ones(rows, TOKENS)
    target = torch.randn(rows, TOKENS, CLASSES)
    if special:
        labels[0, 1:], mask[0, 1:], target[0, 1:] = -100, 0, -1.0
    w = float(special) if w is None else w
    return {"x": torch.randn(rows, TOKENS, 4), "labels": labels, "target": target, "mask": mask, "w": w}


def cut(model: nn.Module, **settings: Any) -> weft.Pipe:
    options = {"chunks": CHUNKS, "devices": ["cpu"] * 2, "split": ["blocks.1"], **settings}
    return weft.Pipe(model, **options)


def numbers(model: nn.Module, inputs: dict[str, Any]) -> list[Any]:
    """Outputs, gradients of parameters, and buffers after a step of training."""
    model.zero_grad()
    outputs = [x for x in flatten(model(**inputs))[0] if isinstance(x, Tensor)]
    # With weights, so that gradients of outputs differ from row to row.
    parts = [(x * torch.arange(1.0, 1 + x.numel()).view_as(x).cos()).sum() for x in outputs if x.is_floating_point()]
    sum(parts[1:], parts[0]).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [*(x.detach() for x in outputs), *gradients, *(buffer.clone() for buffer in model.buffers())]


def assert_trains_as(pipe: weft.Pipe, plain: nn.Module, inputs: dict[str, Any]) -> None:
    """Check one step of the pipe against the undivided model on the whole mini-batch."""
    one, other = ({k: x.clone() if isinstance(x, Tensor) else x for k, x in inputs.items()} for _ in range(2))
    expected = numbers(plain, one)
    assert_close(numbers(pipe, other), expected, 1e-12)


def assert_equal_from_any_step(name: str, place: str, begin: int, way: str, steps: Iterable[int]) -> None:
    torch.manual_seed(0)
    plain = WithLoss(Criterion(name, begin), place)
    pipe = cut(copy.deepcopy(plain), **WAYS[way])
    wanted = set(steps)
    for step in range(max(wanted) + 1):
        special = step >= begin
        if name == "in training":
            plain.train(special)
            pipe.train(special)
        for model in (plain, pipe):
            with torch.no_grad():
                model.criterion.gain.fill_(float(special and name == "ramp by parameter"))
        if step in wanted:
            assert_trains_as(pipe, plain, batch(special))
        else:
            inputs = batch(special)
            plain(**inputs)
            pipe(**inputs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["open", "block"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("begin", [0, 3])
def test_any_loss_is_that_of_all_rows(name: str, place: str, begin: int, way: str) -> None:
    assert_equal_from_any_step(name, place, begin, way, range(begin + 3))


@pytest.mark.long
@pytest.mark.parametrize("place", ["open", "block"])
@pytest.mark.parametrize("name", LOSSES)
def test_special_cases_can_begin_after_many_steps(name: str, place: str) -> None:
    assert_equal_from_any_step(name, place, 150, "serial", (0, 149, 150, 151))


@pytest.mark.parametrize("rows", [3, 8, 12])
@pytest.mark.parametrize("name", LOSSES)
def test_any_number_of_rows_is_exact(name: str, rows: int) -> None:
    """Also with one row per micro-batch, and after other numbers of rows."""
    plain = WithLoss(Criterion(name))
    pipe = cut(copy.deepcopy(plain))
    for count in (rows, ROWS, rows):
        assert_trains_as(pipe, plain, batch(True, count))
