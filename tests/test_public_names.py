"""The public names of `torchweft` and `weft.errors` are loaded on access, known to a type checker, and complete."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import torchweft as weft
from tests.processes import SOURCE, python
from torchweft.core.errors import WeftError

LAZY = ("torchweft", "torchweft.errors")
INTERNAL = {
    "BorrowedError",
    "CaptureError",
    "CompileError",
    "MisfitError",
    "PlanError",
    "RefusedByEtcdError",
    "Unsupported",
}
"""Errors that users see only as a parent class, or never."""

ON_ACCESS = """
import sys
import torchweft as weft
assert not [name for name in sys.modules if name.startswith(("torchweft.recurrent", "torchweft.experts",
"torchweft.pipeline"))]
assert "Recurrent" in dir(weft) and "errors" in dir(weft)
from torchweft.recurrent.recurrent import Recurrent
assert weft.Recurrent is Recurrent and "torchweft.experts" not in sys.modules
assert weft.recurrent.cells.GRUCell.__name__ == "GRUCell"
assert weft.experts.ExpertBackend is weft.ExpertBackend and "grpc" not in sys.modules
assert issubclass(weft.errors.OverloadError, weft.WeftError) and "grpc" not in sys.modules
try:
    weft.Recurent
except AttributeError as error:
    assert "Recurrent" in str(error) or error.name == "Recurent"
else:
    raise AssertionError
"""

WITHOUT_GRPC = """
import sys
sys.modules["grpc"] = None  # as if it were not installed
import torchweft as weft
from torchweft.errors import CommitError, DeadlineError, DirectoryError, WireError
try:
    weft.Server
except ImportError:
    pass
else:
    raise AssertionError
"""


@pytest.mark.parametrize("module", LAZY)
def test_every_public_name_is_found_and_known_to_type_checkers(module: str) -> None:
    package = importlib.import_module(module)
    text = Path(package.__file__ or "").read_text("utf-8")
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    known = {alias.name for node in imports for alias in node.names}
    stars = [importlib.import_module(node.module or "") for node in imports if node.names[0].name == "*"]
    known |= {name for star in stars for name in vars(star)}
    known |= {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert {*package.__all__} <= known
    for name in package.__all__:
        assert getattr(package, name) is not None and name in dir(package)


def test_name_is_loaded_on_access() -> None:
    done = python(ON_ACCESS)
    assert done.returncode == 0, done.stderr


def test_without_the_extra_only_its_names_are_missing() -> None:
    done = python(WITHOUT_GRPC)
    assert done.returncode == 0, done.stderr


def test_every_error_that_callers_get_is_in_torchweft_errors() -> None:
    for module in pkgutil.walk_packages([str(SOURCE / "torchweft")], "torchweft."):
        if not module.name.startswith("torchweft.__main__"):
            importlib.import_module(module.name)
    kinds, left = {WeftError}, [WeftError, UserWarning]
    while left:
        left = [child for kind in left for child in kind.__subclasses__()]
        kinds |= {kind for kind in left if kind.__module__.startswith("torchweft.")}
    names = {kind.__name__: kind for kind in kinds if kind.__name__ not in INTERNAL and kind.__name__[0] != "_"}
    assert {name: getattr(weft.errors, name, None) for name in names} == names
