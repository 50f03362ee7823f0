"""Errors as bytes: a `Fault` of experts.proto, with the number of the class, the message, and details.

    exception  ──write_fault──>  code, message, {name: word, ...}  ──read_fault──>  exception of the same class

A class without a number travels as its nearest base that has one, and what weft did not raise as `ExpertFailedError`
with the name of its class: nothing of the other side is imported or run to build an error.
"""

from typing import Any

from google.protobuf.message import DecodeError

from weft.core import errors as core_errors
from weft.core.errors import UsageError, WeftError
from weft.experts import errors
from weft.experts.errors import (
    ClosedError,
    DrainingError,
    ExpertFailedError,
    LimitError,
    MalformedError,
    NotOwnerError,
    OverloadError,
    QuotaError,
    RemoteError,
    UnreachableError,
    WireError,
)
from weft.experts.protobuf import load_messages

_FAULT = load_messages("weft.experts.wire", "experts")["Fault"]
FAULTS: dict[int, type[WeftError]] = {
    each.number: (vars(core_errors) | vars(errors))[each.name]
    for each in _FAULT.DESCRIPTOR.fields_by_name["code"].enum_type.values
    if each.number
}
"""Classes by number: those of experts.proto, and what was registered."""
RETRYABLE = (OverloadError, QuotaError, ClosedError, UnreachableError, DrainingError, NotOwnerError)
"""The request was surely not carried out, and may succeed later or elsewhere. Anything else that changes weights
may be sent again only with its idempotency key."""
MOST_TEXT = 4096
"""Bytes of a message or of one detail; what is longer is cut."""
MOST_DETAILS = 32


def register_fault(code: int, kind: type[WeftError]) -> None:
    """Give a class of errors, made from a message alone, a number, so that it arrives as itself."""
    if not 0 < code < 1 << 16:
        raise UsageError(f"a fault code is from 1 to 65535, and {code} is not")
    if FAULTS.setdefault(code, kind) is not kind:
        raise UsageError(f"fault code {code} stands for {FAULTS[code].__name__}; take another for {kind.__name__}")


def write_fault(error: BaseException) -> bytes:
    """``error`` as bytes. Never raises, whatever the error is: texts that are too long are cut."""
    kind, own = type(error), isinstance(error, WeftError)
    numbers = {cls: code for code, cls in FAULTS.items()}
    base = next((each for each in kind.__mro__ if each in numbers), RemoteError if own else ExpertFailedError)
    if isinstance(error, WireError):
        details = {"reason": error.reason}
    else:
        details = dict(error.details) if isinstance(error, RemoteError) else {}
        if kind is not base:
            details.setdefault("type", kind.__qualname__)
    try:
        text = str(error)
    except Exception:  # a stranger's __str__ may do anything
        text = "(its message cannot be shown)"
    cut = {_cut(name): _cut(word) for name, word in list(details.items())[:MOST_DETAILS]}
    message = _cut(text if own else f"{kind.__qualname__}: {text}")
    return _FAULT(code=numbers[base], message=message, details=cut).SerializeToString()


def read_fault(data: bytes) -> WeftError:
    """The exception that `write_fault` wrote, to be raised by the caller. Raises ``WireError`` for other bytes."""
    try:
        fault: Any = _FAULT.FromString(data)
    except DecodeError as error:
        raise MalformedError(f"this is no Fault of experts.proto: {error}", reason="fault") from None
    code, message, details = int(fault.code), str(fault.message), dict[str, str](fault.details)
    if len(details) > MOST_DETAILS or len(message) > MOST_TEXT:
        text = f"an error of {len(message)} signs with {len(details)} details"
        raise LimitError(f"{text}; at most {MOST_TEXT} and {MOST_DETAILS}", reason="fault")
    kind = FAULTS.get(code)
    if kind is None:  # from a newer peer
        return RemoteError(message, {**details, "code": str(code)})
    if issubclass(kind, WireError):
        return kind(message, reason=details.get("reason", "unspecified"))
    if issubclass(kind, RemoteError):
        return kind(message, details)
    error = kind(message)
    for name, word in details.items():
        error.add_note(f"{name}: {word}")
    return error


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace")[:MOST_TEXT].decode("utf-8", "ignore")  # a cut may split a sign
