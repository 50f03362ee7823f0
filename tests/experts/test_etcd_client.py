"""Client side of an etcd directory, without an etcd: keys, options, and the error for an unreachable etcd."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.core.errors import UsageError
from torchweft.experts.discovery import Lease, LocalDirectory, Ownership
from torchweft.experts.discovery.directory import make_snapshot
from torchweft.experts.discovery.etcd import MESSAGES, EtcdDirectory, EtcdKeys, EtcdTls, open_directory
from torchweft.experts.errors import DirectoryUnavailableError, ExpertOwnedError


def test_missing_etcd_is_unavailable_within_the_timeout() -> None:
    with EtcdDirectory(["127.0.0.1:1", "127.0.0.1:2"], timeout=1.0) as directory:
        for call in (directory.get, directory.watch, lambda: directory.declare("a", "x:1", 1.0)):
            start = time.monotonic()
            with pytest.raises(DirectoryUnavailableError, match=r"127\.0\.0\.1:1(.|\n)*127\.0\.0\.1:2"):
                call()
            assert time.monotonic() - start < 20.0  # generous, for a loaded machine


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"endpoints": []}, "list of endpoints is empty"),
        ({"endpoints": ["a:1", "b"], "timeout": 0.0}, r"an endpoint is 'b', wanted host:port(.|\n)*timeout is 0.0"),
        ({"endpoints": "a:1", "namespace": ""}, "namespace is ''"),
    ],
)
def test_invalid_options_are_rejected(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EtcdDirectory(**wrong)


def test_key_range_covers_exactly_one_prefix() -> None:
    keys = EtcdKeys("torchweft")
    start, end = keys.key_range("ffn.1")
    assert start <= keys.entry_key("ffn.1", "x") < keys.owner_key("ffn.1") < keys.entry_key("ffn.10", "x") < end
    assert keys.entry_key("ffn.2", "x") >= end and keys.entry_key("ffn.0", "zzz") < start
    assert keys.key_range("ÿ")[0] < keys.entry_key("ÿa", "x") < keys.key_range("ÿ")[1]


def test_an_address_names_a_directory() -> None:
    local = open_directory("local")
    assert isinstance(local, LocalDirectory)
    local.close()
    plain, named = ("etcd://a:1", ("a:1",), "torchweft"), ("etcd://a:1,b:2/mine", ("a:1", "b:2"), "mine")
    for address, members, namespace in (plain, named):
        remote = open_directory(address)
        assert isinstance(remote, EtcdDirectory)
        assert remote._client.addresses == members
        assert remote._keys.key_range("")[0] == f"{namespace}/".encode()
        remote.close()
    for wrong in ("", "http://a:1", "etcd://", "etcd://a"):
        with pytest.raises(UsageError):
            open_directory(wrong)
    with pytest.raises(UsageError, match="leave tls out"):
        open_directory("local", tls=EtcdTls())


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_foreign_keys_below_the_namespace_are_harmless(name: bytes, value: bytes) -> None:
    keys = EtcdKeys("torchweft")
    own = [(keys.entry_key("mine", "a:1"), b""), (keys.owner_key("mine"), b"a:1")]
    foreign = [(b"torchweft/" + name, value), (b"torchweft/x\0o", value), (b"torchweft/" + name + b"\0o", value)]
    response = MESSAGES["RangeResponse"]()
    for key, content in [*foreign, *own]:
        response.kvs.add(key=key, value=content, mod_revision=7)
    snapshot = make_snapshot(7, filter(None, map(keys.read_entry, response.kvs)))
    assert snapshot.experts["mine"] == ("a:1",) and snapshot.owners["mine"] == Ownership("mine", "a:1", 7)
    owner = snapshot.owners["x"].address  # owned, so that no other server steps it
    assert owner.encode() == value.partition(b"\0")[0] or "\\x" in owner


def test_claim_error_names_a_foreign_owner() -> None:
    class Taken:
        def call(self, name: str, **fields: Any) -> Any:
            answer = MESSAGES[f"{name}Response"](succeeded=False)
            answer.responses.add().response_range.kvs.add(value=b"\xff\xfe", mod_revision=3)
            return answer

    with EtcdDirectory("a:1") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory._client, "call", Taken().call)
        with pytest.raises(ExpertOwnedError, match=r"owned by \\xff\\xfe"):
            directory.claim("x", Lease(1, ("x",), "b:1", 5.0))
