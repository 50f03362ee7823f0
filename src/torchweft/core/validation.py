"""Validation of arguments: all faults of one call are collected and raised as one error.

    with Validator("invalid pool options") as check:
        check.count("max_batch_size", max_batch_size)
        check.seconds("timeout", timeout, optional=True)
        check.require(low <= high, f"low is {low}, wanted at most high, which is {high}")

Seconds have an upper bound. Infinity, NaN and anything beyond about three hundred years would fail much later: in a
thread that also works for other callers (`threading.TIMEOUT_MAX`), or in gRPC's clock. Booleans are rejected where a
number is expected, although `bool` subclasses `int`.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import TracebackType
from typing import Any, TypeGuard, TypeVar

from torchweft.core.errors import SpecError, UsageError, WeftError, join_faults

Result = TypeVar("Result")

MAX_SECONDS = 1e9  # seconds, about thirty years, for "unlimited"


class Validator:
    """Collects faults and raises them as one error at the end of its block.

    Args:
        title: first line of the error, without a colon: "invalid pool options".
        error: class of the error.

    Each check returns whether the value is valid, for checks that depend on others. An exception raised inside the
    block passes through, and the faults are dropped. If all faults are errors that `call` has caught, a single one is
    raised unchanged, and several of one class are raised as that class.
    """

    def __init__(self, title: str, error: type[WeftError] = UsageError) -> None:
        self.title = title
        self.error = error
        self.faults: list[str] = []
        self.errors: list[WeftError] = []

    def __enter__(self) -> "Validator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or not (self.faults or self.errors):
            return
        if len(self.errors) == 1 and not self.faults:
            raise self.errors[0]
        kinds = {*map(type, self.errors), *([self.error] if self.faults else [])}
        faults = [*self.faults, *(str(caught).replace("\n", "\n    ") for caught in self.errors)]
        raise (kinds.pop() if len(kinds) == 1 else self.error)(join_faults(f"{self.title}:", faults))

    def call(self, check: Callable[..., Result], *args: Any) -> Result | None:
        """Return ``check(*args)``, or None if it raised a `WeftError`, which counts as a fault."""
        try:
            return check(*args)
        except WeftError as error:
            self.errors.append(error)
            return None

    def add(self, *faults: str) -> None:
        self.faults += faults

    def mismatch(self, *faults: str) -> None:
        """Add values that do not match their spec. With any of these, the error is a SpecError."""
        if faults:
            self.error = SpecError
            self.faults += faults

    def require(self, valid: bool, fault: str) -> bool:
        """Any condition, with a description of the fault: name, seen, wanted."""
        if not valid:
            self.faults.append(fault)
        return valid

    def count(self, name: str, value: Any, *, least: int = 1, optional: bool = False) -> bool:
        """An int of at least ``least``, or None if optional."""
        return self._expect(is_whole(value) and value >= least, name, value, f"an int of at least {least}", optional)

    def number(
        self, name: str, value: Any, *, least: float = 0.0, most: float | None = None, optional: bool = False
    ) -> bool:
        """An int or float from ``least`` to ``most``, and not NaN."""
        fits = is_number(value) and value >= least and (most is None or value <= most)
        wanted = f"a number of at least {least:g}" if most is None else f"a number from {least:g} to {most:g}"
        return self._expect(fits, name, value, wanted, optional)

    def seconds(self, name: str, value: Any, *, zero: bool = False, optional: bool = False) -> bool:
        """A span of time for which a thread can wait."""
        fits = is_number(value) and (0 < value <= MAX_SECONDS or (zero and value == 0))
        wanted = f"seconds, {'at least' if zero else 'above'} 0 and at most {MAX_SECONDS:g}"
        return self._expect(fits, name, value, wanted, optional)

    def boolean(self, name: str, value: Any) -> bool:
        return self._expect(isinstance(value, bool), name, value, "True or False")

    def instance(
        self, name: str, value: Any, kind: type | tuple[type, ...], wanted: str, *, optional: bool = False
    ) -> bool:
        """A value of this type, which ``wanted`` describes."""
        return self._expect(isinstance(value, kind), name, value, wanted, optional)

    def choice(self, name: str, value: Any, choices: Iterable[Any], *, optional: bool = False) -> bool:
        known = list(choices)
        return self._expect(value in known, name, value, f"one of {', '.join(map(repr, known))}", optional)

    def known(self, names: Iterable[str], allowed: Iterable[str], what: str) -> bool:
        """Names from those that are allowed."""
        known = sorted(allowed)
        unknown = [name for name in names if name not in known]
        self.add(*(f"{what} has {name!r}, known are {', '.join(known)}" for name in unknown))
        return not unknown

    def _expect(self, valid: bool, name: str, value: Any, wanted: str, optional: bool = False) -> bool:
        plain = value is None or isinstance(value, str | bytes | int | float)
        seen = repr(value) if plain else f"of type {type(value).__name__}"
        fits = valid or (value is None and optional)
        return self.require(fits, f"{name} is {seen}, wanted {wanted}{', or None' * optional}")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether this is an int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether this is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def suggest(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: ``; did you mean 'chunks'?``, or nothing if no known name is near."""
    by_lower = {known.lower(): known for known in names}
    return "".join(f"; did you mean {by_lower[near]!r}?" for near in get_close_matches(name.lower(), by_lower, 1))


def uid_fault(uid: Any) -> list[str]:
    return [] if isinstance(uid, str) and uid else [f"uid is {uid!r}, wanted the name that its server knows it by"]


def token_fault(value: Any) -> list[str]:
    """The fault of a token, if any, in words that do not reveal the token."""
    if value is None:
        return []
    if not isinstance(value, str):
        return [f"token is of type {type(value).__name__}, wanted a text"]
    if not value or value != value.strip():
        return ["token is empty, or has white space around it, such as the line break of its file: strip() it"]
    if not (value.isascii() and value.isprintable()):
        return ["token holds characters that no header can carry, wanted printable ASCII"]
    return []
