"""Operations of an administrator on experts of a living server: ``torchweft set``, ``export`` and so on.

`RemoteExpert.set` and `RemoteExpert.state_dict` are the same for a client that has the role ``ADMIN``.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchweft.core.errors import UsageError
from torchweft.experts.client.transport import GrpcTransport, Transport
from torchweft.experts.serialization import deserialize
from torchweft.experts.wire.service import Operation


def set_hyperparameters(
    transport: Transport, uid: str, values: Mapping[str, Any], group: int | None, timeout: float
) -> dict[str, Any]:
    """Set them between two batches. Returns the ``steps`` of the expert, and the ``durable`` one."""
    operation = Operation("set", uid, {"values": dict(values), "group": group})
    return _administrative(transport, uid).operate(operation, timeout)[0]


def fetch_state(transport: Transport, uid: str, timeout: float) -> dict[str, Any]:
    """The weights and buffers of the module, all of one step."""
    return deserialize(_administrative(transport, uid).operate(Operation("export", uid), timeout)[1])


def export(transport: Transport, uid: str, path: Path, timeout: float) -> int:
    """Write the weights and buffers of the module as a safetensors file. Returns their step."""
    results, data = _administrative(transport, uid).operate(Operation("export", uid), timeout)
    # Written under another name first, so that an interrupted export does not leave half a file.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return int(results["steps"])


def _administrative(transport: Transport, uid: str) -> GrpcTransport:
    if not isinstance(transport, GrpcTransport):
        raise UsageError(f"expert {uid!r} is administered over gRPC, and this is a {type(transport).__name__}")
    return transport
