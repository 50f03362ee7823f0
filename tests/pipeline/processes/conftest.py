"""Ranks that the tests of a session share."""

from collections.abc import Callable, Iterator

import pytest

from tests.pipeline.processes.launch import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """The ranks of a group of so many, started once and again when a test has broken them."""
    pools: dict[int, Ranks] = {}

    def find(size: int) -> Ranks:
        if size not in pools or pools[size].broken:
            if size in pools:
                pools[size].close()
            pools[size] = Ranks(size)
        return pools[size]

    yield find
    for pool in pools.values():
        pool.close()
