"""No call leaves a reference cycle, even if it fails, so its tensors are freed without garbage collection."""

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import pytest
import torch
from torch import Tensor

from tests.experts.client.test_retry import CALL, ClosedAfter
from tests.experts.client.transport_cases import FakeTransport, reached
from tests.experts.expert_cases import TROUBLE, fussy_backend, rows
from tests.experts.mixture.commit_cases import Experts
from tests.experts.mixture.mixture_cases import WIDTH, numbers
from torchweft.core.errors import SpecError, WeftError
from torchweft.experts import GraphBudget
from torchweft.experts.client import NEVER, RemoteExpert, Retry
from torchweft.experts.errors import LostError, UnreachableError
from torchweft.experts.wire import Kind

SWIFT = Retry(attempts=3, first=0.001)


def uncollected_objects(work: Callable[[], object]) -> Counter[str]:
    """Numbers of tensors, frames and torchweft's objects, by type, that only a collection frees."""
    work()  # objects that are created once do not count
    gc.disable()
    gc.freeze()  # nor do existing objects
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(item).__name__ for item in gc.garbage if _is_counted(item))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def _is_counted(item: object) -> bool:
    return isinstance(item, Tensor | FrameType) or type(item).__module__.startswith("torchweft")


def train(remote: RemoteExpert, factor: float = 1.0, columns: int = 4, *, value: float = 1.0) -> None:
    with suppress(WeftError):
        (remote((rows(2, 0, columns) * 0 + value).requires_grad_()) * factor).sum().backward()


@pytest.mark.parametrize(
    ("keep", "accumulate", "lose", "factor"),  # every pair of values once
    [
        (False, False, [], 1.0),
        (True, True, [], float("inf")),
        (False, True, ["reply"], 1.0),
        (True, False, ["reply"], float("inf")),
        (False, True, ["request", "reply"], float("inf")),
        (True, False, ["request", "reply"], 1.0),
        (False, False, ["request"] * 9, float("inf")),
        (True, True, ["request"] * 9, 1.0),
    ],
)
def test_expert_call_leaves_no_reference_cycle(keep: bool, accumulate: bool, lose: list[str], factor: float) -> None:
    with reached("fake", fussy_backend(keep_graphs=GraphBudget(1 << 20))) as (_, transport):
        assert isinstance(transport, FakeTransport)
        remote = RemoteExpert("fussy", transport, retry=SWIFT, keep_graph=keep, accumulate=accumulate)

        def work() -> None:
            transport.lose = list(lose)
            train(remote, factor)
            transport.lose = []
            remote.discard()

        assert not uncollected_objects(work)


@pytest.mark.parametrize("close", [False, True])
def test_error_of_an_earlier_attempt_leaves_no_cycle(close: bool) -> None:
    transport = ClosedAfter(close)

    def work() -> None:
        transport.caller.closed.clear()
        transport.fates += [LostError("x"), LostError("y"), UnreachableError("z")]
        call = CALL._replace(tensors=[rows(2, 0)])
        with pytest.raises(LostError, match="y"):
            transport.caller.call(call, 15.0)

    assert not uncollected_objects(work)


def test_failed_call_leaves_no_reference_cycle() -> None:
    with reached("local", fussy_backend()) as (_, transport):
        unknown, remote = RemoteExpert("nobody", transport), RemoteExpert("fussy", transport)
        late = RemoteExpert("fussy", transport, timeout=1e-6)
        with pytest.raises(SpecError):
            remote(rows(2, 0, 7))
        for work in (
            partial(train, unknown),
            partial(train, late),
            partial(train, remote, columns=7),
            partial(train, remote, value=TROUBLE),
            partial(train, remote, TROUBLE),
        ):
            assert not uncollected_objects(work)


@pytest.mark.parametrize(
    ("kind", "lost", "strict", "retry"),  # every pair of values once
    [
        (Kind.FORWARD, 0, False, NEVER),
        (Kind.BACKWARD, 0, True, SWIFT),
        (Kind.FORWARD, 1, True, NEVER),
        (Kind.BACKWARD, 1, False, SWIFT),
        (Kind.FORWARD, 9, False, SWIFT),
        (Kind.BACKWARD, 9, True, NEVER),
    ],
)
def test_mixture_call_leaves_no_reference_cycle(kind: Kind, lost: int, strict: bool, retry: Retry) -> None:
    with Experts() as experts:
        make = experts.strict if strict else experts.mixture
        mixture = make(accumulate=False, retry=retry)

        def work() -> None:
            experts.fates.clear()
            experts.lose(kind, "ffn.1", *["request"] * lost)
            with suppress(WeftError):
                mixture(numbers(16, WIDTH).requires_grad_()).sum().backward()

        assert not uncollected_objects(work)


def test_uncollected_objects_finds_a_cycle() -> None:
    def work() -> None:
        cycle: list[object] = [torch.ones(3)]
        cycle.append(cycle)

    assert uncollected_objects(work) == {"Tensor": 1}
