"""Protobuf messages of a ``.proto`` of this package, loaded from the descriptor set next to it.

    experts.proto ── protoc ──> experts.binpb ── here, at import ──> message classes

Generated Python code would be the usual way, but it runs with only two major versions of protobuf. A descriptor set is
protobuf's own format, which all versions read.
"""

from functools import cache
from importlib.resources import files
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


@cache
def load_messages(package: str, name: str, raw: str = "") -> dict[str, Any]:
    """The message classes of ``name``.binpb in a package, by their names in the ``.proto``."""
    # ``raw``: messages of this field, such as "Call.tensors", are left as bytes. They are the same on the wire.
    described = cast("Any", descriptor_pb2.FileDescriptorSet)()
    described.ParseFromString((files(package) / f"{name}.binpb").read_bytes())
    # Not the default pool, in which names of other users of protobuf could collide with these.
    pool = cast("Any", descriptor_pool.DescriptorPool)()
    for file in described.file:
        for message in file.message_type:
            for field in message.field:
                if f"{message.name}.{field.name}" == raw:
                    field.type = field.TYPE_BYTES
                    field.ClearField("type_name")
        pool.Add(file)
    classes = cast("Any", message_factory.GetMessageClassesForFiles)([file.name for file in described.file], pool)
    return {full_name.rpartition(".")[2]: message for full_name, message in classes.items()}
