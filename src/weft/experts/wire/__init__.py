"""What travels between clients and servers: frames of calls, a protobuf header with raw tensor bytes behind it.

experts.proto   the format, and gRPC's service      header.py    what is said of calls and tensors, and limits
frame.py        calls and tensors <-> messages      faults.py    errors <-> bytes
service.py      methods and options of gRPC, receipts, descriptions
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
from weft.experts.wire.faults import RETRYABLE, read_fault, register_fault, write_fault
from weft.experts.wire.frame import Frame, Received, decode, encode, encode_parts
from weft.experts.wire.header import LIMITS, Call, Descriptor, Header, Kind, Limits

__all__ = [
    "LIMITS",
    "RETRYABLE",
    "Call",
    "CertificateError",
    "DeadlineError",
    "Descriptor",
    "DrainingError",
    "ExpertFailedError",
    "ForbiddenError",
    "Frame",
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
    "encode_parts",
    "read_fault",
    "register_fault",
    "write_fault",
]
