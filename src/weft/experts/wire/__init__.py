"""The protocol between clients and servers: frames of calls, each a protobuf header followed by raw tensor bytes.

experts.proto  the format, and gRPC's service     frame.py  calls and tensors <-> messages, and their limits
service.py     methods and options of gRPC; receipts, descriptions, faults
"""

from weft.experts import extras as extras  # reports missing packages
from weft.experts.errors import CertificateError as CertificateError
from weft.experts.errors import DeadlineError as DeadlineError
from weft.experts.errors import DrainingError as DrainingError
from weft.experts.errors import ExpertFailedError as ExpertFailedError
from weft.experts.errors import ForbiddenError as ForbiddenError
from weft.experts.errors import LimitError as LimitError
from weft.experts.errors import LostError as LostError
from weft.experts.errors import MalformedError as MalformedError
from weft.experts.errors import NotOwnerError as NotOwnerError
from weft.experts.errors import RemoteError as RemoteError
from weft.experts.errors import TruncatedError as TruncatedError
from weft.experts.errors import UnknownExpertError as UnknownExpertError
from weft.experts.errors import UnreachableError as UnreachableError
from weft.experts.errors import WireError as WireError
from weft.experts.wire.frame import LIMITS as LIMITS
from weft.experts.wire.frame import Call as Call
from weft.experts.wire.frame import Descriptor as Descriptor
from weft.experts.wire.frame import Frame as Frame
from weft.experts.wire.frame import Header as Header
from weft.experts.wire.frame import Kind as Kind
from weft.experts.wire.frame import Limits as Limits
from weft.experts.wire.frame import Received as Received
from weft.experts.wire.frame import decode as decode
from weft.experts.wire.frame import encode as encode
from weft.experts.wire.frame import encode_parts as encode_parts
from weft.experts.wire.service import RETRYABLE as RETRYABLE
from weft.experts.wire.service import read_fault as read_fault
from weft.experts.wire.service import register_fault as register_fault
from weft.experts.wire.service import write_fault as write_fault
