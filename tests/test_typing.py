"""Type checkers know the options of a layer, the constructor of a skippable class, and its inner module."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import SOURCE

PYRIGHT = Path(sys.executable).parent / "pyright"

PROGRAM = """
from typing import assert_type

import torchweft as weft
from torch import Tensor, nn
from torchweft import Namespace, pop, skippable, stash
from torchweft.pipeline.skip import Skippable

class Plain(nn.Module):
    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()

Wrapped = skippable(stash=["a"])(Plain)

@skippable(pop=["a"])
class Decorated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()

assert_type(Wrapped(3, bias=False).module, Plain)
assert_type(Wrapped(3).isolate(Namespace()).module, Plain)
assert_type(Decorated(3).poppable_names, frozenset[str])
Wrapped("3")  # wrong
Wrapped(3, width_of="b")  # wrong
Decorated()  # wrong
skippable(stash=["a"])(3)  # wrong

weft.LSTM(8, 8, 2, True, memory="states", proj_size=2)
weft.LSTM(8, 8, num_layer=2)  # wrong
weft.LSTM(8, 8, nonlinearity="relu")  # wrong
weft.GRU(8, 8, num_layers=2)
weft.GRU(8, 8, proj_size=2)  # wrong
weft.GRU(8, 8, nonlinearity="relu")  # wrong
weft.RNN(8, 8, nonlinearity="relu")
weft.RNN(8, 8, proj_size=2)  # wrong
"""


def test_type_checker_reports_wrong_arguments(tmp_path: Path) -> None:
    """One run for all programs, because a run takes seconds."""
    if not PYRIGHT.exists():
        pytest.skip(f"there is no pyright in {PYRIGHT.parent}; the extra `test` brings it")
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"extraPaths": [str(SOURCE)], "include": ["program.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    argv = [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    seen = subprocess.run(argv, capture_output=True, text=True, check=False)
    faults = json.loads(seen.stdout)["generalDiagnostics"]
    lines = [fault["range"]["start"]["line"] for fault in faults if fault["severity"] == "error"]
    wrong = [number for number, line in enumerate(PROGRAM.splitlines()) if line.endswith("# wrong")]
    assert sorted(set(lines)) == wrong, faults
