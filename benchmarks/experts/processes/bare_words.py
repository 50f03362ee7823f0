"""Messages of the bare server and its client: a byte for the kind, padding to 16, and one float32 tensor."""

import torch
from torch import Tensor

SERVICE, METHOD = "bare", "Stream"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
FORWARD, TRACKED, BACKWARD = b"F", b"T", b"B"
_HEAD = 16


def message(kind: bytes, given: Tensor) -> bytes:
    """Its bytes."""
    return b"".join((kind.ljust(_HEAD), given.numpy().data))


def tensor(said: bytes, width: int) -> Tensor:
    """The tensor in it, on the message's own memory: never written to."""
    return torch.frombuffer(said, dtype=torch.float32, offset=_HEAD).view(-1, width)
