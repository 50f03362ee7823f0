"""A fence: of two owners only the newer one writes."""

import pytest

from weft.experts.directory import Fence, FencedError, LocalDirectory


def test_an_owner_that_was_replaced_is_refused_for_this_expert_only() -> None:
    fence = Fence()
    fence.admit("a", 7)
    fence.admit("a", 7)
    fence.admit("a", 12)
    with pytest.raises(FencedError, match="token 7 for expert 'a' is old: an owner with token 12"):
        fence.admit("a", 7)
    fence.admit("b", 1)
    assert (fence.largest("a"), fence.largest("b"), fence.largest("c")) == (12, 1, None)


def test_a_server_that_slept_through_its_lease_is_refused() -> None:
    now, fence = [0.0], Fence()
    directory = LocalDirectory(clock=lambda: now[0])
    asleep = directory.claim("a", directory.declare("a", "x:1", 1.0))
    fence.admit("a", asleep.token)
    now[0] = 2.0
    awake = directory.claim("a", directory.declare("a", "y:1", 1.0))
    fence.admit("a", awake.token)
    with pytest.raises(FencedError):
        fence.admit("a", asleep.token)
    directory.close()
