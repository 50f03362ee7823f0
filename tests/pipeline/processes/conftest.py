"""Ranks that are shared by the tests of a session."""

from collections.abc import Callable, Iterator

import pytest

from tests.pipeline.processes.launch import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Function that returns a group of ranks by its size. A group that a test broke is started again."""
    pools: dict[int, Ranks] = {}

    def find(size: int) -> Ranks:
        if size not in pools or pools[size].broken:
            if size in pools:
                pools[size].close()
            pools[size] = Ranks(size, spawned=True)
        return pools[size]

    yield find
    for pool in pools.values():
        pool.close()
