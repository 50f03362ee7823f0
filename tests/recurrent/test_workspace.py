"""Memory between calls is reused, bounded and returned, and a network does not leak."""

import gc
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.recurrent.recurrent_cases import BACKENDS, grid, planned
from torchweft.recurrent.cpp import workspace
from torchweft.recurrent.cpp.workspace import WorkspacePool, pool


def test_returned_buffer_is_reused_for_similar_sizes() -> None:
    pool = WorkspacePool()
    one, other = pool.acquire(100_000), pool.acquire(150_000)
    pool.give(other)
    pool.give(one)
    assert pool.acquire(99_000) is one, "the smallest buffer that is large enough"
    assert pool.acquire(90_000) is other
    pool.give(other)
    assert pool.acquire(30_000) is not other
    assert pool.acquire(150_000, "work") is not other
    assert pool.statistics()["made"] == 4 and pool.statistics()["reused"] == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 20)), max_size=30))
def test_buffers_have_one_owner_and_idle_bytes_count(steps: list[tuple[int, int]]) -> None:
    pool = WorkspacePool()
    out: list[torch.Tensor] = []
    idle: dict[int, int] = {}
    for choice, size in steps:
        if choice < 3 or not out:
            buffer = pool.acquire(size)
            assert buffer.numel() >= size
            assert buffer.numel() <= 2 * max(1.125 * size + 64, 128)
            assert all(buffer is not other for other in out)
            idle.pop(id(buffer), None)
            out.append(buffer)
        else:
            buffer = out.pop()
            pool.give(buffer)
            idle[id(buffer)] = buffer.numel()
    assert pool.statistics()["held_bytes"] == sum(idle.values())
    pool.release()
    assert pool.statistics()["held_bytes"] == 0


def test_pool_keeps_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 8_000_000
    monkeypatch.setattr(workspace, "_free_memory", lambda: free)
    monkeypatch.setattr(workspace, "_ASK_AGAIN", -1.0)
    pool = WorkspacePool()
    buffers = [pool.acquire(400_000) for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.statistics()["limit_bytes"] == 1_000_000
    assert 400_000 < pool.statistics()["held_bytes"] <= 1_000_000, "two of the four"
    free = 800_000
    pool.give(torch.empty(1024, dtype=torch.uint8))
    assert pool.statistics()["held_bytes"] == 1024, "under pressure idle buffers are freed first"


def test_out_of_memory_frees_the_pool_and_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkspacePool()
    pool.give(pool.acquire(1000))
    empty, tries = torch.empty, []

    def failing(*args: object, **kwargs: object) -> torch.Tensor:
        tries.append(pool.statistics()["held_bytes"])
        if len(tries) == 1:
            raise RuntimeError("not enough memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", failing)
    assert pool.acquire(50_000).numel() >= 50_000
    assert tries[0] > 0 and tries[1] == 0


@pytest.mark.long
@grid(memory=["full", "states", "sqrt"], backend=BACKENDS)
def test_repeated_calls_do_not_leak(backend: str, memory: str) -> None:
    net = planned(nn.GRUCell(3, 4), backend, memory=memory)
    x = torch.randn(140, 2, 3, requires_grad=True)

    def call() -> None:
        net(x).outputs.sum().backward()
        net(x)  # a graph that is never walked
        with torch.no_grad():
            net(x)

    def count_resources() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return tensors, len(os.listdir("/proc/self/fd")), pool.statistics()["held_bytes"]

    for _ in range(3):
        call()
    before, made = count_resources(), pool.statistics()["made"]
    for _ in range(5):
        call()
    after = count_resources()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 1
    if backend == "c" and memory != "full":
        assert pool.statistics()["made"] == made, "every workspace is reused"
