"""The end of forward() runs once per step, on all rows, from values that the stages compute."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close
from tests.pipeline.split.test_losses import WAYS, Criterion, WithLoss, assert_trains_as, batch, cut
from torchweft.core.errors import BatchError
from torchweft.pipeline.split.record import ForwardRecorder

pytestmark = pytest.mark.usefixtures("double")


class Blocks(nn.Module):
    """Four blocks, between them `between`, and after them `end`. Both are functions of the model and x."""

    def __init__(self, end: Callable[..., Any], between: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)) for _ in range(4))
        self.head, self.end, self.between, self.level = nn.Linear(4, 4), end, between, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = x + block(self.between(self, x) if i and self.between is not None else x)
        return self.end(self, x)


def assert_trains(model: nn.Module, steps: int = 2, rows: int = 8, **settings: Any) -> weft.Pipe:
    """Train a pipe of the model for some steps, each of which is compared with the undivided model."""
    plain = copy.deepcopy(model)
    pipe = cut(model, **settings)
    for _ in range(steps):
        assert_trains_as(pipe, plain, {"x": torch.randn(rows, 4)})
    return pipe


def test_blocks_stay_in_training_mode() -> None:
    """A comparison in eval mode leaves no module in it."""
    model = Blocks(lambda _, x: x.std())
    for block in model.blocks:
        block[1].p = 0.5
    assert cut(model)(torch.randn(8, 4)).isfinite()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["masked mean", "square of a mean", "ramp by parameter", "class weights"])
def test_a_stated_rule_is_compared_with_the_model(name: str) -> None:
    """The ramp by a parameter that is zero is a mean in its value, but not in its gradient."""
    model, inputs = WithLoss(Criterion(name)), batch(special=True, rows=8)
    rule: dict[str, Any] = {"chunks": 4, "loss_reduction": "mean"}
    where = "the gradient of" if name == "ramp by parameter" else r"output\['loss'\] differs"
    pipe = cut(model, **rule)
    for _ in range(4):
        with pytest.raises(BatchError, match=rf"loss_reduction='mean' is stated(.|\n)*{where}"):
            pipe(**inputs)
    plain = copy.deepcopy(model)
    pieces = [{k: x[i : i + 2] if isinstance(x, Tensor) else x for k, x in inputs.items()} for i in (0, 2, 4, 6)]
    expected = sum(plain(**piece)["loss"] for piece in pieces) / 4
    assert_close(cut(model, verify=False, **rule)(**inputs)["loss"], expected)


@pytest.mark.parametrize(("reduction", "name"), [("mean", "mean"), ("sum", "sum")])
@pytest.mark.parametrize("rows", [8, 7])
def test_a_stated_rule_that_holds_is_exact(reduction: str, name: str, rows: int) -> None:
    def loss(_: Any, x: Tensor) -> Tensor:
        return x.square().sum(1).mean() if name == "mean" else x.square().sum()

    assert_trains(Blocks(loss), steps=4, rows=rows, loss_reduction=reduction)
    other = {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(BatchError, match=f"loss_reduction='{other}' is stated"):
        cut(Blocks(loss), loss_reduction=other)(torch.randn(rows, 4))


def test_a_rule_that_is_right_at_first_is_refused_later() -> None:
    """The rule is compared again whenever plain arguments or the mode change."""
    pipe = cut(WithLoss(Criterion("ramp by argument")), loss_reduction="mean")
    for _ in range(3):
        pipe(**batch(special=False))
    with pytest.raises(BatchError, match="loss_reduction='mean' is stated"):
        pipe(**batch(special=False, w=1.0))
    pipe = cut(WithLoss(Criterion("in training")), loss_reduction="mean").eval()
    pipe(**batch(special=False))
    with pytest.raises(BatchError, match="loss_reduction='mean' is stated"):
        pipe.train()(**batch(special=False))


def test_numbers_drawn_at_the_end_are_those_of_the_model() -> None:
    model = Blocks(lambda _, x: functional.dropout(x + torch.randn_like(x), 0.5).std())
    pipe, x = cut(copy.deepcopy(model)), torch.randn(8, 4)
    for seed in range(3):
        results: list[Tensor] = []
        for net in (pipe, model):
            torch.manual_seed(seed)
            results.append(net(x))
        assert_close(*results)


def test_numbers_drawn_before_the_blocks_are_not_drawn_again() -> None:
    class Masked(Blocks):
        def forward(self, x: Tensor) -> Any:
            mask = (torch.rand(len(x), 1) > 0.4).to(x)
            return {"x": x, "mask": mask, **super().forward(x * mask)}

    pipe = cut(Masked(lambda _, x: {"h": x}))
    pipe_of_loss = cut(Masked(lambda _, x: {"h": x, "loss": x.std()}))
    for net in (pipe, pipe_of_loss):
        output = net(torch.randn(8, 4))
        expected = Blocks.forward(net.module, output["x"] * output["mask"])
        assert_close(output["h"], expected["h"])


@pytest.mark.parametrize("chunks", [1, 8])
def test_any_loss_with_one_micro_batch_or_one_row_each(chunks: int) -> None:
    assert_trains(Blocks(lambda _, x: x.std()), chunks=chunks)


OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda x: x.new_ones(2, 4),
    "products of rows": lambda x: x @ x.T,
    "range": lambda x: x.mean() * torch.arange(12.0),
    "transposed": lambda x: x.T,
    "flat": lambda x: x.flatten(),
    "twice": lambda x: torch.cat([x, x]),
    "repeated": lambda x: x.repeat_interleave(2, 0),
    "pairs": lambda x: x.view(-1, 2, 4).sum(1),
    "some rows": lambda x: x[x[:, 0] > 0],
    "sorted": lambda x: x.sort(0).values,
}


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_any_shape_are_those_of_all_rows(name: str, rows: int) -> None:
    """With 8 rows in 4 chunks, an output of shape [2, 4] could be mistaken for one row per input row."""
    assert_trains(Blocks(lambda _, x: [x, OUTPUTS[name](x)]), rows=rows, chunks=4)


def test_outputs_that_follow_the_rows_are_joined_at_any_size() -> None:
    model = Blocks(lambda _, x: [x, x.flatten()])
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
    pipe = cut(Blocks(lambda _, x: x.std()), chunks=4, verify=False)
    for rows in (8, 8, 12, 16):
        pipe(torch.randn(rows, 4))
    assert not calls


class Square(torch.autograd.Function):
    """The square, with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def _written(model: Blocks, x: Tensor) -> Tensor:
    x = x * 1
    x.add_(model.head(x).tanh().detach())
    return x


def _reads_between(model: Blocks, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean(1, keepdim=True)
    return x * scale


def _end_written(_: Blocks, x: Tensor) -> Tensor:
    x.mul_(2.0)
    x -= x.mean(0)
    return x.square().std()


def _end_counts(model: Blocks, x: Tensor) -> dict[str, Tensor]:
    model.count += 1
    return {"loss": x.std() * model.count, "count": model.count * 1}


def _end_branches(_: Blocks, x: Tensor) -> Tensor:
    loss = x.square().mean()
    return loss * 2 if loss.item() > 2.0 else loss.sqrt()


def _with_parameters(model: Blocks, x: Tensor) -> Tensor:
    return x.std() + sum(parameter.square().sum() for parameter in model.parameters())


CODES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor] | None]] = {
    "function at the end": (lambda _, x: Square.apply(x).mean().square(), None),
    "function between blocks": (lambda _, x: x.std(), lambda _, x: Square.apply(x)),
    "write between blocks": (lambda _, x: x.std(), _written),
    "no_grad between blocks": (lambda _, x: x.std(), _reads_between),
    "write at the end": (_end_written, None),
    "counter at the end": (_end_counts, None),
    "branch by a number at the end": (_end_branches, None),
    "parameters at the end": (_with_parameters, None),
    "head at the end": (lambda model, x: (model.head(x) @ x.T).logsumexp(0).mean(), None),
    "weight of a block at the end": (lambda model, x: (x @ model.blocks[0][0].weight).std(), None),
    "nested result": (lambda _, x: (x, 3, "a", x.std(), [x.mean(0), None]), None),
    "loss of a frozen copy": (lambda _, x: (x - x.detach().mean(0)).square().mean(), None),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CODES)
def test_code_at_the_end_and_between_blocks_is_exact(name: str, way: str) -> None:
    assert_trains(Blocks(*CODES[name]), steps=3, rows=7, **WAYS[way])


class Deep(nn.Module):
    """Has a loss after every block. From step `begin` on, another one uses a value that was not used before."""

    def __init__(self, begin: int = 1000, by: str = "buffer") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.begin, self.by, self.steps = begin, by, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss, values = x.new_zeros(()), list[Tensor]()
        for block in self.blocks:
            values.append(torch.tanh(block(x)))
            x = x + values[-1]
            loss = loss + x.std()
        self.count += 1
        self.steps += 1
        if (self.count.item() if self.by == "buffer" else self.steps) > self.begin:
            loss = loss + values[1].std() * values[0].abs().max()
        return {"loss": loss, "x": x}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["buffer", "attribute"])
@pytest.mark.parametrize("begin", [0, 3])
def test_losses_between_blocks_are_exact(begin: int, by: str, way: str) -> None:
    """Deep supervision, also by values that the end of forward() did not use when it was recorded."""
    assert_trains(Deep(begin, by), steps=begin + 3, rows=7, **WAYS[way])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile, with or without a pipe
def test_compiled_blocks_before_any_loss() -> None:
    model = Blocks(lambda _, x: x.std())
    plain = copy.deepcopy(model)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    pipe = cut(model)
    for _ in range(2):
        assert_trains_as(pipe, plain, {"x": torch.randn(7, 4)})


def test_gradients_of_inputs_go_through_both_parts() -> None:
    model = Blocks(lambda _, x: x.std())
    x = torch.randn(7, 4, requires_grad=True)
    for way in WAYS.values():
        one, other = (torch.autograd.grad(net(x), x) for net in (cut(copy.deepcopy(model), **way), model))
        assert_close(one, other)


def test_the_tail_of_a_step_is_observed_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).square().mean()

    pipe = weft.Pipe(Model(), chunks=2, split=["second"], devices=["cpu", "cpu"])
    pipe(torch.randn(4, 4)).backward()
    recorder = weft.Recorder()
    with pipe.observed_by(recorder):
        pipe(torch.randn(4, 4)).backward()
    (tail,) = [event for event in recorder.events if event.kind == "T"]
    assert (tail.action.stage, tail.action.micro_batch) == (1, -1)
    assert tail.start >= max(event.end for event in recorder.events if event.kind == "F")
    drawn = str(weft.report.timeline(recorder.events))
    assert "end of forward(), stage 1, all micro-batches" in drawn
    assert "2 micro-batches" in drawn
    sizes = weft.pipeline.MemoryRecorder(ignore=pipe.parameters())
    with pipe.observed_by(sizes):
        pipe(torch.randn(4, 4)).backward()
    assert sizes.tail_bytes == 4 * 4 * 8  # square() keeps the joined output
    costs = weft.pipeline.costs_from([recorder], sizes)
    assert costs.tail is not None and costs.tail.seconds == tail.end - tail.start
    kinds = [span.action.kind for span in costs.forecast(weft.pipeline.gpipe(2, 2)).spans]
    assert kinds == [*"FFFF", "T", *"BBBB"]
