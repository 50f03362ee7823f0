"""Context without the run-time type checks of the test suite, to test how torchweft validates arguments itself."""

from collections.abc import Generator
from contextlib import contextmanager

import jaxtyping


@contextmanager
def without_type_checks() -> Generator[None]:
    """Disable the run-time type checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
