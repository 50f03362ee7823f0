"""One rule for the spans of time, the counts, the switches and the kinds of values that users give as options.

``float("inf")`` looks like "never", and NaN passes many a comparison. But both, like all beyond some three hundred
years, fail much later: in a thread that works for others too (`threading.TIMEOUT_MAX`), or in gRPC's clock. And True
is an int, but nobody's number of anything.
"""

from typing import Any, TypeGuard

LONGEST = 1e9
"""Seconds, about thirty years: who wants to wait for ever says this."""


def seconds_fault(name: str, value: Any, *, zero: bool = False, none: bool = False) -> list[str]:
    """What is wrong with so many seconds, in words; nothing, if a thread can wait for them.

    Args:
        name: what the user calls them.
        value: what was given, of whatever type.
        zero: whether 0 makes sense.
        none: whether None does.
    """
    if value is None and none:
        return []
    if is_number(value) and (0 < value <= LONGEST or (zero and value == 0)):
        return []
    least = "at least 0" if zero else "above 0"
    return [f"{name} is {value!r}, wanted seconds, {least} and at most {LONGEST:g}{', or None' * none}"]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether this is an int or a float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def count_fault(name: str, value: Any, *, zero: bool = False, none: bool = False) -> list[str]:
    """What is wrong with a count, in words; ``zero`` and ``none``: whether 0 and None make sense."""
    least = 0 if zero else 1
    if (value is None and none) or (is_whole(value) and value >= least):
        return []
    return [f"{name} is {value!r}, wanted an int of at least {least}{', or None' * none}"]


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether this is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def kind_fault(name: str, value: Any, kind: type, wanted: str, *, none: bool = False) -> list[str]:
    """What is wrong with a value that must be of this kind, in words: ``wanted`` says how one gets it."""
    if isinstance(value, kind) or (value is None and none):
        return []
    seen = repr(value) if value is None or isinstance(value, str | int | float) else f"of type {type(value).__name__}"
    return [f"{name} is {seen}, wanted {wanted}{', or None' * none}"]


def switch_fault(name: str, value: Any) -> list[str]:
    """What is wrong with what should be True or False, in words."""
    return [] if isinstance(value, bool) else [f"{name} is {value!r}, wanted True or False"]
