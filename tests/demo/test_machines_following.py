"""A trainer's directory follows the lines that it is told, and their end ends everything."""

import json
import os
import threading
import time
from collections.abc import Callable

import pytest

pytest.importorskip("grpc", reason="the act needs the extra `experts`")

from weft.demo.machines_following import Following
from weft.experts.directory import LocalDirectory


def soon(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not is_so() and time.monotonic() < end:
        time.sleep(0.005)
    return is_so()


def test_experts_join_leave_and_come_back_elsewhere_as_the_lines_say() -> None:
    directory, ended = LocalDirectory(), threading.Event()
    ear, mouth = os.pipe()
    with os.fdopen(ear) as heard, os.fdopen(mouth, "w") as lines:

        def tell(**words: object) -> None:
            lines.write(json.dumps(words) + "\n")
            lines.flush()

        follow = Following(directory, heard, ended.set)
        tell(do="joined", address="a:1", uids=["x", "y"])
        tell(do="joined", address="b:1", uids=["z"])
        assert soon(lambda: directory.get().uids == ("x", "y", "z"))
        assert not follow.begin.is_set()
        tell(do="begin")
        assert follow.begin.wait(5) and not follow.finish.is_set()
        tell(do="left", address="a:1")
        assert soon(lambda: directory.get().uids == ("z",))
        tell(do="joined", address="a:2", uids=["x", "y"])
        assert soon(lambda: directory.get().addresses("x") == ("a:2",))
        tell(do="finish")
        assert follow.finish.wait(5) and not follow.over.is_set() and not ended.is_set()
        lines.close()
        follow.close()
    assert follow.over.is_set() and ended.is_set()
    directory.close()


def test_the_end_of_the_lines_wakes_whoever_waits_for_the_beginning() -> None:
    directory, ended = LocalDirectory(), threading.Event()
    follow = Following(directory, [], ended.set)
    assert follow.begin.wait(5) and follow.finish.wait(5)
    follow.close()
    assert follow.over.is_set() and ended.is_set()
    directory.close()
