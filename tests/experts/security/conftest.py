"""What several test modules here ask for by name."""

from tests.experts.server.conftest import authority

__all__ = ["authority"]
