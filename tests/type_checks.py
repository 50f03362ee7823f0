"""Warnings of the run-time type checks, and a context without them to test how torchweft validates arguments."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager


class TypeCheckWarning(UserWarning):
    """A function of torchweft got or returned a value of an undeclared type. In the tests, all warnings are errors."""


@contextmanager
def without_type_checks() -> Generator[None]:
    """Ignore the warnings of the type checks within the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TypeCheckWarning)
        yield
