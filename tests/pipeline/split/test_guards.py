"""Guards of a recording, code that it refuses, and faults that the comparison with forward() finds."""

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, rows
from torchweft.core.errors import BatchError, GuardError, InPlaceError, SplitError
from torchweft.pipeline.split import lengths, program_cache, user_code

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(autouse=True)
def _type_checks_are_library_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not treat the type checks of the tests, which wrap functions of the recorder, as user code."""
    monkeypatch.setattr(user_code, "_LIBRARIES", (*user_code._LIBRARIES, "<"))


class Between(nn.Module):
    """Two blocks with code between them."""

    def __init__(self, code: Callable[["Between", Tensor], Any], **buffers: Tensor) -> None:
        super().__init__()
        self.first, self.second, self.code = nn.Linear(4, 4), nn.Linear(4, 4), code
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.code(self, self.first(x)))


class TwoBlocks(nn.Module):
    """Two blocks. Subclasses define forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def cut(model: nn.Module, *split: str, chunks: int = 2, **settings: Any) -> weft.Pipe:
    names = list(split) or ["second"]
    return weft.Pipe(model, chunks=chunks, split=names, devices=["cpu"] * (len(names) + 1), **settings)


def test_guards_on_inputs_choose_a_program_per_micro_batch() -> None:
    class Masked(TwoBlocks):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.first(x)
            return self.second(y) if bool(mask.all()) else self.second(y * mask)

    model = Masked()
    pipe = cut(model)
    mask = torch.ones(4, 4)
    mask[2, 1] = 0
    for kind in (torch.ones(4, 4), mask, mask.flip(0)):
        expected = torch.cat([model(rows(4, 4)[:2], kind[:2]), model(rows(4, 4)[2:], kind[2:])])
        assert_close(pipe(rows(4, 4), mask=kind), expected)
    assert pipe.statistics()["recordings"] == 2


def test_guarded_list_can_be_empty_and_has_a_length() -> None:
    class Listed(TwoBlocks):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            fill = table[table.sum(1) > 0][:, table.sum(0) > 0].tolist()
            return self.second(self.first(x) * len(fill))

    model = Listed()
    pipe = cut(model, chunks=1)
    for table in ([[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]):
        assert_close(pipe(rows(2, 4), table=torch.tensor(table)), model(rows(2, 4), torch.tensor(table)))
    assert pipe.statistics()["recordings"] == 3


def test_glue_is_named_by_function_and_line_without_folders() -> None:
    pipe = cut(Between(lambda _, x: x + 1), sample=rows(2, 4))
    assert re.fullmatch(r"add \((tests/pipeline/split/)?test_guards.py:\d+\)", pipe.routes[0].name)


def test_decision_on_activations_is_refused_with_its_line() -> None:
    """The decision is made between blocks. The error names file and line."""
    model = Between(lambda _, x: x if x.sum() > 0 else -x)
    with torch.no_grad():
        model.first.bias.fill_(50.0)
    pipe = cut(model, chunks=1)
    pipe(rows(2, 4))
    with torch.no_grad():
        model.first.bias.fill_(-50.0)
    with pytest.raises(GuardError, match=r"__bool__ \(.*test_guards.py:\d+\).*was True when recorded and is False now"):
        pipe(rows(2, 4))


@pytest.mark.parametrize("verify", [True, False])
def test_a_number_of_rows_that_depends_on_data_is_refused(verify: bool) -> None:
    """Every step is refused in which the number for all rows is not that of the recording. Both recordings can have the
    same number, because the rows that the second one repeats need not count."""
    model = Between(lambda _, x: x * (1 + x[x[:, 0] > 0].shape[0]))
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(4))
        model.first.bias.zero_()
    x = torch.ones(8, 4)
    x[::4, 0] = x[3::4, 0] = -1
    pipe = cut(model, verify=verify)
    for _ in range(2):
        with pytest.raises(BatchError, match=r"(depends on other rows|calls mul .* with 5 instead of 3 for all rows)"):
            pipe(x)


def test_python_result_of_a_block_is_refused() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x, int((x > 0).sum())

    model = Between(lambda self, x: self.counting(x)[0] * self.counting(x)[1])
    model.counting = Counting()
    with pytest.raises(BatchError, match=r"counting returns . together with tensors"):
        cut(model, chunks=8, verify=False)(torch.randn(8, 4))


def test_comparison_finds_python_that_no_recording_sees() -> None:
    calls = iter(range(1, 100))
    model = Between(lambda _, x: x * next(calls))
    with pytest.raises(BatchError, match=r"(?s)verify=False.*mul \(.*test_guards.py:\d+\): its rows differ"):
        cut(model)(rows(4, 4))
    cut(model, verify=False)(rows(4, 4))
    first = iter([True])
    with pytest.raises(BatchError, match="second: its rows differ"):
        cut(Between(lambda _, x: x * 2 if next(first, False) else x + 1))(rows(4, 4))


def test_the_comparison_sees_buffers_too() -> None:
    calls = iter(range(1, 100))
    model = Between(lambda self, x: x + 0 * self.seen.add_(next(calls)), seen=torch.zeros(()))
    with pytest.raises(SplitError, match=r"buffer seen differs, by 1\.0e"):
        cut(model)(rows(4, 4))


def test_comparison_changes_neither_model_nor_generators() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    results = []
    for verify in (True, False):
        torch.manual_seed(5)
        pipe = cut(copy.deepcopy(model), "3", verify=verify)
        output = pipe(rows(4, 4))
        results.append([output, *pipe.buffers(), torch.rand(1)])
        assert all(parameter.grad is None for parameter in pipe.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for half in rows(4, 4).split(2):
        plain(half)
    assert_close(results[0][1:4], list(plain.buffers()))


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


_twice = _Twice.apply


class _Cache:
    def __init__(self) -> None:
        self.kept = torch.zeros(2)


class _Storing(nn.Module):
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        return x


def _halved_gradient(_: Between, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def _swap(self: Between, x: Tensor) -> Tensor:
    self.table = self.table + 1
    return x


def _to_data(_: Between, x: Tensor) -> Tensor:
    x.data = x.data * 2
    return x


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (lambda _, x: x + torch.from_numpy(x.detach().numpy()), r"takes a tensor out of PyTorch's sight \(numpy\)"),
        (lambda _, x: x * random.random(), "Python's or NumPy's random numbers"),
        (lambda _, x: _twice(x), "_Twice.apply, whose own backward would be lost"),
        (lambda _, x: torch.vmap(torch.sin)(x), "runs under vmap or grad"),
        (lambda _, x: torch.autograd.grad(x.sum(), x)[0], "asks torch.autograd for a gradient"),
        (lambda self, x: self.storing(x, _Cache()), "_Cache carries tensors between blocks.*use_cache=False"),
        (_halved_gradient, "attaches a hook to a tensor's gradient"),
        (_swap, "replaces a buffer by another tensor"),
        (_to_data, r"forward sets \.data between blocks"),
    ],
)
def test_code_that_cannot_be_recorded_is_refused_by_name(code: Any, words: str) -> None:
    model = Between(code, table=torch.ones(4))
    model.storing = _Storing()
    with pytest.raises(SplitError, match=words):
        cut(model)(rows(4, 4))


def _scaled_without_gradient(_: Between, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean(-1, keepdim=True)
    return x * scale


@pytest.mark.parametrize("code", [lambda _, x: _Twice.apply(x), _scaled_without_gradient])
def test_functions_and_no_grad_between_blocks_keep_gradients(code: Any) -> None:
    model = Between(code)
    plain = copy.deepcopy(model)
    cut(model)(rows(4, 4)).sum().backward()
    plain(rows(4, 4)).sum().backward()
    assert_close(model.first.weight.grad, plain.first.weight.grad)


def test_a_write_through_a_view_into_another_stage_is_refused() -> None:
    class Writing(TwoBlocks):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * 1
            z = self.second(y)
            y.view(-1).add_(1.0)
            return z + y

    with pytest.raises(InPlaceError, match="writes through a view into a tensor of another stage"):
        cut(Writing())(rows(4, 4))


def test_a_buffer_that_counts_in_several_stages() -> None:
    class Counting(TwoBlocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = self.first(x)
            x = self.second(x)
            self.calls += 1
            return x * self.calls

    model = Counting()
    plain = copy.deepcopy(model)
    pipe = cut(model)
    for _ in range(3):
        assert_close(pipe(rows(4, 4)), plain(rows(4, 4)))
    assert_close(model.calls, plain.calls)


def test_split_points_that_make_no_stage_are_refused() -> None:
    with pytest.raises(SplitError, match="the stage before 'first' would be empty"):
        cut(Between(lambda _, x: x), "first")(rows(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.unused = nn.ModuleList([nn.Linear(4, 4)])
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    with pytest.raises(SplitError, match="never called the split points"):
        cut(model, "unused.0")(rows(4, 4))


def test_backward_hooks_of_a_module_that_is_cut_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(SplitError, match=r"attach the hooks to submodules that are not cut:\n  - 0 \(Sequential\)"):
        cut(model, "0.1")(rows(4, 4))


def test_a_tensor_that_leaves_a_block_by_a_hook_opens_the_block() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            handle = self.first[0].register_forward_hook(lambda _, __, output: seen.append(output))
            x = self.second(self.first(x))
            handle.remove()
            return x + seen[0]

    model = Collecting()
    plain = copy.deepcopy(model)
    cut(model)(rows(4, 4)).square().sum().backward()
    plain(rows(4, 4)).square().sum().backward()
    assert_close(model.first[0].weight.grad, plain.first[0].weight.grad)


def test_programs_are_dropped_and_churn_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "PROGRAMS", 2)
    monkeypatch.setattr(lengths, "_RECORDINGS", 0)  # so that no program is derived from a dropped one
    pipe = cut(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "1", chunks=1)
    for count in (2, 3):
        pipe(rows(count, 4))
    with pytest.warns(UserWarning, match="shapes, arguments, or values that the code"):
        pipe(rows(4, 4))
    pipe(rows(4, 4))
    assert pipe.statistics()["recordings"] == 3
    pipe(rows(2, 4))
    assert pipe.statistics()["recordings"] == 4
