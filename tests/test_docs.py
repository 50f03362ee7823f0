"""Every Python block of README and docs runs as printed, and so does the example of every public name.

The blocks of one page run one after another, in the repository. Those marked `torchrun` run on two ranks. A `text`
block right after a Python block is its output, except for the numbers in it. The example of a name can use `torch`,
`nn` and `torchweft`.
"""

import doctest
import importlib
import importlib.util
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchweft as weft
from tests.processes import ROOT, SOURCE, run, torchrun

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")]
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n+^```text\n(?!\$ )(.*?)^```)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
RANK_BLOCK = re.compile(r"^```python torchrun\n(.*?)^```", re.MULTILINE | re.DOTALL)
RANK_PAGES = [page for page in PAGES if RANK_BLOCK.search(page.read_text(encoding="utf-8"))]
PUBLIC = (
    "torchweft",
    "torchweft.checkpoint",
    "torchweft.errors",
    "torchweft.pipeline",
    "torchweft.recurrent",
    "torchweft.recurrent.cells",
    "torchweft.recurrent.layers",
    "torchweft.experts",
    "torchweft.experts.client",
    "torchweft.experts.discovery",
    "torchweft.experts.mixture",
    "torchweft.report",
    "torchweft.compat.torchgpipe",
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
FILE = re.compile(r"(?<![\w./])([\w/]+\.(?:py|cpp))\b(?!:\d)")
NAME = re.compile(r"`(torchweft(?:\.\w+)+)")
FOLDERS = ("src", "tests", "examples", "benchmarks", "tools", "docs")
LOGGER = re.compile(r'getLogger\("(torchweft[\w.]+)"\)')
LINK = re.compile(r"(?:\]\(|^\[[\w-]+\]: )([^)\s]+)", re.MULTILINE)
PICTURE = re.compile(r'(?:src|srcset)="([^"]+)"')
REPOSITORY = "https://github.com/torchweft-ml/torchweft"
RAW = "https://raw.githubusercontent.com/torchweft-ml/torchweft/main/"


def long_for_tutorials(page: Path) -> Any:
    """A page as a test parameter. Tutorials are `long`, because each trains for 10 to 60 seconds."""
    return pytest.param(page, marks=pytest.mark.long if page.parent.name == "tutorials" else (), id=page.name)


@pytest.mark.parametrize("page", [long_for_tutorials(page) for page in PAGES])
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    for package in ("transformers", "peft", "lightning"):
        if re.search(rf"^(from|import) {package}\b", text, re.MULTILINE) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{page.name} needs {package}; an extra of pyproject.toml brings it")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE), prepend=os.pathsep)  # for the processes that a page starts
    names: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    try:
        for match in BLOCK.finditer(text):
            line = text[: match.start(1)].count("\n")
            code = compile("\n" * line + match.group(1), str(page), "exec")
            with redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
            if match.group(2) is not None:
                assert without_numbers(printed.getvalue()) == without_numbers(match.group(2)), f"{page.name}:{line}"
    finally:
        for process in [value for value in names.values() if isinstance(value, subprocess.Popen)]:
            with process:  # left running by a page that failed
                process.kill()
        # Classes decorated with `@skippable` stay registered. Their functions would keep pipes and threads alive.
        names.clear()


def without_numbers(text: str) -> str:
    """A text in which all numbers are 0 and all spaces are single, because times and losses differ between machines."""
    return " ".join(NUMBER.sub("0", text).split())


@pytest.mark.long
@pytest.mark.parametrize("page", RANK_PAGES, ids=lambda page: page.name)
def test_code_for_torchrun_runs_on_two_ranks(page: Path, tmp_path: Path) -> None:
    code = "\n".join(RANK_BLOCK.findall(page.read_text(encoding="utf-8")))
    extras = ("transformers", "peft", "lightning")
    if absent := [name for name in extras if name in code and not importlib.util.find_spec(name)]:
        pytest.skip(f"{page.name} needs {' and '.join(absent)}; extras of pyproject.toml bring them")
    program = tmp_path / f"{page.stem}.py"
    program.write_text(code, encoding="utf-8")
    done = torchrun(2, program)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.name)
def test_links_of_a_page_have_targets(page: Path) -> None:
    """Absolute links into this repository, which README needs on PyPI, must lead to a file too."""
    text = page.read_text(encoding="utf-8")
    missing: list[str] = []
    for link in (*LINK.findall(text), *PICTURE.findall(text)):
        address, _, anchor = link.partition("#")
        path = re.sub(f"^{REPOSITORY}/(blob|tree)/main/|^{RAW}", "", address)
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent if path == address else ROOT) / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


def test_site_navigates_to_every_page_of_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the settings add to it
    navigation: dict[str, dict[str, str]] = runpy.run_path(str(ROOT / "docs" / "conf.py"))["navigation"]
    links = [link for part in navigation.values() for link in part.values() if not link.startswith("https:")]
    pages = [page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in PAGES[1:]]
    assert sorted(["index", *links]) == sorted([*pages, "reference/index"])


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md"])
def test_page_that_is_shown_elsewhere_has_no_relative_link(name: str) -> None:
    """PyPI shows README outside the repository, and removes everything but ``img`` from a ``picture``."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [*LINK.findall(text), *PICTURE.findall(text)]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert text.count("<picture>") == text.count("<img ")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = [f"/{file.relative_to(ROOT)}" for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")] + ["/do.py"]
    missing = [name for name in FILE.findall(text) if not any(file.endswith(f"/{name}") for file in files)]
    loggers = {name for file in (ROOT / "src").rglob("*.py") for name in LOGGER.findall(file.read_text("utf-8"))}
    missing += [name for name in NAME.findall(text) if name not in loggers and not resolves(name)]
    assert missing == [], "a page mentions files or names that do not exist"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module or a name in one."""
    module, _, rest = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        try:
            return bool(module) and hasattr(importlib.import_module(module), rest)
        except ModuleNotFoundError:
            parent, _, kind = module.rpartition(".")
            return bool(parent) and hasattr(getattr(importlib.import_module(parent), kind, None), rest)
    return True


@pytest.mark.parametrize("module", PUBLIC)
def test_example_of_every_public_name_runs(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=OPTIONS)
    package = importlib.import_module(module)
    without_example: list[str] = []
    for name in ["__doc__", *package.__all__]:
        thing = package if name == "__doc__" else getattr(package, name)
        if thing is not package and not inspect.isclass(thing) and not inspect.isfunction(thing):
            continue  # a module or a table
        text = inspect.cleandoc(thing.__doc__ or "")
        names = {"torch": torch, "nn": nn, "weft": weft}
        example = parser.get_doctest(text, names, f"{module}.{name}", inspect.getsourcefile(thing), None)
        error = inspect.isclass(thing) and issubclass(thing, Exception)  # `weft.errors` has one example for all
        if not example.examples:
            without_example += [] if error or (thing is package and module != "torchweft.errors") else [name]
        elif thing is package or module == "torchweft" or name not in weft.__all__:  # each example once
            torch.manual_seed(0)
            runner.run(example)
    assert without_example == [], "no example (a line that begins with >>>) in the docstring"
    assert runner.failures == 0, capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(300)  # half a minute on a quiet machine
def test_site_builds_without_a_warning_and_has_all_names(tmp_path: Path) -> None:
    if missing := [name for name in ("sphinx", "furo", "myst_parser") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"documentation site: there is no {missing[0]}; the extra `docs` brings it")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-b", "dirhtml", "-d", str(tmp_path / "doctrees")]
    done = run([sys.executable, "-m", "sphinx", *options, "docs", str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    reference = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "reference").rglob("index.html"))
    identifiers = set(re.findall(r'id="weft(?:\.\w+)*\.(\w+)"', reference))
    for module in map(importlib.import_module, PUBLIC):
        things = {name: getattr(module, name) for name in module.__all__}
        described = {name for name, thing in things.items() if inspect.isclass(thing) or inspect.isfunction(thing)}
        assert described - identifiers == set(), f"names of {module.__name__} are on no page of the reference"
