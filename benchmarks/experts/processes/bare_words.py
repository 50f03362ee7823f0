"""Messages of the bare server and its client: one byte for the kind, padding to 16 bytes, one float32 tensor."""

import torch
from torch import Tensor

SERVICE, METHOD = "bare", "Stream"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
FORWARD, TRACKED, BACKWARD = b"F", b"T", b"B"
_HEAD = 16


def message(kind: bytes, value: Tensor) -> bytes:
    """Encode a message."""
    return b"".join((kind.ljust(_HEAD), value.numpy().data))


def tensor(data: bytes, width: int) -> Tensor:
    """Decode the tensor of a message. It shares the message's memory, so it must not be written."""
    return torch.frombuffer(data, dtype=torch.float32, offset=_HEAD).view(-1, width)
