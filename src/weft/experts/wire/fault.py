"""Errors as bytes: a number for the class, the message, and details, in both directions.

    exception  ──write_fault──>  | code | message | name = word, ... |  ──read_fault──>  exception of the same class

A class without a number travels as its nearest base that has one. Whatever weft did not raise comes out of the
user's own module, and travels as `ExpertFailedError` with the name of its class: nothing of the other side is
imported or run to build an error, so a hostile peer can at most choose among the classes of the table.

The numbers are part of the format: they may be added to, never used again for something else.
"""

import struct
from collections.abc import Mapping

from weft.core.errors import SpecError, UsageError, WeftError
from weft.experts.errors import (
    CertificateError,
    ClosedError,
    CommitError,
    DeadlineError,
    DrainingError,
    ExpertError,
    ExpertFailedError,
    ExpiredError,
    ForbiddenError,
    GradientError,
    InputsGoneError,
    KeyReusedError,
    LimitError,
    LostError,
    MalformedError,
    ModuleExitError,
    NotOwnerError,
    OverloadError,
    QuotaError,
    RefusedError,
    RemoteError,
    ResultEvictedError,
    StepError,
    TooManyRowsError,
    TruncatedError,
    UnknownExpertError,
    UnreachableError,
    WireError,
)

FAULTS: dict[int, type[WeftError]] = {
    1: RemoteError,
    2: WireError,
    3: MalformedError,
    4: TruncatedError,
    5: LimitError,
    10: SpecError,
    11: UsageError,
    20: ExpertError,
    21: RefusedError,
    22: TooManyRowsError,
    23: OverloadError,
    24: QuotaError,
    25: ExpiredError,
    26: ClosedError,
    27: ResultEvictedError,
    28: CommitError,
    29: GradientError,
    30: StepError,
    31: ModuleExitError,
    32: InputsGoneError,
    33: KeyReusedError,
    40: UnknownExpertError,
    41: ForbiddenError,
    42: ExpertFailedError,
    43: DeadlineError,
    44: LostError,
    45: UnreachableError,
    46: DrainingError,
    47: NotOwnerError,
    48: CertificateError,
}
RETRYABLE = (OverloadError, QuotaError, ClosedError, UnreachableError, DrainingError, NotOwnerError)
"""The request was surely not carried out, and may succeed later or elsewhere. Anything else that changes weights
may be asked again only with its idempotency key."""
MOST_TEXT = 4096
"""Bytes of a message or of one detail; what is longer is cut."""
MOST_DETAILS = 32

_HEAD = struct.Struct("<HHI")  # code, number of details, bytes of the message
_PAIR = struct.Struct("<HH")  # bytes of a detail's name, and of its word


def fault_code(kind: type[BaseException]) -> int:
    """The number of this class, or of its nearest base that has one; `ExpertFailedError`'s for a stranger."""
    numbers = {cls: code for code, cls in FAULTS.items()}
    own = RemoteError if issubclass(kind, WeftError) else ExpertFailedError
    return next((numbers[base] for base in kind.__mro__ if base in numbers), numbers[own])


def register_fault(code: int, kind: type[WeftError]) -> None:
    """Give a class of errors a number, so that it arrives as itself. It must be made from a message alone.

    Raises ``UsageError`` if the number stands for another class already.
    """
    if not 0 < code < 1 << 16:
        raise UsageError(f"a fault code is from 1 to 65535, and {code} is not")
    if FAULTS.setdefault(code, kind) is not kind:
        raise UsageError(f"fault code {code} stands for {FAULTS[code].__name__}; take another for {kind.__name__}")


def write_fault(error: BaseException) -> bytes:
    """``error`` as bytes. Never raises, whatever the error is: texts that are too long are cut."""
    code = fault_code(type(error))
    details = _details(error)
    message = _cut(_message(error, own=isinstance(error, WeftError)))
    parts = [_HEAD.pack(code, len(details), len(message)), message]
    for name, word in details.items():
        name_bytes, word_bytes = _cut(name), _cut(word)
        parts += [_PAIR.pack(len(name_bytes), len(word_bytes)), name_bytes, word_bytes]
    return b"".join(parts)


def read_fault(data: bytes) -> WeftError:
    """The exception that `write_fault` wrote, to be raised by the caller. Raises ``WireError`` for other bytes."""
    code, count, size = _HEAD.unpack(_take(data, 0, _HEAD.size))
    if count > MOST_DETAILS or size > MOST_TEXT:
        raise LimitError(f"an error of {size} bytes with {count} details; at most {MOST_TEXT} and {MOST_DETAILS}")
    at = _HEAD.size + size
    message = _text(_take(data, _HEAD.size, size))
    details: dict[str, str] = {}
    for _ in range(count):
        names, words = _PAIR.unpack(_take(data, at, _PAIR.size))
        at += _PAIR.size
        details[_text(_take(data, at, names))] = _text(_take(data, at + names, words))
        at += names + words
    if at != len(data):
        raise TruncatedError(f"an error ends at byte {at} of {len(data)}", reason="length")
    return _build(code, message, details)


def _build(code: int, message: str, details: Mapping[str, str]) -> WeftError:
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


def _details(error: BaseException) -> dict[str, str]:
    """What travels beside the message: at most `MOST_DETAILS`."""
    if isinstance(error, WireError):
        return {"reason": error.reason}
    details = dict(error.details) if isinstance(error, RemoteError) else {}
    if type(error) not in FAULTS.values():
        details.setdefault("type", type(error).__qualname__)
    return dict(list(details.items())[:MOST_DETAILS])


def _message(error: BaseException, own: bool) -> str:
    try:
        text = str(error)
    except Exception:  # a stranger's __str__ may do anything
        text = "(its message cannot be shown)"
    return text if own else f"{type(error).__qualname__}: {text}"


def _cut(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:MOST_TEXT]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")  # a cut may have split a sign


def _take(data: bytes, start: int, size: int) -> bytes:
    if start + size > len(data):
        raise TruncatedError(f"an error ends at byte {len(data)}, wanted {start + size}", reason="length")
    return data[start : start + size]
