"""Shapes that change at nearly every step: the results are those of the model, with few verifications."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, assert_gradients_equal
from tests.pipeline.split.test_zoo import needs_transformers
from tests.pipeline.split.zoo import gpt2
from torchweft.core.errors import BatchError
from torchweft.pipeline.microbatch import micro_sizes
from torchweft.pipeline.split import model_programs

pytestmark = pytest.mark.usefixtures("double")

WIDTH = 4
SIZES = [(count, length) for count in range(1, 13) for length in range(4, 41)]  # rows and lengths of mini-batches
_random = random.Random(3)
LENGTHS = [10, 12, 14, 16, 11, 17, 26, 33]
NUMBERS = {length: _random.randint(1, 9) for length in range(41)}
Code = Callable[[Tensor], Tensor]


class Between(nn.Module):
    """Code between two layers, on x of (rows, length, WIDTH)."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.first, self.second, self.code = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), code

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.code(self.first(x)))


class Scaled(torch.autograd.Function):
    """Identity with a scaled gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def repeated(x: Tensor) -> Tensor:
    for _ in range(x.shape[1] // 8):
        x = x.sin()
    return x


def masked(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    return (positions[:, None] >= positions[None]).to(x) @ x.reshape(-1, x.shape[1], WIDTH)[: len(x)]


CODES: dict[str, Code] = {
    "branch": lambda x: x * 2 if x.shape[1] > 16 else x + 1,
    "branch of gradients alone": lambda x: x.detach() * x if x.shape[1] > 16 else x * x,
    "branch by rows": lambda x: x.cos() if len(x) > 2 else x,
    "clamp": lambda x: x + x[:, : min(x.shape[1], 16)].sum(1, keepdim=True),
    "clamp of gradients alone": lambda x: Scaled.apply(x, min(x.shape[1], 16)),
    "loop": repeated,
    "square root": lambda x: x / math.sqrt(x.shape[1]),
    "float": lambda x: x * (0.1 + 0.37 * x.size(1)),
    "table": lambda x: x * NUMBERS[x.shape[1]],
    "table by remainder": lambda x: x * (2, 3, 5)[x.shape[1] % 3],
    "mask": masked,
    "rows and lengths": lambda x: x * (x.shape[0] * x.shape[1]) + (x.shape[1] - 1) - 2 * x.shape[0],
    "quotient": lambda x: x[:, x.shape[1] // 3 :].mean(1, keepdim=True) + x,
    "write": lambda x: x.contiguous().mul_(x.shape[1] - 1),
}


def cut(model: nn.Module, **settings: Any) -> weft.Pipe:
    options = {"chunks": 4, "split": ["second"], "devices": ["cpu"] * 2, "executor": "serial", **settings}
    return weft.Pipe(model, **options)


def plain_step(model: nn.Module, x: Tensor, chunks: int = 4) -> Tensor:
    """The outputs of the model itself for the same micro-batches."""
    return torch.cat([model(piece) for piece in x.split(micro_sizes(len(x), chunks))])


def some_sizes(count: int) -> list[tuple[int, int]]:
    return random.Random(0).sample(SIZES, count)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The programs that are verified, with repetitions."""
    seen: list[object] = []

    def counted(recorder: Any, program: Any, *call: Any) -> Any:
        seen.append(program)
        return plain(recorder, program, *call)

    plain = model_programs.verify
    monkeypatch.setattr(model_programs, "verify", counted)
    return seen


BY_ROWS = ("branch by rows", "rows and lengths")  # of the micro-batch


@pytest.mark.parametrize("name", CODES)
def test_code_that_depends_on_sizes_is_exact(name: str) -> None:
    """Outputs and gradients are those of the model for each micro-batch, for any Python code on rows and lengths."""
    model = Between(CODES[name])
    plain = copy.deepcopy(model)
    pipe = cut(model, verify=name not in BY_ROWS)
    for count, length in some_sizes(24):
        x = torch.randn(count, length, WIDTH)
        expected, result = plain_step(plain, x), pipe(x)
        assert_close(result, expected)
        for net, output in ((plain, expected), (model, result)):
            net.zero_grad()
            output.square().mean().backward()
        assert_gradients_equal(model, plain, 1e-10)


@pytest.mark.parametrize("name", BY_ROWS)
def test_results_that_depend_on_the_number_of_rows_are_refused(name: str) -> None:
    """Micro-batches would give other results than all rows. With one micro-batch, there is no difference."""
    model, x = Between(CODES[name]), torch.randn(8, 5, WIDTH)
    for _ in range(2):
        with pytest.raises(BatchError, match=r"(?s)depends on other rows.*(test_changing_lengths\.py:\d+\)|second)"):
            cut(model)(x)
    assert_close(cut(model, chunks=1)(x), model(x))


@pytest.mark.long
@needs_transformers
def test_lengths_of_a_language_model_are_exact(verified: list[object]) -> None:
    """Padded batches of random sizes have the logits of the model, with few recordings and verifications."""
    model = gpt2().eval()
    pipe = weft.Pipe(model, chunks=4, split=["transformer.h.2"], devices=["cpu"] * 2)
    for count, length in some_sizes(40):
        tokens = torch.randint(3, 50, (count, min(length, 16)))
        mask = torch.ones_like(tokens)
        mask[: count // 2, tokens.shape[1] // 2 :] = 0
        parts = zip(*(tensor.split(micro_sizes(count, 4)) for tensor in (tokens, mask)), strict=True)
        expected = torch.cat([model(input_ids=ids, attention_mask=kept).logits for ids, kept in parts])
        assert_close(pipe(input_ids=tokens, attention_mask=mask).logits, expected, 1e-10)
    # Micro-batches have 1 to 3 rows, and some of them are padded.
    assert len(verified) <= 12 and pipe.statistics()["recordings"] <= 30


def test_sizes_alone_need_few_verifications(verified: list[object]) -> None:
    """After two recordings, programs are derived. After three verified programs, the rest are not verified."""
    pipe = cut(Between(CODES["float"]))
    for length in range(4, 24):
        pipe(torch.randn(8, length, WIDTH))
    assert (len(verified), pipe.statistics()["recordings"]) == (3, 2)


def test_another_branch_is_verified_by_itself(verified: list[object]) -> None:
    pipe = cut(Between(CODES["branch"]))
    for length in (4, 5, 6, 7, 20, 21, 22, 23):
        pipe(torch.randn(8, length, WIDTH))
    assert len(verified) == 6


class Padding(nn.Module):
    """Pads the length to a multiple of 8, or removes every second position."""

    def __init__(self, *, halves: bool) -> None:
        super().__init__()
        self.layer, self.halves = nn.Linear(WIDTH, WIDTH), halves

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, ::2] if self.halves else nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))
        return self.layer(x)


class Labelled(nn.Module):
    """A loss at the end of forward(), which divides by a length that its block makes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block, self.second = nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.block(self.first(x))
        x = self.second(x * x.shape[1] ** 0.5)[:, : labels.shape[1]]
        kept = labels[:, : x.shape[1]] >= 0
        return (x.square().sum(-1) * kept).sum() / (kept.sum() + x.shape[1])


@pytest.mark.parametrize(("block", "recordings"), [("tanh", 2), ("halves", 6), ("pads", 5)])
def test_sizes_that_are_computed_wrongly_are_recorded(block: str, recordings: int) -> None:
    model = Labelled(nn.Tanh() if block == "tanh" else Padding(halves=block == "halves"))
    plain = copy.deepcopy(model)
    pipe = cut(model)
    for length in LENGTHS:
        x, labels = torch.randn(8, length, WIDTH), torch.randint(-1, 2, (8, length))
        expected, result = plain(x, labels), pipe(x, labels)
        assert_close(result, expected)
        for net, loss in ((plain, expected), (model, result)):
            net.zero_grad()
            loss.backward()
        assert_gradients_equal(model, plain, 1e-12)
    assert pipe.statistics()["recordings"] == recordings


def test_numbers_that_change_need_no_recording() -> None:
    """Plain arguments of forward() and attributes that its code reads."""

    class Scaling(Between):
        ramp = 1.0

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.second(self.first(x) * (scale + self.ramp))

    model = Scaling(masked)
    pipe = cut(model)
    for scale in (1.0, 2.5, -3.0, 0.0):
        for model.ramp in (0.1, 0.2):
            x = torch.randn(8, 5, WIDTH)
            assert_close(pipe(x, scale), model(x, scale))
    assert pipe.statistics()["recordings"] == 1
