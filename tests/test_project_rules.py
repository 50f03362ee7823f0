"""Rules of the project: layers, lint, types, import time, documented public names, and file sizes."""

import ast
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, SOURCE, python, run

FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 600  # per file
GLOSSARY, PLAIN_WORDS = ROOT / "docs" / "glossary.md", ROOT / "tests" / "plain_words.txt"
MOST_SECONDS = 0.050  # for `import torchweft` after `import torch`

# Program for a new interpreter: measures the time and the modules that `import torchweft` adds to `import torch`.
PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()  # excludes the time of other processes
import torchweft as weft
cost = time.process_time() - start
print(json.dumps([cost, sorted(set(sys.modules) - before)]))
"""


def check_table() -> dict[str, list[str]]:
    """The commands of `do.py check`, with the tools of this Python."""
    spec = importlib.util.spec_from_file_location("do", ROOT / "do.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.checks(Path(sys.executable).parent, Path(sys.executable))


CHECKS = check_table()
PINNED = (ROOT / "constraints.txt").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_check_holds(name: str) -> None:
    tool = Path(CHECKS[name][0])
    if not tool.exists():
        pytest.skip(f"{name}: there is no {tool.name} in {tool.parent}; the extra `test` brings it")
    if name == "pyright" and f"torch=={torch.__version__.split('+')[0]}\n" not in PINNED:
        pytest.skip(f"{name}: PyTorch {torch.__version__} has other annotations than the version in constraints.txt")
    seen = run(CHECKS[name])
    assert seen.returncode == 0, f"{name} reported:\n{seen.stdout}{seen.stderr}"


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, list[str]]]:
    """Seconds and new modules of `import torchweft` in new interpreters, repeated until one is fast enough."""
    # With bytecode, like an installed torchweft. The first run writes it.
    cache = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode"))}
    measured: list[tuple[float, list[str]]] = []
    while len(measured) < 7 and not (measured and measured[-1][0] <= MOST_SECONDS):
        probe = python(PROBE, **cache)
        assert probe.returncode == 0, probe.stderr
        measured.append(tuple(json.loads(probe.stdout)))
    return measured


@pytest.mark.long
def test_import_torchweft_takes_at_most_50_ms_beyond_torch(imports: list[tuple[float, list[str]]]) -> None:
    # Noise only adds time, so the smallest of several runs is the most accurate.
    costs = [cost for cost, _ in imports]
    assert min(costs) <= MOST_SECONDS, f"seconds beyond torch, in {len(costs)} runs: {costs}"


@pytest.mark.long
def test_import_torchweft_loads_no_further_third_party_module(imports: list[tuple[float, list[str]]]) -> None:
    imported = {module.partition(".")[0] for module in imports[0][1]}
    assert imported - sys.stdlib_module_names <= {"torchweft", "torch"}


def test_every_public_name_exists_and_is_documented() -> None:
    import torchweft as weft  # noqa: PLC0415  (a broken package must fail only this test, not all collection)

    assert weft.__doc__
    assert len(weft.__all__) == len(set(weft.__all__))
    for name in weft.__all__:
        thing = getattr(weft, name)
        text = thing.__doc__ if inspect.isclass(thing) or inspect.ismodule(thing) else inspect.getdoc(thing)
        assert text and text.strip(), f"torchweft.{name} has no own docstring"


def test_every_source_file_has_a_module_docstring() -> None:
    bare = [str(file.relative_to(ROOT)) for file in FILES if not ast.get_docstring(ast.parse(file.read_text("utf-8")))]
    assert not bare, f"no module docstring in: {bare}"


def test_every_source_file_has_at_most_600_lines() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text("utf-8").splitlines()) for file in FILES}
    assert not {file: count for file, count in lengths.items() if count > MOST_LINES}


def words_of(name: str) -> list[str]:
    """The words of a name in CamelCase or snake_case, in lower case: LSTMCell is lstm and cell."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def stems(word: str) -> set[str]:
    """The word and its possible singular forms."""
    return {word, word.removesuffix("s"), word.removesuffix("es")}


def test_every_noun_of_a_name_is_in_the_glossary_or_plain() -> None:
    names: set[str] = set()
    for file in FILES:
        names |= {
            part for part in file.relative_to(SOURCE / "torchweft").with_suffix("").parts if not part.startswith("_")
        }
        tree = ast.parse(file.read_text("utf-8"))
        names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    rows = [row.split("|")[1] for row in GLOSSARY.read_text("utf-8").splitlines() if row.startswith("| ")]
    lines = [line for line in PLAIN_WORDS.read_text("utf-8").splitlines() if not line.startswith("#")]
    known = {word for text in (*rows, *lines) for word in words_of(text)}
    known |= {stem for word in known for stem in stems(word)}
    unknown = {name: [word for word in words_of(name) if not stems(word) & known] for name in sorted(names)}
    assert {name: words for name, words in unknown.items() if words} == {}, (
        "neither in docs/glossary.md (with its source in the field) nor a plain word of Python or PyTorch"
    )
    used = {stem for name in names for word in words_of(name) for stem in stems(word)}
    plain = {word for line in lines for word in words_of(line)}
    assert {word for word in plain if not stems(word) & used} == set(), "plain words that no name uses any more"


def test_only_the_tree_module_touches_the_pytree_of_torch() -> None:
    users = [str(file.relative_to(SOURCE)) for file in FILES if "_pytree" in file.read_text("utf-8")]
    assert users in ([], ["torchweft/core/pytree.py"])


def test_sdist_contains_the_whole_repository() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    included = {name.strip("/") for name in settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    included |= {"README.md", "LICENSE", "pyproject.toml"}  # added by the build itself
    listed = run(["git", "ls-files"])
    if listed.returncode:
        pytest.skip("sdist: needs a git checkout, which lists the files")
    top = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    assert included == {name for name in top if not name.startswith(".")}
    assert {"deploy", "CONTRIBUTING.md"} <= included
    assert {"Homepage", "Documentation", "Issues", "Changelog"} <= {*settings["project"]["urls"]}
    assert "Programming Language :: Python :: 3.11" in settings["project"]["classifiers"]


def test_no_text_installs_the_unrelated_weft() -> None:
    """On PyPI, ``weft`` is an unrelated project, so `pip install` with that name would install its code."""
    listed = run(["git", "ls-files"])
    if listed.returncode:
        pytest.skip("names: needs a git checkout, which lists the files")
    unrelated = re.compile(r"""(?<![\w.-])(?:pip3? install(?: -\S+)* ["']?weft(?![\w-])|weft\[)""")
    found: dict[str, list[str]] = {}
    for name in listed.stdout.splitlines():
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content and (words := unrelated.findall(content.decode("utf-8", "replace"))):
            found[name] = words
    assert found == {}, "the distribution is torchweft"


def test_package_ships_its_types() -> None:
    assert (SOURCE / "torchweft" / "py.typed").exists()


def test_module_of_core_is_imported_by_two_packages() -> None:
    """`core` has only code that several capabilities share."""
    spec = importlib.util.spec_from_file_location("structure", ROOT / "tools" / "structure.py")
    assert spec and spec.loader
    structure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(structure)
    assert structure.lonely_modules_of_core() == {}
