"""Descriptor sets match the .proto files next to them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import SOURCE
from torchweft.experts import errors
from torchweft.experts.protobuf import load_messages
from torchweft.experts.wire import service
from torchweft.experts.wire.service import FAULTS

PROTOS = sorted(SOURCE.rglob("*.proto"))


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_descriptor_set_matches_its_proto(proto: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the extra `test` brings protoc")
    built = tmp_path / "made.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_imports", f"--descriptor_set_out={built}"]
    subprocess.run([*command, proto.name], cwd=proto.parent, check=True, timeout=60)
    assert built.read_bytes() == proto.with_suffix(".binpb").read_bytes(), "run tools/protos.py"


def test_every_fault_code_has_its_class() -> None:
    codes = load_messages("torchweft.experts.wire", "experts")["Fault"].DESCRIPTOR.fields_by_name["code"].enum_type
    assert all(FAULTS[value.number].__name__ == value.name for value in codes.values if value.number)


def test_fault_code_without_its_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(errors, "StepError")
    with pytest.raises(ImportError, match=r"FaultCode of experts.proto has StepError, wanted names of classes"):
        service._known_faults()


def test_messages_are_found_by_their_names() -> None:
    messages = load_messages("torchweft.experts.discovery", "etcd")
    value = messages["KeyValue"](key=b"a", mod_revision=3)
    assert messages["KeyValue"].FromString(value.SerializeToString()) == value
