"""Fixtures: experts on real servers, or in-process stand-ins."""

from collections.abc import Iterator

import pytest

from tests.experts.mixture.commit_cases import Experts
from tests.experts.mixture.mixture_cases import GRID, World


@pytest.fixture
def experts() -> Iterator[Experts]:
    with Experts() as started:
        yield started


@pytest.fixture
def world() -> Iterator[World]:
    with World(GRID) as started:
        yield started
