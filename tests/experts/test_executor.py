"""Batches are joined in memory that is used again; a client's fault stays that client's, bit for bit."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.expert_cases import TROUBLE, Troubled, X, fussy_backend, rows, task, weights, work
from weft.core.spec import TensorSpec
from weft.experts import ExpertBackend, Guards
from weft.experts.batch_executor import BatchBuffers, TaskFault, isolate_faults, split_outputs
from weft.experts.errors import GradientError, ModuleExitError
from weft.experts.schema import Column, FlatSchema
from weft.experts.task import Results, Task, split_rows

COLUMNS = FlatSchema(
    [Column("x", TensorSpec((None, None), torch.float32)), Column("g", TensorSpec((None,), torch.float32), casts=True)]
)


@given(st.lists(st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3)), max_size=6))
def test_rows_come_out_as_they_went_in_and_buffers_only_grow(history: list[tuple[list[int], int]]) -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    seen = 0
    for sizes, width in history:
        tasks = [task(torch.randn(width, n).T, torch.randn(n, dtype=torch.float64)) for n in sizes]
        joined = buffers.join_rows(tasks)
        assert [tensor.dtype for tensor in joined] == [torch.float32] * 2
        dealt = split_rows(joined, sizes)
        for each, (x, g) in zip(tasks, dealt, strict=True):
            assert torch.equal(x, each.tensors[0]) and torch.equal(g, each.tensors[1].float())
        assert buffers.nbytes >= max(seen, sum(tensor.nbytes for tensor in joined))
        seen = buffers.nbytes
        addresses = [tensor.data_ptr() for tensor in joined if tensor.numel()]
        again = [tensor.data_ptr() for tensor in buffers.join_rows(tasks) if tensor.numel()]
        assert addresses == again and buffers.nbytes == seen


def test_what_looks_into_a_buffer_is_copied_out_and_nothing_else() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    one = task(torch.ones(2, 3), torch.ones(2))
    x, _ = buffers.join_rows([one])
    other = torch.ones(2)
    [[copied, same]] = split_outputs([x.T, other], [one], buffers.storage_addresses())
    assert copied.data_ptr() != x.data_ptr() and torch.equal(copied, x.T)
    assert same.data_ptr() == other.data_ptr()
    fresh, _ = buffers.join_rows([one], fresh=True)
    assert fresh.untyped_storage().data_ptr() not in buffers.storage_addresses()


def test_what_a_module_does_to_the_shape_of_its_input_does_not_reach_the_next_batch() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    one = task(torch.arange(4.0).view(2, 2), torch.ones(2))
    for _ in range(3):
        x, _ = buffers.join_rows([one])
        assert torch.equal(x, one.tensors[0]) and not x.requires_grad
        x.t_()
        x.requires_grad_()


@pytest.mark.cuda
def test_on_a_gpu_buffers_are_pinned_and_results_come_back_to_the_cpu() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cuda", 0))
    for size in (1000, 10, 2000):
        tasks = [task(torch.randn(size, 7), torch.randn(size, dtype=torch.float64)) for _ in range(3)]
        joined = buffers.join_rows(tasks)
        assert all(tensor.is_cuda for tensor in joined)
        back = split_outputs(joined, tasks, buffers.storage_addresses())
        assert all(torch.equal(got[0], each.tensors[0]) for got, each in zip(back, tasks, strict=True))
    assert all(flat.is_pinned() for flat in buffers._buffers)


FAULTS = ("none", "forward", "backward", "nan input", "nan gradient", "inf gradient", "huge gradient")
ERRORS = {"forward": Troubled, "backward": Troubled}


def spoiled(fault: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
    x, g = rows(size, seed), rows(size, seed + 1000)
    if fault == "forward":
        x[-1, 0] = TROUBLE
    if fault == "backward":
        g[0, 2] = TROUBLE
    if fault == "nan input":
        x[0, 1] = float("nan")
    if fault in ("nan gradient", "inf gradient"):
        g[-1, -1] = float(fault[:3])
    if fault == "huge gradient":
        g[0, 0] = 1e200
    return x, g


batches = st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(1, 3)), min_size=1, max_size=5)


@given(st.lists(batches, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_others_and_the_expert_are_as_if_the_offender_had_never_come(
    history: list[list[tuple[str, int]]], dropout: bool, norm: bool
) -> None:
    history = [[(fault, size + 1) for fault, size in batch] for batch in history]  # batch norm wants two rows
    one, other = (fussy_backend(dropout=0.5 * dropout, norm=norm) for _ in range(2))
    for number, batch in enumerate(history):
        tasks = [task(*spoiled(f, n, 10 * number + i)) for i, (f, n) in enumerate(batch)]
        clean = [each for each, (fault, _) in zip(tasks, batch, strict=True) if fault == "none"]
        answers = one.executor.backward(tasks)
        expected = iter(other.executor.backward(clean) if clean else [])
        for answer, (fault, _) in zip(answers, batch, strict=True):
            if fault == "none":
                wanted = next(expected)
                assert isinstance(answer, list) and isinstance(wanted, list)
                assert all(torch.equal(a, b) for a, b in zip(answer, wanted, strict=True))
            else:
                assert isinstance(answer, ERRORS.get(fault, GradientError)), (fault, answer)
        assert weights(one) == weights(other)
    assert all(parameter.grad is None for parameter in one.module.parameters())


@given(st.lists(st.tuples(st.booleans(), st.integers(2, 4)), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_a_forward_leaves_no_trace_in_others_rows(batch: list[tuple[bool, int]], dropout: bool, norm: bool) -> None:
    one, other = (fussy_backend(dropout=0.5 * dropout, norm=norm) for _ in range(2))
    before = weights(one)
    tasks = [task(spoiled("forward" if bad else "none", n, i)[0]) for i, (bad, n) in enumerate(batch)]
    answers = one.executor.forward(tasks)
    clean = [each for each, (bad, _) in zip(tasks, batch, strict=True) if not bad]
    expected = iter(other.executor.forward(clean) if clean else [])
    for answer, (bad, size) in zip(answers, batch, strict=True):
        if bad:
            assert isinstance(answer, Troubled)
        else:
            wanted = next(expected)
            assert isinstance(answer, list) and isinstance(wanted, list)
            assert torch.equal(answer[0], wanted[0]) and answer[0].shape == (size, 4)
    assert weights(one) == before


def test_the_error_says_whose_task_it_was_and_where_but_holds_nothing_of_the_batch(backend: ExpertBackend) -> None:
    x, _ = spoiled("forward", 2, 0)
    answers = backend.executor.forward([task(rows(1, 0)), task(x, client="ann")])
    error = answers[1]
    assert isinstance(error, Troubled)
    whose, where = error.__notes__
    assert whose == "in expert 'fussy', a task of 2 rows from client 'ann'"
    assert "expert_cases.py" in where and 'raise Troubled("in forward")' in where
    assert error.__traceback__ is None and error.__context__ is None


def test_failures_leave_no_cycles_behind(backend: ExpertBackend) -> None:
    good_x, g = rows(1, 0), rows(1, 1)
    bad_x, _ = spoiled("forward", 1, 0)

    def fail() -> None:
        futures = [backend.forward_pool.submit_task(x) for x in (good_x, bad_x)]
        futures += [backend.backward_pool.submit_task(x, h) for x, h in ((bad_x, g), (good_x, g * torch.nan))]
        work(backend)
        assert [future.exception(0) is None for future in futures] == [True, False, False, False]

    fail()
    gc.collect()
    gc.disable()
    try:
        tensors = sum(type(each) is Tensor for each in gc.get_objects())
        for _ in range(5):
            fail()
        assert sum(type(each) is Tensor for each in gc.get_objects()) <= tensors
        assert not any(type(each) in (Task, Troubled) for each in gc.get_objects())
    finally:
        gc.enable()


class Exits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise SystemExit(3)
        return x * 1


def test_a_module_cannot_end_the_process() -> None:
    backend = ExpertBackend("exits", Exits(), args_schema=(X,))
    [answer] = backend.executor.forward([task(rows(2, 0))])
    assert isinstance(answer, ModuleExitError) and "SystemExit(3)" in str(answer)


def test_where_nobody_fails_alone_every_task_is_a_batch_of_its_own() -> None:
    ran: list[int] = []

    def attempt(tasks: Any) -> Any:
        if len(tasks) > 1:
            raise MemoryError("too many")

        def apply() -> list[Results]:
            ran.append(tasks[0].number)
            return [[torch.tensor([tasks[0].number])]]

        return apply

    tasks = [Task((), 1) for _ in range(3)]
    answers, failures = isolate_faults(tasks, attempt, "small")
    assert [answer[0].item() for answer in answers if isinstance(answer, list)] == [each.number for each in tasks]
    assert ran == [each.number for each in tasks]
    assert failures == 1


@pytest.mark.parametrize("limit", ["max_norm", "max_output_norm"])
def test_a_gradient_beyond_the_limit_is_refused_and_the_others_step(limit: str) -> None:
    one, other = (fussy_backend(guards=Guards(**{limit: 100.0})) for _ in range(2))
    small = task(rows(2, 0), rows(2, 1))
    large = task(rows(2, 2), rows(2, 3) * 1e4)
    answers = one.executor.backward([small, large])
    other.executor.backward([small])
    assert isinstance(answers[0], list) and isinstance(answers[1], GradientError)
    assert "norm" in str(answers[1]) and "wanted at most 100" in str(answers[1])
    assert weights(one) == weights(other) and one.steps == 1
    assert one.statistics().refused_gradients == {"gradient": 1}


def test_what_applying_raises_is_final_and_a_known_offender_is_left_out_at_once() -> None:
    attempts: list[int] = []
    tasks = [Task((), 1) for _ in range(4)]

    def fail() -> None:
        raise ValueError("half applied")

    def attempt(given: Any) -> Any:
        attempts.append(len(given))
        if tasks[1] in given:
            raise TaskFault({tasks[1]: ValueError("mine")})
        return fail if len(given) == 2 else lambda: [[] for _ in given]

    answers, _ = isolate_faults(tasks, attempt, "known")
    assert [isinstance(answer, ValueError) for answer in answers] == [False, True, False, False]
    answers, _ = isolate_faults(tasks[2:], attempt, "half")
    assert attempts == [4, 3, 2] and all(isinstance(answer, ValueError) for answer in answers)
