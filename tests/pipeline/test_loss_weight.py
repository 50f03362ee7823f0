"""A mean in which some targets do not count is that of the undivided mini-batch, or raises an error."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pipeline.pipe_cases import EXECUTORS, assert_close, chain, every_run, every_schedule, piped, rows
from torchweft import NoChunk, Pipe
from torchweft.core.errors import SpecError, UsageError
from torchweft.pipeline.loss import LossWeights, WeightedLoss, checked_loss
from torchweft.pipeline.microbatch import MiniBatch

CLASS_WEIGHTS = torch.tensor([0.5, 3.0, 0.0], dtype=torch.float64)


def masked(output: Tensor, target: dict[str, Any]) -> Tensor:
    """A custom mean over the values that a mask selects."""
    return ((output - target["y"]).square() * target["mask"]).sum() / target["mask"].sum() * target["factor"]


def mask_sum(target: dict[str, Any]) -> Tensor:
    return target["mask"].sum()


LOSSES: dict[str, Any] = {
    "ignore_index": nn.CrossEntropyLoss(ignore_index=1),
    "class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "smoothed": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS + 1, ignore_index=0, label_smoothing=0.3),
    "nll": nn.NLLLoss(weight=CLASS_WEIGHTS),
    "functional": functional.cross_entropy,
    "partial": partial(functional.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=2),
    "partial nll": partial(functional.nll_loss, ignore_index=0),
}


def assert_exact(pipe: Pipe, plain: nn.Module, loss: Any, x: Tensor, target: Any) -> None:
    """Loss and gradients are those of the undivided mini-batch, NaN where those are."""
    seen, expected = pipe(x, target=target), loss(plain(x), target)
    torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    seen.backward()
    expected.backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, equal_nan=True)


@every_schedule
@every_run
@pytest.mark.parametrize("kind", ["functional", "smoothed", "own"])
def test_targets_that_do_not_count_are_left_out_of_the_mean(
    executor: str, checkpoint: str, schedule: str, kind: str
) -> None:
    options = {"loss": masked, "loss_weight": mask_sum} if kind == "own" else {"loss": LOSSES[kind]}
    pipe, plain = piped(
        chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint, schedule=schedule, **options
    )
    counts = torch.tensor([1, 0, 1, 0, 0, 1, 1]).bool()  # three micro-batches, the second with weight zero
    for kept in (counts, counts.roll(1), counts | True):
        classes = torch.arange(7) % 3
        target: Any = torch.where(kept, classes, 0 if kind == "smoothed" else -100)
        if kind == "own":
            target = {"y": rows(7, 3), "mask": kept.unsqueeze(1).expand(7, 3), "factor": 3}
        assert_exact(pipe, plain, options["loss"], rows(7, 4), target)


@given(data=st.data(), kind=st.sampled_from(list(LOSSES)), count=st.integers(1, 9), chunks=st.integers(1, 9))
def test_any_mean_by_class_weights_and_ignored_classes_is_exact(
    data: st.DataObject, kind: str, count: int, chunks: int
) -> None:
    pipe, plain = piped(chain(4, 3), chunks=chunks, executor="serial", devices="cpu", loss=LOSSES[kind])
    target = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    assert_exact(pipe, plain, LOSSES[kind], rows(count, 4), target)


def test_positions_and_probabilities_count_as_in_pytorch() -> None:
    x, classes = rows(5, 2, 6), torch.arange(30).reshape(5, 6).square() % 3
    for ignored, target in ((1, classes), (-100, rows(5, 3, 6, seed=1).softmax(1))):
        loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=ignored)
        pipe, plain = piped(nn.Sequential(nn.Conv1d(2, 3, 1)).double(), devices="cpu", loss=loss)
        assert_exact(pipe, plain, loss, x, target)


def test_mini_batch_of_weight_zero_has_no_mean_as_in_pytorch() -> None:
    loss = functional.cross_entropy
    for schedule in ("gpipe", "1f1b"):
        pipe, plain = piped(chain(4, 3), executor="serial", schedule=schedule, loss=loss)
        assert_exact(pipe, plain, loss, rows(5, 4), torch.full((5,), -100))


def test_custom_weight_overrides_the_known_one_without_graph() -> None:
    seen: list[bool] = []

    def weight(target: Tensor) -> int:
        seen.append(torch.is_grad_enabled())
        return len(target)

    y = torch.tensor([0, -100, 1, 2])
    weights = LossWeights(functional.cross_entropy, "mean", weight).of(MiniBatch([rows(4, 2), y], 3), y)
    assert weights == [0.5, 0.25, 0.25] and not any(seen)


def test_invalid_weights_are_listed() -> None:
    numbers = iter([-1, float("nan"), torch.ones(2), True, torch.tensor(0.5), 2])
    pipe, _ = piped(chain(4, 3), chunks=6, loss=functional.cross_entropy, loss_weight=lambda _: next(numbers))
    with pytest.raises(SpecError, match="a finite number from 0 up") as caught:
        pipe(rows(6, 4), target=torch.zeros(6).long())
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        f"  - micro-batch {i}" for i in range(4)
    ]


def unweighted_mean(output: Tensor, target: Any) -> Tensor:
    """Loss with an unknown denominator."""
    return output.mean() + 0 * sum(leaf.sum() for leaf in (target if isinstance(target, tuple) else (target,)))


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (torch.tensor([1, 2, -100, 0]), "target has entries that are -100"),
        ((rows(4), torch.tensor([True, False, True, True])), r"target\[1\] is a mask"),
    ],
)
def test_padding_of_unknown_weight_is_refused(target: Any, word: str) -> None:
    pipe, plain = piped(chain(4, 3), loss=unweighted_mean)
    with pytest.raises(UsageError, match=rf"loss_weight=(.|\n)*{word}"):
        pipe(rows(4, 4), target=target)
    for options in ({"loss_weight": len if isinstance(target, Tensor) else lambda t: len(t[0])}, {"chunks": 1}):
        pipe, plain = piped(chain(4, 3), loss=unweighted_mean, **options)
        assert_exact(pipe, plain, unweighted_mean, rows(4, 4), target)


@pytest.mark.parametrize(
    "target", [torch.tensor([True, False, True]), (rows(3), NoChunk(torch.tensor([False]))), torch.tensor([-1, 0, 5])]
)
def test_targets_without_padding_are_accepted(target: Any) -> None:
    piped(chain(4, 3), loss=lambda output, target: output.mean())[0](rows(3, 4), target=target).backward()


class Wrapped(nn.Module):
    """Custom loss that calls a loss of PyTorch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**options)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output.flatten(1), target.flatten())


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
@pytest.mark.parametrize(
    ("options", "word"),
    [({"ignore_index": 0}, "targets that are 0, its ignore_index"), ({"weight": CLASS_WEIGHTS}, "has class weights")],
)
def test_mean_inside_a_custom_loss_is_refused(executor: str, options: dict[str, Any], word: str) -> None:
    target = torch.tensor([1, 2, 1, 0])
    pipe, plain = piped(chain(4, 3), loss=Wrapped(**options), executor=executor)
    for _ in range(2):
        with pytest.raises(UsageError, match=rf"loss_weight=(.|\n)*cross_entropy .*{word}"):
            pipe(rows(4, 4), target=target)
    assert_exact(pipe, plain, Wrapped(**options), rows(1, 4), target[:1])  # one micro-batch needs no weights

    def weight(target: Tensor) -> Tensor:
        weights = options.get("weight")
        return (target != 0).sum() if weights is None else weights[target].sum()

    pipe, plain = piped(chain(4, 3), loss=Wrapped(**options), executor=executor, loss_weight=weight)
    assert_exact(pipe, plain, Wrapped(**options), rows(4, 4), target)


def test_a_loss_without_ignored_targets_is_weighted_by_rows() -> None:
    pipe, plain = piped(chain(4, 3), loss=Wrapped())
    assert_exact(pipe, plain, Wrapped(), rows(7, 4), torch.arange(7) % 3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(-3, 3))
def test_the_weighted_loss_is_the_loss_of_all_rows(sizes: list[int], factor: float) -> None:
    total = sum(sizes)
    x = rows(total)
    pieces = [piece.requires_grad_() for piece in x.split(sizes)]
    output = WeightedLoss([size / total for size in sizes])
    losses = [piece.square().mean() for piece in pieces]
    (loss,), tracked = output.gather(losses)
    assert tracked == [True]
    assert_close(output.fill([loss]), x.square().mean())
    assert_close(output.visible(losses), x.square().mean())
    for loss, (gradient,) in zip(
        losses, output.scatter_gradients([torch.tensor(factor, dtype=torch.float64)]), strict=True
    ):
        loss.backward(gradient)
    assert_close(torch.cat([piece.grad for piece in pieces]), factor * 2 * x / total)


def test_a_loss_is_one_number() -> None:
    number = torch.tensor(3.0)
    assert checked_loss(number) is number
    with pytest.raises(SpecError, match=r"shape \(2, 1\).*loss_reduction='sum'"):
        checked_loss(torch.ones(2, 1))
    with pytest.raises(SpecError, match="float"):
        checked_loss(3.0)
    with pytest.raises(SpecError, match=r"complex64.*one real number"):  # scaled gradients could not carry its phase
        checked_loss(torch.ones((), dtype=torch.complex64))


class _Transfers(TorchDispatchMode):
    """Counts the reads of numbers from tensors, because such a read waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("loss", [Wrapped(), nn.CrossEntropyLoss(ignore_index=1)], ids=["own", "pytorch"])
def test_reading_targets_waits_as_often_for_many_micro_batches(
    loss: nn.Module, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    for chunks in (2, 6):
        reads: list[int] = []
        monkeypatch.setattr(
            Tensor, "tolist", lambda self, read=Tensor.tolist, reads=reads: reads.append(1) or read(self)
        )
        pipe, _ = piped(chain(4, 3), loss=loss, executor="serial", checkpoint=checkpoint, chunks=chunks)
        with _Transfers() as transfers:
            pipe(rows(6, 4), target=torch.tensor([0, 1, 2, 0, 2, 2])).backward()
        monkeypatch.undo()
        counts.append(transfers.count + len(reads))
    assert counts[0] == counts[1] > 0


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:called a synchronizing CUDA operation")
def test_on_a_gpu_a_step_waits_as_often_for_many_micro_batches() -> None:
    counts: list[int] = []
    for chunks in (2, 6):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pipe = Pipe(model, chunks=chunks, devices=["cuda:0"] * 2, loss=Wrapped(), executor="serial")
        x, target = torch.randn(6, 4, device="cuda:0"), torch.arange(6, device="cuda:0") % 3
        pipe(x, target=target).backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                pipe(x, target=target).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in seen))
    assert counts[0] == counts[1] > 0
