"""A crew's processes hear lines, are heard, and are gone with it, however the block ends."""

import time
from pathlib import Path

import pytest

from weft.demo.machines_processes import Child, Crew

ECHO = """
import json, os, sys
print(json.loads(sys.stdin.readline())["name"], os.environ["OMP_NUM_THREADS"], flush=True)
for line in sys.stdin:
    print("heard", json.loads(line), flush=True)
print("end", flush=True)
"""
DEAF = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"
BAD = "import sys\nsys.exit('no such thing')\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("demo_echo", ECHO), ("demo_deaf", DEAF), ("demo_bad", BAD)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def heard(crew: Crew) -> tuple[Child, str | None]:
    found = crew.next(20.0)
    assert found is not None
    return found


def gone(child: Child) -> bool:
    return child.process.returncode is not None


def test_lines_go_both_ways_and_the_end_of_the_input_ends_a_child() -> None:
    with Crew(3) as crew:
        assert crew.next(0.0) is None
        child = crew.start("one", "demo_echo", {"name": "one"})
        assert heard(crew) == (child, "one 3")
        child.tell({"a": 1})
        assert heard(crew) == (child, "heard {'a': 1}")
        child.close_input()
        assert heard(crew) == (child, "end") and heard(crew) == (child, None)
        folder = crew.folder
        assert folder.is_dir()
    assert child.process.returncode == 0 and not folder.exists()


def test_a_child_that_is_killed_is_heard_of_and_may_be_told_more() -> None:
    with Crew(1) as crew:
        child = crew.start("one", "demo_deaf", {})
        assert heard(crew) == (child, "here")
        child.kill()
        assert heard(crew) == (child, None)
        child.tell({"a": 1})
    assert child.process.returncode == -9


def test_what_a_child_complained_about_can_be_told() -> None:
    with Crew(1) as crew:
        child = crew.start("one", "demo_bad", {})
        assert heard(crew) == (child, None)
        assert child.complaints() == "one (exit code 1): no such thing"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_no_child_outlives_a_block_that_fails(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.demo.machines_processes._HURRY", 0.3)  # for the one that does not end by itself
    crew = Crew(1)
    children: list[Child] = []
    with pytest.raises(kind), crew:
        children += [crew.start("one", "demo_echo", {"name": "one"}), crew.start("two", "demo_deaf", {})]
        heard(crew)
        heard(crew)
        begin = time.monotonic()
        raise kind
    assert time.monotonic() - begin < 5
    assert all(gone(child) for child in children) and not crew.folder.exists()


def test_ctrl_c_while_it_ends_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(1)
    child = crew.start("one", "demo_deaf", {})
    heard(crew)
    whole, calls = Child.wait, []

    def impatient(self: Child, seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == 1:
            raise KeyboardInterrupt
        whole(self, seconds)

    monkeypatch.setattr(Child, "wait", impatient)
    with pytest.raises(KeyboardInterrupt):
        crew.close()
    assert gone(child) and not crew.folder.exists()
