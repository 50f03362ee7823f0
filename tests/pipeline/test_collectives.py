"""Collectives inside layers run in the order of the schedule, never in an order that depends on threads."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.pipeline.pipe_cases import chain, rows, with_batch_norm
from tests.processes import python
from torchweft import Pipe
from torchweft.core.errors import UsageError


@pytest.fixture(autouse=True)
def two_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fake process group: rank 0 of two processes, whose messages are not received, or the only process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=getattr(request, "param", 2))
    yield
    dist.destroy_process_group()


def tensor_parallel() -> nn.Sequential:
    """Two blocks with weights sharded over all processes."""
    model = nn.Sequential(*chain(4, 8, 4), *chain(4, 8, 4))
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": ColwiseParallel(), "5": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), ways)


def synchronized_norms(*groups: Any) -> nn.Sequential:
    """One SyncBatchNorm per stage, each over its process group."""
    layers = [[*chain(4, 4), nn.SyncBatchNorm(4, process_group=group).double()] for group in groups]
    return nn.Sequential(*(layer for block in layers for layer in block))


def possible_layouts(pipe: Pipe) -> set[str]:
    """Layouts that the first steps can have."""
    pick = pipe._current_runtime().layouts.pick
    return {pick(kind, watched=watched)[0] for kind in range(3) for watched in (False, True)}


@with_batch_norm
@pytest.mark.parametrize("make", [tensor_parallel, lambda: synchronized_norms(None, None)])
def test_threads_are_refused_for_stages_with_collectives(make: Callable[[], nn.Sequential]) -> None:
    pipe = Pipe(make(), chunks=3, devices=["cpu"] * 2, executor="threads")
    for _ in range(2):  # also in later steps
        with pytest.raises(
            UsageError, match=r"executor='serial'(.|\n)*\n  - layer '[01]' of stage 0 (.|\n)*of stage 1"
        ):
            pipe(rows(6, 4))


@with_batch_norm
@pytest.mark.parametrize("make", [tensor_parallel, lambda: synchronized_norms(None, None)])
def test_auto_runs_collectives_in_schedule_order(make: Callable[[], nn.Sequential]) -> None:
    pipe = Pipe(make(), chunks=3, devices=["cpu"] * 2, checkpoint="never")
    assert possible_layouts(pipe) == {"serial"}
    pipe.executor = "graph"
    assert possible_layouts(pipe) == {"graph"}


@pytest.mark.long
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_every_collective_is_waited_for(checkpoint: str) -> None:
    """PyTorch keeps the tensors of a collective without a wait, and warns at the end of the process."""
    script = f"""
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.pipeline.pipe_cases import backward, rows
from tests.pipeline.test_collectives import tensor_parallel
from torchweft import Pipe
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
backward(Pipe(tensor_parallel(), chunks=2, devices=["cpu"] * 2, checkpoint={checkpoint!r}), rows(6, 4))
dist.destroy_process_group()
"""
    seen = python(script)
    assert seen.returncode == 0 and "unwaited" not in seen.stderr, seen.stderr


@with_batch_norm
def test_collectives_that_cannot_interleave_keep_threads() -> None:
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    alone = nn.Sequential(nn.Sequential(*tensor_parallel()), *chain(4, 4))
    for model in (alone, synchronized_norms(one, other).eval(), synchronized_norms(None, None).eval()):
        pipe = Pipe(model, chunks=2, devices=["cpu"] * 2, executor="threads")
        pipe(rows(6, 4))
    pipe = Pipe(synchronized_norms(one, other), chunks=2, devices=["cpu"] * 2, executor="threads")
    with pytest.raises(ValueError, match="GPU"):  # raised by PyTorch, so the layer was run
        pipe(rows(6, 4))
    pipe = Pipe(synchronized_norms(one, one), chunks=2, devices=["cpu"] * 2, executor="threads").eval()
    pipe(rows(6, 4))
    with pytest.raises(UsageError, match="SyncBatchNorm"):
        pipe.train()(rows(6, 4))


@pytest.mark.parametrize("two_processes", [1], indirect=True)
def test_a_single_process_keeps_threads() -> None:
    for make in (tensor_parallel, lambda: synchronized_norms(None, None).eval()):
        assert "threads" in possible_layouts(Pipe(make(), chunks=3, devices=["cpu"] * 2))
