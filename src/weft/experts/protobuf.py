"""Protobuf messages from a ``.proto`` of this package, through the descriptor set that lies beside it.

    experts.proto ── protoc ──> experts.binpb ── here, at import ──> message classes

Descriptors and no generated Python code, since that code runs with two major versions of protobuf only; a descriptor
set is protobuf's own format, which all of them read. Each ``.proto`` names the command that makes its set, and a test
holds the two against each other.
"""

from functools import cache
from importlib.resources import files
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


@cache
def load_messages(package: str, name: str, raw: str = "") -> dict[str, Any]:
    """The message classes of ``name``.binpb in a package, by their names in the ``.proto``.

    ``raw``: a field, such as "Call.tensors", whose messages are left as bytes; on the wire the two are the same.
    """
    described = cast("Any", descriptor_pb2.FileDescriptorSet)()
    described.ParseFromString((files(package) / f"{name}.binpb").read_bytes())
    pool = cast("Any", descriptor_pool.DescriptorPool)()  # its own: names of other users of protobuf do not matter
    for file in described.file:
        for message in file.message_type:
            for field in message.field:
                if f"{message.name}.{field.name}" == raw:
                    field.type = field.TYPE_BYTES
                    field.ClearField("type_name")
        pool.Add(file)
    classes = cast("Any", message_factory.GetMessageClassesForFiles)([file.name for file in described.file], pool)
    return {full_name.rpartition(".")[2]: made for full_name, made in classes.items()}
