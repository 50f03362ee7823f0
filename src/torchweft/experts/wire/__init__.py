"""The protocol between clients and servers: frames of calls, each a protobuf header followed by raw tensor bytes.

experts.proto  the format, and gRPC's service     frame.py  calls and tensors <-> messages, and their limits
service.py     methods and options of gRPC; receipts, descriptions, faults
"""

from torchweft.experts import extras as extras  # reports missing packages
from torchweft.experts.wire.frame import LIMITS as LIMITS
from torchweft.experts.wire.frame import Call as Call
from torchweft.experts.wire.frame import Descriptor as Descriptor
from torchweft.experts.wire.frame import Frame as Frame
from torchweft.experts.wire.frame import Header as Header
from torchweft.experts.wire.frame import Kind as Kind
from torchweft.experts.wire.frame import Limits as Limits
from torchweft.experts.wire.frame import Received as Received
from torchweft.experts.wire.frame import decode as decode
from torchweft.experts.wire.frame import encode as encode
from torchweft.experts.wire.frame import encode_parts as encode_parts
from torchweft.experts.wire.service import RETRYABLE as RETRYABLE
from torchweft.experts.wire.service import read_fault as read_fault
from torchweft.experts.wire.service import register_fault as register_fault
from torchweft.experts.wire.service import write_fault as write_fault
