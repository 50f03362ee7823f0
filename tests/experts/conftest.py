"""Fixtures of several test modules."""

from pathlib import Path

import pytest

from tests.experts.certificates import Authority
from tests.experts.expert_cases import fussy_backend
from torchweft.experts import ExpertBackend
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.discovery import LocalDirectory


@pytest.fixture(scope="session")
def authority() -> Authority:
    """Certificate authority of servers and clients."""
    return Authority()


@pytest.fixture
def backend() -> ExpertBackend:
    return fussy_backend()


@pytest.fixture
def directory() -> LocalDirectory:
    return LocalDirectory()


@pytest.fixture
def store(tmp_path: Path) -> FolderCheckpointStore:
    return FolderCheckpointStore(tmp_path)
