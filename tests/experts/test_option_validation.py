"""Invalid counts and seconds in options are rejected at once, not later in a waiting thread."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import pytest
import torch

from tests.experts.mixture.test_arguments import GOOD
from torchweft.core.errors import UsageError
from torchweft.core.spec import TensorSpec
from torchweft.core.validation import MAX_SECONDS, Validator
from torchweft.experts import AccumulationOptions, GraphBudget, Guards, IdempotencyOptions
from torchweft.experts.client import RemoteExpert
from torchweft.experts.client.retry import Retry
from torchweft.experts.client.transport import PendingCalls
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.discovery.etcd import EtcdDirectory
from torchweft.experts.mixture.fanout import MixtureOptions
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.schema import Column, FlatSchema
from torchweft.experts.server.options import ServerOptions
from torchweft.experts.task import Answer, Task
from torchweft.experts.task_pool import PoolOptions, Runtime, TaskPool
from torchweft.experts.wire import Call, Header, Kind

CALL = Call(Header(kind=Kind.FORWARD, call_id=1, uid="a"))


def answers(tasks: Sequence[Task]) -> Sequence[Answer]:
    return [list(task.tensors) for task in tasks]


def etcd(timeout: float) -> None:
    EtcdDirectory(["127.0.0.1:1"], timeout=timeout).close()


def call(timeout: float) -> None:
    pending = PendingCalls("nowhere:1")
    try:
        pending.register(CALL, timeout)
    finally:
        pending.close()


def mixture(name: str, seconds: Any) -> None:
    with Validator("invalid mixture options") as check:
        MixtureOptions(**{**GOOD, name: seconds}).check(check)


TIMES: dict[Callable[..., object], str] = {
    PoolOptions: "timeout",
    ServerOptions: "longest_seconds lease_seconds checkpoint_seconds drain_seconds",
    ReplicaOptions: "follow_seconds first_seconds",
    Retry: "longest attempt_seconds",
    IdempotencyOptions: "max_age max_result_age",
    AccumulationOptions: "seconds orphan_seconds",
}


def option(kind: Callable[..., object], name: str) -> Callable[[Any], object]:
    return lambda seconds: kind(**{name: seconds})


SECONDS: dict[str, Callable[[Any], object]] = {
    **{f"{kind.__name__}.{name}": option(kind, name) for kind, names in TIMES.items() for name in names.split()},
    "RemoteExpert.timeout": lambda s: RemoteExpert("a", "b:1", timeout=s).close(),
    **{
        f"MixtureOptions.{name}": partial(mixture, name)
        for name in ("forward_timeout", "backward_timeout", "timeout_after_k_min")
    },
    "GraphBudget.seconds": lambda s: GraphBudget(1, seconds=s),
    "declare.ttl": lambda s: LocalDirectory().declare("a", "b:1", s),
    "EtcdDirectory.timeout": etcd,
    "call's timeout": call,
}

COUNT: list[Any] = [-1, 1.5, "1", True, [], float("nan")]
NUMBER: list[Any] = [-1, "x", [], True, float("nan")]
WRONG: list[tuple[type, str, list[Any]]] = [
    (PoolOptions, "max_rows", [*COUNT, 0, None]),
    (PoolOptions, "max_client_tasks", [*COUNT, 0]),
    (PoolOptions, "timeout", [*NUMBER, None]),
    (PoolOptions, "max_batch_delay", [*NUMBER, None]),
    (GraphBudget, "nbytes", [*COUNT, 0, None]),
    (GraphBudget, "seconds", [*NUMBER, 0, None]),
    (IdempotencyOptions, "max_result_bytes", [*COUNT, None]),
    (IdempotencyOptions, "max_keys", [*COUNT, 0, None]),
    (IdempotencyOptions, "max_client_keys", [*COUNT, 0]),
    (IdempotencyOptions, "max_age", [*NUMBER, 0, None]),
    (AccumulationOptions, "max_client_mini_batches", [*COUNT, 0]),
    (AccumulationOptions, "mini_batches", [*COUNT, 0, None]),
    (AccumulationOptions, "seconds", [*NUMBER, 0, None]),
    (Retry, "attempts", [0, 2.5, True]),
    (Retry, "growth", [0.5, float("inf"), "2", None]),
    (Retry, "first", [3.0, -1.0, "a", float("nan")]),
    (Retry, "longest", [None, float("nan")]),
    (Retry, "attempt_seconds", [0.0]),
    (Guards, "finite", [0, 1, "no", None, []]),
    (Guards, "max_norm", [*NUMBER, 0]),
    (Guards, "max_output_norm", [*NUMBER, 0]),
]


def test_options_of_wrong_types_are_rejected_by_name(subtests: pytest.Subtests) -> None:
    """Calls ``__post_init__`` directly, because the run-time type checks would reject the values first."""
    for kind, name, values in WRONG:
        with subtests.test(kind=kind, name=name, values=values):
            for value in values:
                options = object.__new__(kind)
                for one in fields(kind):
                    object.__setattr__(options, one.name, 1 if one.default is MISSING else one.default)
                options.__post_init__()
                object.__setattr__(options, name, value)
                with pytest.raises(UsageError, match=rf"  - {name} is .*, wanted"):
                    options.__post_init__()


def test_seconds_beyond_the_longest_wait_are_rejected(subtests: pytest.Subtests) -> None:
    for option, wait in SECONDS.items():
        with subtests.test(option=option):
            for seconds in (-1.0, float("inf"), float("nan"), 1e300):
                with pytest.raises(
                    UsageError, match=rf"{option.rpartition('.')[2]} is {seconds!r}".replace("+", r"\+")
                ):
                    wait(seconds)
            wait(MAX_SECONDS)
            assert threading.TIMEOUT_MAX > MAX_SECONDS


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda: ServerOptions(connections=0, lease_seconds=-1.0), ["connections is 0", "lease_seconds is -1"]),
        (lambda: ReplicaOptions(follow_steps=0, state_bytes=-1), ["follow_steps is 0", "state_bytes is -1"]),
        (lambda: Retry(attempts=0, longest=float("inf")), ["attempts is 0", "longest is inf"]),
        (lambda: PoolOptions(max_batch_delay=float("inf"), max_tasks=0), ["max_batch_delay is inf", "max_tasks is 0"]),
        (lambda: PoolOptions(min_batch_size=9, max_batch_size=8), ["min_batch_size is 9, but max_batch_size 8"]),
        (lambda: ServerOptions(total_bytes=0), ["total_bytes is 0"]),
        (lambda: GraphBudget(0, seconds=0.0), ["nbytes is 0", "seconds is 0"]),
        (lambda: AccumulationOptions(0, seconds=0.0), ["mini_batches is 0", "seconds is 0"]),
        (lambda: IdempotencyOptions(-1, 0.0, 0), ["max_result_bytes is -1", "max_result_age is 0", "max_keys is 0"]),
        (lambda: Guards(max_norm=0.0, max_output_norm=-1.0), ["max_norm is 0", "max_output_norm is -1"]),
    ],
)
def test_all_faults_of_options_are_listed(made: Callable[[], object], names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        made()
    assert [name for name in names if name not in str(caught.value)] == []


def test_pool_with_the_longest_timeout_blocks_no_other() -> None:
    columns = FlatSchema([Column("x", TensorSpec((None, 1), torch.float32))])
    slow = TaskPool("slow", answers, columns, PoolOptions(4, timeout=MAX_SECONDS))
    quick = TaskPool("quick", answers, columns)
    row = torch.zeros(1, 1)
    with Runtime([slow, quick]) as runtime:
        waits = slow.submit_task(row)
        for _ in range(3):  # after the first answer, the runtime has seen the waiting task
            assert quick.submit_task(row).result(5) is not None
        assert not waits.done()
        assert runtime.shutdown(timeout=float("inf")), "the shutdown runs accepted tasks without waiting"
        assert waits.result(0) is not None
