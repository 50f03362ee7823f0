"""Every model has the loss and gradients of a plain loop over the same micro-batches, with its own keys and ties."""

import copy
import importlib.util
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, assert_gradients_equal
from tests.pipeline.split.zoo import HUGGING, OWN, REFUSED, WHOLE, Dropping, Entry, gpt2, speech, wav2vec2
from torchweft.core.errors import BatchError, SplitError
from torchweft.core.pytree import flatten, unflatten
from torchweft.pipeline.microbatch import plan_split

pytestmark = pytest.mark.usefixtures("double")

CHUNKS = 4
EXECUTORS, CHECKPOINTS, SCHEDULES = ("serial", "threads", "graph"), ("never", "always"), ("gpipe", "1f1b")
WAYS = list(product(EXECUTORS, CHECKPOINTS, SCHEDULES))
Way = tuple[str, str, str]
GRIDS: dict[str, dict[Way, tuple[int, ...]]] = {  # values: rows of the batches. With 1f1b, the loss is inside
    "pairs": {  # every pair of settings
        ("serial", "never", "gpipe"): (8, 5),
        ("serial", "always", "1f1b"): (7, 4),
        ("threads", "always", "gpipe"): (7, 4),
        ("threads", "never", "1f1b"): (8, 5),
        ("graph", "never", "gpipe"): (7, 4),
        ("graph", "always", "1f1b"): (8, 5),
    },
    # All settings. Every pair of them meets every number of rows.
    "ways": {way: ((8, 5), (7, 4))[(n // 4 + n // 2 + n) % 2] for n, way in enumerate(WAYS)},
    "whole": {way: (8, 7, 5, 4) for way in WAYS},
}
absent = importlib.util.find_spec("transformers") is None
needs_transformers = pytest.mark.skipif(absent, reason="there is no transformers; the extra `hf` brings it")


def entry(name: str) -> Entry:
    return OWN[name] if name in OWN else HUGGING[name]


def looped(model: nn.Module, spec: Entry, inputs: dict[str, Any]) -> Tensor:
    """The loss of a plain loop over the same micro-batches. The gradients are left in the model."""
    plan, leaves = plan_split(inputs, 1 if spec.whole else CHUNKS)
    total = torch.zeros(())
    for rows, piece in zip(plan.sizes, plan.split(leaves), strict=True):
        share = rows / sum(plan.sizes) if spec.reduction == "mean" else 1
        loss = spec.loss(model(**unflatten(plan.structure, piece))) * share
        loss.backward()
        total += loss.detach()
    return total


def piped(pipe: weft.Pipe, spec: Entry, inputs: dict[str, Any]) -> Tensor:
    """The loss that the pipe or the model computes, or else the loss of the output, by micro-batches."""
    if pipe.schedule == "1f1b":
        (rows,) = {len(x) for x in inputs.values() if isinstance(x, Tensor)}
        return pipe(**inputs, target=torch.zeros(rows))
    output = pipe(**inputs)
    if hasattr(output, "loss"):
        return spec.loss(output)
    plan, _ = plan_split(inputs, CHUNKS)
    leaves, structure = flatten(output)
    columns = [x.split(plan.sizes) if isinstance(x, Tensor) else [x] * len(plan.sizes) for x in leaves]
    losses = [spec.loss(unflatten(structure, list(piece))) for piece in zip(*columns, strict=True)]
    return sum(
        (loss * rows / sum(plan.sizes) for loss, rows in zip(losses, plan.sizes, strict=True)), start=torch.zeros(())
    )


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, "pairs") for name in OWN),
        *(pytest.param(name, "pairs", marks=needs_transformers) for name in ("gpt2", "llama", "bert", "vit")),
        *(pytest.param(name, "whole", marks=pytest.mark.long) for name in OWN),
        *(pytest.param(name, "ways", marks=[pytest.mark.long, needs_transformers]) for name in HUGGING),
    ],
)
def test_any_model_trains_in_stages_as_in_a_plain_loop(name: str, grid: str) -> None:
    spec = entry(name)
    torch.manual_seed(0)
    original = spec.make().train()
    expected: dict[tuple[int, ...], list[Any]] = {}
    for sizes in set(GRIDS[grid].values()):
        plain, expected[sizes] = copy.deepcopy(original), []
        for count in sizes:
            torch.manual_seed(count)
            inputs = spec.inputs(count)
            plain.zero_grad()
            loss = looped(plain, spec, inputs)
            gradients = {key: parameter.grad for key, parameter in plain.named_parameters()}
            expected[sizes].append((inputs, loss, gradients, [buffer.clone() for buffer in plain.buffers()]))
    for (executor, checkpoint, schedule), sizes in GRIDS[grid].items():
        model = copy.deepcopy(original)
        settings: dict[str, Any] = {"executor": executor, "checkpoint": checkpoint, "schedule": schedule}
        inside: dict[str, Any] = {}
        if schedule == "1f1b":
            inside = {"loss": lambda output, _: spec.loss(output), "loss_reduction": spec.reduction}
        elif spec.stated:
            inside = {"loss_reduction": spec.reduction, "verify": False}
        devices = ["cpu"] * (len(spec.split) + 1)
        pipe = weft.Pipe(model, chunks=CHUNKS, split=spec.split, devices=devices, **settings, **inside)
        assert list(pipe.state_dict()) == list(original.state_dict())
        assert [id(parameter) for parameter in pipe.parameters()] == [id(parameter) for parameter in model.parameters()]
        for inputs, loss, gradients, buffers in expected[sizes]:
            model.zero_grad()
            result = piped(pipe, spec, inputs)
            result.backward()
            assert_close(result.detach(), loss)
            assert_close({key: parameter.grad for key, parameter in pipe.named_parameters()}, gradients)
            assert_close(list(model.buffers()), buffers)


@pytest.mark.parametrize("make", [Dropping, pytest.param(lambda: gpt2(0.3), marks=needs_transformers)])
def test_dropout_is_bit_equal_under_all_executors(make: Any) -> None:
    torch.manual_seed(0)
    original = make()
    inputs = {"x": torch.randn(7, 8)} if isinstance(original, Dropping) else {"input_ids": torch.randint(0, 50, (7, 9))}
    split = ["blocks.1", "blocks.3"] if isinstance(original, Dropping) else ["transformer.h.2"]
    results: list[list[Tensor | None]] = []
    for way in ({"executor": "serial"}, {"executor": "threads"}, {"executor": "threads", "checkpoint": "always"}):
        model = copy.deepcopy(original)
        pipe = weft.Pipe(model, chunks=3, split=split, devices=["cpu"] * (len(split) + 1), **way)
        torch.manual_seed(3)
        output = pipe(**inputs)
        main = output if isinstance(output, Tensor) else output.logits
        main.square().sum().backward()
        results.append([main.detach(), *(parameter.grad for parameter in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True) if a is not None and b is not None)


@needs_transformers
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_cut_exactly_are_refused(name: str) -> None:
    """If outputs or decisions do not follow the rows, every step raises an error with the reason."""
    make, inputs, split, words = REFUSED[name]
    pipe = weft.Pipe(make().train(), chunks=CHUNKS, split=[split], devices=["cpu"] * 2)
    for _ in range(2):
        with pytest.raises((BatchError, SplitError), match=words):
            pipe(**inputs(8))


@needs_transformers
@pytest.mark.parametrize("name", WHOLE)
def test_losses_that_compare_rows_are_those_of_all_rows(name: str) -> None:
    make, inputs, split = WHOLE[name]
    torch.manual_seed(0)
    model = make().train()
    plain = copy.deepcopy(model)
    pipe = weft.Pipe(model, chunks=CHUNKS, split=[split], devices=["cpu"] * 2)
    for rows in (8, 7):
        batch = inputs(rows)
        plain.zero_grad()
        pipe.zero_grad()
        result, expected = pipe(**batch).loss, plain(**batch).loss
        result.backward()
        expected.backward()
        assert_close(result, expected, 1e-10)
        assert_gradients_equal(pipe, plain, 1e-10)


@needs_transformers
def test_a_summed_loss_of_hugging_face_is_that_of_all_rows() -> None:
    """The default of CTC models is a sum. A mean over micro-batches would be too small."""
    model = wav2vec2()
    plain, inputs = copy.deepcopy(model), speech(7)
    pipe = weft.Pipe(model, chunks=CHUNKS, split=["wav2vec2.encoder.layers.1"], devices=["cpu"] * 2)
    result, expected = pipe(**inputs).loss, plain(**inputs).loss
    result.backward()
    expected.backward()
    assert_close(result, expected, 1e-5)  # it computes its loss in float32
    assert_gradients_equal(pipe, plain, 1e-6)
