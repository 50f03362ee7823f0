"""Experts for a test, over servers or made up."""

from collections.abc import Iterator

import pytest

from tests.experts.mixture.commit_cases import Experts
from tests.experts.mixture.mixture_cases import GRID, World


@pytest.fixture
def experts() -> Iterator[Experts]:
    with Experts() as found:
        yield found


@pytest.fixture
def world() -> Iterator[World]:
    with World(GRID) as found:
        yield found
