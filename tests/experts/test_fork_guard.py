"""Only the process that created an object finalizes it, not a forked child."""

import gc

from tests.processes import forked, only_with_fork
from torchweft.experts.fork_guard import ForkGuard, finalizer

pytestmark = only_with_fork


class Owner:
    """Object that can be weakly referenced."""


def test_finalizer_runs_once() -> None:
    ended: list[int] = []
    owner = Owner()
    finalizer(owner, ended.append, 1)
    end = finalizer(owner, ended.append, 2)
    end()
    end()
    assert ended == [2]
    del owner
    gc.collect()
    assert ended == [2, 1]


def test_child_neither_ends_nor_frees_inherited_objects() -> None:
    ended: list[str] = []

    class Held:
        def __del__(self) -> None:
            ended.append("freed")

    owner, home, held = Owner(), ForkGuard(), Held()
    first, second = finalizer(owner, ended.append, "called"), finalizer(owner, lambda held: ended.append("gone"), held)
    del held

    def child() -> bool:
        nonlocal owner
        first()
        del owner
        gc.collect()
        return ended == [] and not home.here and ForkGuard().here and not second.alive

    assert forked(child)
    assert home.here and second.alive
    second()
    assert ended == ["gone", "freed"]
