"""What several test modules of servers ask for by name."""

import pytest

from tests.experts.server.raw import Authority


@pytest.fixture(scope="session")
def authority() -> Authority:
    """It signed the certificates of servers and clients."""
    return Authority()
