"""The library as its users have it: without the run-time checks of types, which see a wrong argument before
torchweft.
"""

from collections.abc import Generator
from contextlib import contextmanager

import jaxtyping


@contextmanager
def without_type_checks() -> Generator[None]:
    """No run-time checks of types inside."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
