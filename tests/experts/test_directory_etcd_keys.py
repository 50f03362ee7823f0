"""What can be told of a directory in etcd without an etcd: its keys, its options, and that it is away."""

import time
from typing import Any

import pytest

from weft.core.errors import UsageError
from weft.experts.directory import AwayError, LocalDirectory
from weft.experts.directory.etcd import EtcdDirectory
from weft.experts.directory.etcd_address import open_directory
from weft.experts.directory.etcd_endpoints import EtcdTls
from weft.experts.directory.etcd_keys import Keys


def test_an_etcd_that_is_away_is_said_to_be_away_within_the_timeout() -> None:
    with EtcdDirectory(["127.0.0.1:1", "127.0.0.1:2"], timeout=1.0) as directory:
        for call in (directory.get, directory.watch, lambda: directory.declare("a", "x:1", 1.0)):
            start = time.monotonic()
            with pytest.raises(AwayError, match=r"127\.0\.0\.1:1(.|\n)*127\.0\.0\.1:2"):
                call()
            assert time.monotonic() - start < 2.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"endpoints": []}, "there is no endpoint"),
        ({"endpoints": ["a:1", "b"], "timeout": 0.0}, r"an endpoint is 'b', wanted host:port(.|\n)*timeout is 0.0"),
        ({"endpoints": "a:1", "namespace": ""}, "namespace is ''"),
        ({"endpoints": "a:1", "history": 0}, "history is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EtcdDirectory(**wrong)


def test_a_range_covers_the_names_with_a_prefix_and_no_others() -> None:
    keys = Keys("weft")
    start, end = keys.range("ffn.1")
    assert start <= keys.entry("ffn.1", "x") < keys.owner("ffn.1") < keys.entry("ffn.10", "x") < end
    assert keys.entry("ffn.2", "x") >= end and keys.entry("ffn.0", "zzz") < start
    assert keys.range("ÿ")[0] < keys.entry("ÿa", "x") < keys.range("ÿ")[1]


def test_an_address_names_a_directory() -> None:
    here = open_directory("local")
    assert isinstance(here, LocalDirectory)
    here.close()
    for address, members, namespace in (
        ("etcd://a:1", ("a:1",), "weft"),
        ("etcd://a:1,b:2/mine", ("a:1", "b:2"), "mine"),
    ):
        there = open_directory(address)
        assert isinstance(there, EtcdDirectory)
        assert there._endpoints.addresses == members
        assert there._keys.range("")[0] == f"{namespace}/".encode()
        there.close()
    for wrong in ("", "http://a:1", "etcd://", "etcd://a"):
        with pytest.raises(UsageError):
            open_directory(wrong)
    with pytest.raises(UsageError, match="leave tls out"):
        open_directory("local", tls=EtcdTls())
