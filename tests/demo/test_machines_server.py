"""The server and trainer processes of the act end when their input does, so that they outlive nobody."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("grpc", reason="the act needs the extra `experts`")

from weft.demo import machines_model, machines_server, machines_trainer
from weft.demo.machines_model import Labelled, write_labelled
from weft.demo.machines_processes import Crew


def test_processes_that_are_ready_end_with_their_input_and_complain_about_nothing(tmp_path: Path) -> None:
    images, digits = torch.zeros(4, 64), torch.arange(4)
    write_labelled(Labelled(images, digits, images, digits), tmp_path / "digits.pt")
    expert = {"name": "x", "kind": machines_model.KIND, "arguments": {"hidden": 8, "seed": 1}}
    config = {"address": "127.0.0.1:0", "imports": [machines_model.__name__], "experts": [expert]}
    task = {"threads": 1, "seed": 0, "number": 0, "digits": str(tmp_path / "digits.pt")}
    with Crew(1) as crew:
        server = crew.start("server", machines_server.__name__, {"threads": 1, "config": config})
        trainer = crew.start("trainer", machines_trainer.__name__, task)
        said: dict[str, list[str | None]] = {"server": [], "trainer": []}
        while not all(said.values()):
            found = crew.next(60.0)
            assert found is not None
            said[found[0].name].append(found[1])
        assert (said["server"][0] or "").startswith("weft: serving 1 experts at 127.0.0.1:")
        assert said["trainer"] == ['{"said": "ready"}']
        for child in (server, trainer):
            child.close_input()
            child.wait(20.0)
            assert child.complaints() == f"{child.name} (exit code 0): it said nothing"
