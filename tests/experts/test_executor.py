"""Batches are joined in reused memory, and a faulty task fails alone, without changing one bit of the others."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.experts.expert_cases import TROUBLE, Troubled, fussy_backend, rows, task, weights, work
from torchweft.core.spec import TensorSpec
from torchweft.experts import ExpertBackend, Guards
from torchweft.experts.batch_executor import BatchBuffers, TaskFault, isolate_faults, split_outputs
from torchweft.experts.errors import GradientError, ModuleExitError
from torchweft.experts.schema import Column, FlatSchema
from torchweft.experts.task import Answer, Results, Task, split_rows

COLUMNS = FlatSchema(
    [Column("x", TensorSpec((None, None), torch.float32)), Column("g", TensorSpec((None,), torch.float32), casts=True)]
)


@given(st.lists(st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3)), max_size=6))
def test_joined_rows_split_back_and_buffers_only_grow(history: list[tuple[list[int], int]]) -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    largest = 0
    for sizes, width in history:
        tasks = [task(torch.randn(width, n).T, torch.randn(n, dtype=torch.float64)) for n in sizes]
        joined = buffers.join_rows(tasks)
        for one, (x, g) in zip(tasks, split_rows(joined, sizes), strict=True):
            assert torch.equal(x, one.tensors[0]) and torch.equal(g, one.tensors[1].float())
        assert buffers.nbytes >= max(largest, sum(tensor.nbytes for tensor in joined))
        largest = buffers.nbytes
        addresses = [tensor.data_ptr() for tensor in joined if tensor.numel()]
        for tensor in joined:  # a module can change the shape of its input, but not of the next batch's
            tensor.unsqueeze_(0).requires_grad_()
        again = buffers.join_rows(tasks)
        assert addresses == [tensor.data_ptr() for tensor in again if tensor.numel()] and buffers.nbytes == largest
        assert [(tensor.dim(), tensor.requires_grad) for tensor in again] == [(2, False), (1, False)]


def test_only_views_of_reused_memory_are_copied() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cpu"))
    one, other = task(torch.ones(2, 3), torch.ones(2)), torch.ones(2)
    x, _ = buffers.join_rows([one])
    [[copied, same]] = split_outputs([x.T, other], [one], buffers.storage_addresses())
    assert copied.data_ptr() != x.data_ptr() and torch.equal(copied, x.T)
    assert same.data_ptr() == other.data_ptr()
    fresh, _ = buffers.join_rows([one], fresh=True)
    assert fresh.untyped_storage().data_ptr() not in buffers.storage_addresses()


@pytest.mark.cuda
def test_gpu_batches_survive_reuse_of_pinned_buffers() -> None:
    buffers = BatchBuffers(COLUMNS, torch.device("cuda", 0))
    for size in (1000, 10, 2000):
        tasks = [task(torch.randn(size, 7), torch.randn(size, dtype=torch.float64)) for _ in range(3)]
        joined = buffers.join_rows(tasks)
        assert all(tensor.is_cuda for tensor in joined)
        results = split_outputs(joined, tasks, buffers.storage_addresses())
        assert all(torch.equal(result[0], one.tensors[0]) for result, one in zip(results, tasks, strict=True))
    assert all(buffer.is_pinned() for buffer in buffers._buffers)


FAULTS = ("none", "forward", "backward", "nan input", "nan gradient", "inf gradient", "huge gradient")
ERRORS = {"forward": Troubled, "backward": Troubled}


def faulty_rows(fault: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
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


def assert_clean(answers: list[Answer], faults: list[str], expected: list[Answer]) -> None:
    """Assert an error for each faulty task, and for the others the bytes of a batch without the faulty ones."""
    clean = iter(expected)
    for answer, fault in zip(answers, faults, strict=True):
        if fault == "none":
            other = next(clean)
            assert isinstance(answer, list) and isinstance(other, list) and all(map(torch.equal, answer, other))
        else:
            assert isinstance(answer, ERRORS.get(fault, GradientError)), (fault, answer)


def without_faults(tasks: list[Task], faults: list[str]) -> list[Task]:
    return [one for one, fault in zip(tasks, faults, strict=True) if fault == "none"]


batches = st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(2, 4)), min_size=1, max_size=5)


@given(st.lists(batches, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_faulty_backwards_leave_no_trace(history: list[list[tuple[str, int]]], dropout: bool, norm: bool) -> None:
    one, other = (fussy_backend(dropout=0.5 * dropout, norm=norm) for _ in range(2))
    for number, batch in enumerate(history):
        tasks = [task(*faulty_rows(fault, size, 10 * number + i)) for i, (fault, size) in enumerate(batch)]
        faults = [fault for fault, _ in batch]
        clean = without_faults(tasks, faults)
        assert_clean(one.executor.backward(tasks), faults, other.executor.backward(clean) if clean else [])
        assert weights(one) == weights(other)
    assert all(parameter.grad is None for parameter in one.module.parameters())


@given(
    st.lists(st.tuples(st.sampled_from(["none", "forward"]), st.integers(2, 4)), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_faulty_forwards_leave_no_trace(batch: list[tuple[str, int]], dropout: bool, norm: bool) -> None:
    one, other = (fussy_backend(dropout=0.5 * dropout, norm=norm) for _ in range(2))
    before = weights(one)
    tasks = [task(faulty_rows(fault, size, i)[0]) for i, (fault, size) in enumerate(batch)]
    faults = [fault for fault, _ in batch]
    clean = without_faults(tasks, faults)
    assert_clean(one.executor.forward(tasks), faults, other.executor.forward(clean) if clean else [])
    assert weights(one) == before


def test_error_names_task_and_origin_but_holds_no_tensors(backend: ExpertBackend) -> None:
    x, _ = faulty_rows("forward", 2, 0)
    error = backend.executor.forward([task(rows(1, 0)), task(x, client="ann")])[1]
    assert isinstance(error, Troubled)
    sender, origin = error.__notes__
    assert sender == "in expert 'fussy', a task of 2 rows from client 'ann'"
    assert "expert_cases.py" in origin and 'raise Troubled("in forward")' in origin
    assert error.__traceback__ is None and error.__context__ is None


def test_failures_leave_no_reference_cycles(backend: ExpertBackend) -> None:
    good_x, g = rows(1, 0), rows(1, 1)
    bad_x, _ = faulty_rows("forward", 1, 0)

    def fail() -> None:
        futures = [backend.forward_pool.submit_task(x) for x in (good_x, bad_x)]
        futures += [backend.backward_pool.submit_task(x, h) for x, h in ((bad_x, g), (good_x, g * torch.nan))]
        work(backend)
        assert [future.exception(0) is None for future in futures] == [True, False, False, False]

    fail()
    gc.collect()
    gc.disable()
    try:
        tensors = sum(type(one) is Tensor for one in gc.get_objects())
        for _ in range(5):
            fail()
        assert sum(type(one) is Tensor for one in gc.get_objects()) <= tensors
        assert not any(type(one) in (Task, Troubled) for one in gc.get_objects())
    finally:
        gc.enable()


def test_module_cannot_end_the_process() -> None:
    def attempt(tasks: Any) -> Any:
        raise SystemExit(3)

    [answer], _ = isolate_faults([Task((), 1)], attempt, "exits")
    assert isinstance(answer, ModuleExitError) and "SystemExit(3)" in str(answer)


def test_batch_that_fails_only_as_a_whole_is_run_task_by_task() -> None:
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
    numbers = [one.number for one in tasks]
    assert [answer[0].item() for answer in answers if isinstance(answer, list)] == ran == numbers
    assert failures == 1


def test_known_offender_is_left_out_and_apply_is_never_retried() -> None:
    attempts: list[int] = []
    tasks = [Task((), 1) for _ in range(4)]

    def fail() -> None:
        raise ValueError("half applied")

    def attempt(batch: Any) -> Any:
        attempts.append(len(batch))
        if tasks[1] in batch:
            raise TaskFault({tasks[1]: ValueError("mine")})
        return fail if len(batch) == 2 else lambda: [[] for _ in batch]

    answers, _ = isolate_faults(tasks, attempt, "known")
    assert [isinstance(answer, ValueError) for answer in answers] == [False, True, False, False]
    answers, _ = isolate_faults(tasks[2:], attempt, "half")
    assert attempts == [4, 3, 2] and all(isinstance(answer, ValueError) for answer in answers)


@pytest.mark.parametrize("limit", ["max_norm", "max_output_norm"])
def test_gradient_beyond_the_limit_fails_alone(limit: str) -> None:
    one, other = (fussy_backend(guards=Guards(**{limit: 100.0})) for _ in range(2))
    small, large = task(rows(2, 0), rows(2, 1)), task(rows(2, 2), rows(2, 3) * 1e4)
    answers = one.executor.backward([small, large])
    other.executor.backward([small])
    assert isinstance(answers[0], list) and isinstance(answers[1], GradientError)
    assert "norm" in str(answers[1]) and "wanted at most 100" in str(answers[1])
    assert weights(one) == weights(other) and one.steps == 1
    assert one.statistics().refused_gradients == {"gradient": 1}
