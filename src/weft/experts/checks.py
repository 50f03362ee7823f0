"""The rules of `weft.core.validation` for options, one for names of experts, and one for tokens.

A token that no header can carry looks as if the server were not there. Addresses have a rule of their own, see
`weft.experts.address`.
"""

from typing import Any

from weft.core.validation import LONGEST, count_fault, is_number, is_whole, kind_fault, seconds_fault, switch_fault

__all__ = [
    "LONGEST",
    "count_fault",
    "is_number",
    "is_whole",
    "kind_fault",
    "seconds_fault",
    "switch_fault",
    "token_fault",
    "uid_fault",
]


def uid_fault(uid: Any) -> list[str]:
    """What is wrong with the name of an expert."""
    return [] if isinstance(uid, str) and uid else [f"uid is {uid!r}, wanted the name that its server knows it by"]


def token_fault(value: Any) -> list[str]:
    """What is wrong with a token, in words that do not show it."""
    if value is None:
        return []
    if not isinstance(value, str):
        return [f"token is of type {type(value).__name__}, wanted a text"]
    if not value or value != value.strip():
        return ["token is empty, or has white space around it, such as the line break of its file: strip() it"]
    if not (value.isascii() and value.isprintable()):
        return ["token holds characters that no header can carry, wanted printable ASCII"]
    return []
