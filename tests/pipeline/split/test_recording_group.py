"""Shapes that change at nearly every step: every number is the model's, and few recordings need a verification."""

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.pipeline.pipe_cases import assert_close, assert_gradients_equal
from tests.pipeline.split.test_zoo import needs_transformers
from tests.pipeline.split.zoo import gpt2
from weft.core.errors import BatchError, SplitError
from weft.pipeline.microbatch import micro_sizes
from weft.pipeline.split import split_pipe

pytestmark = pytest.mark.usefixtures("double")

WIDTH = 4
SIZES = [(count, length) for count in range(1, 13) for length in range(4, 41)]  # rows and lengths of mini-batches
_random = random.Random(3)
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
    """The identity, whose gradient is multiplied by a number."""

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
    places = torch.arange(x.shape[1])
    return (places[:, None] >= places[None]).to(x) @ x.reshape(-1, x.shape[1], WIDTH)[: len(x)]


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
    """The outputs of the same micro-batches by the model itself."""
    return torch.cat([model(piece) for piece in x.split(micro_sizes(len(x), chunks))])


def some_sizes(count: int) -> list[tuple[int, int]]:
    return random.Random(0).sample(SIZES, count)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry per verification of a program."""
    seen: list[object] = []

    def counted(recorder: Any, program: Any, *call: Any) -> Any:
        seen.append(program)
        return plain(recorder, program, *call)

    plain = split_pipe.verify
    monkeypatch.setattr(split_pipe, "verify", counted)
    return seen


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_code_that_goes_by_sizes_is_exact(code: Code) -> None:
    """Whatever Python computes of rows and lengths, outputs and gradients are those of the model."""
    model = Between(code)
    plain = copy.deepcopy(model)
    pipe = cut(model)
    for count, length in some_sizes(24):
        x = torch.randn(count, length, WIDTH)
        wanted, found = plain_step(plain, x), pipe(x)
        assert_close(found, wanted)
        for each, output in ((plain, wanted), (model, found)):
            each.zero_grad()
            output.square().mean().backward()
        assert_gradients_equal(model, plain, 1e-10)


@needs_transformers
def test_lengths_of_a_language_model_are_exact(verified: list[object]) -> None:
    """Padded batches of random sizes: the model's logits, and far fewer verifications than recordings."""
    model = gpt2().eval()
    pipe = weft.Pipe(model, chunks=4, split=["transformer.h.2"], devices=["cpu"] * 2)
    for count, length in some_sizes(40):
        tokens = torch.randint(3, 50, (count, min(length, 16)))
        mask = torch.ones_like(tokens)
        mask[: count // 2, tokens.shape[1] // 2 :] = 0
        parts = zip(*(each.split(micro_sizes(count, 4)) for each in (tokens, mask)), strict=True)
        wanted = torch.cat([model(input_ids=ids, attention_mask=kept).logits for ids, kept in parts])
        assert_close(pipe(input_ids=tokens, attention_mask=mask).logits, wanted, 1e-10)
    assert len(verified) < pipe.statistics()["recordings"] / 3


def test_sizes_alone_need_no_further_verification(verified: list[object]) -> None:
    """Three verified recordings vouch for the others of their group."""
    pipe = cut(Between(CODES["rows and lengths"]))
    for length in range(4, 24):
        pipe(torch.randn(8, length, WIDTH))
    assert (len(verified), pipe.statistics()["recordings"]) == (3, 20)


@pytest.mark.parametrize("name", ["square root", "table"])
def test_numbers_that_follow_no_size_are_verified(name: str, verified: list[object]) -> None:
    """A float, or an integer that no size explains, may come from anywhere."""
    pipe = cut(Between(CODES[name]))
    for length in range(4, 24):
        pipe(torch.randn(8, length, WIDTH))
    assert len(verified) > 10


def test_an_integer_that_begins_to_change_is_caught() -> None:
    """An integer of Python's own that was constant when its group was proven is not taken for a size."""
    state = {"factor": 2, "step": 0}

    def code(x: Tensor) -> Tensor:
        state["factor"] += state["step"]
        return x * state["factor"]

    pipe = cut(Between(code))
    for length in range(4, 12):
        pipe(torch.randn(8, length, WIDTH))
    state["step"] = 1
    with pytest.raises(SplitError, match="first value that differs"):
        pipe(torch.randn(8, 20, WIDTH))


def test_a_proven_group_still_checks_the_order_of_rows() -> None:
    """Verifications of single micro-batches say nothing about how several are joined."""
    pipe = cut(Between(lambda x: torch.cat([x, x])), chunks=1)
    for length in (*range(4, 9), *range(4, 9)):
        pipe(torch.randn(4, length, WIDTH))
    pipe.chunks = 2
    with pytest.raises(BatchError, match="rows for 2"):
        pipe(torch.randn(4, 30, WIDTH))


def test_variants_in_size_do_not_drop_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that differ in more than sizes have a bound of their own."""
    monkeypatch.setattr(split_pipe, "PROGRAMS", 3)
    pipe = cut(Between(CODES["rows and lengths"]), chunks=1)
    lengths = range(4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (*lengths, *lengths):
            pipe(torch.randn(2, length, WIDTH))
    assert pipe.statistics()["recordings"] == len(lengths)
