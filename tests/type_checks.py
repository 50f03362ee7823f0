"""Run-time checks of types, which see a wrong argument before torchweft, and torchweft as its users have it."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager


class TypeCheckWarning(UserWarning):
    """A function of torchweft got or returned another type than it declares. In the tests, all warnings are errors."""


@contextmanager
def without_type_checks() -> Generator[None]:
    """Ignore the checks within the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TypeCheckWarning)
        yield
