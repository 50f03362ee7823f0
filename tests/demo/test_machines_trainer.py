"""A trainer that fails says why and ends with an exit code, which is how the act learns of it."""

from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the act needs the extra `experts`")

from weft.demo import machines_trainer
from weft.demo.machines_processes import Crew


def test_a_trainer_that_fails_ends_with_its_reason(tmp_path: Path) -> None:
    task = {"threads": 1, "seed": 0, "number": 0, "digits": str(tmp_path / "missing.pt")}
    with Crew(1) as crew:
        child = crew.start("trainer", machines_trainer.__name__, task)
        assert crew.next(60.0) == (child, None)
        assert "trainer (exit code 1)" in child.complaints() and "missing.pt" in child.complaints()
