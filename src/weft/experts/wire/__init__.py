"""What travels between clients and servers: frames of calls, with raw tensor bytes behind a small typed header.

frame.py     calls <-> message                  header.py    the format, and writing it
parse.py     reading it, believing nothing      tensors.py   tensors <-> bytes, without copies
limits.py    caps, checked before allocation    fault.py     errors <-> bytes
dtypes.py    which dtypes travel
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.errors import (
    CertificateError,
    DeadlineError,
    DrainingError,
    ExpertFailedError,
    ForbiddenError,
    LimitError,
    LostError,
    MalformedError,
    NotOwnerError,
    RemoteError,
    TruncatedError,
    UnknownExpertError,
    UnreachableError,
    WireError,
)
from weft.experts.wire.fault import RETRYABLE, read_fault, register_fault, write_fault
from weft.experts.wire.frame import Call, Received, decode, encode
from weft.experts.wire.header import Descriptor, Flags, Header, Kind
from weft.experts.wire.limits import LIMITS, Limits

__all__ = [
    "LIMITS",
    "RETRYABLE",
    "Call",
    "CertificateError",
    "DeadlineError",
    "Descriptor",
    "DrainingError",
    "ExpertFailedError",
    "Flags",
    "ForbiddenError",
    "Header",
    "Kind",
    "LimitError",
    "Limits",
    "LostError",
    "MalformedError",
    "NotOwnerError",
    "Received",
    "RemoteError",
    "TruncatedError",
    "UnknownExpertError",
    "UnreachableError",
    "WireError",
    "decode",
    "encode",
    "read_fault",
    "register_fault",
    "write_fault",
]
