"""What several test modules ask for by name."""

import pytest

from tests.experts.certificates import Authority


@pytest.fixture(scope="session")
def authority() -> Authority:
    """It signed the certificates of servers and clients."""
    return Authority()
