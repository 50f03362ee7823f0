#!/usr/bin/env python3
"""Install and run torchweft on a bare machine, with one command, Python 3.11 and pip.

    python3 do.py                      run the examples, one after the other
    python3 do.py EXAMPLE [options]    run one: unet_pipeline, unet_ranks, gpt2_pipeline, char_rnn, remote_experts,
                                       report
    python3 do.py test [pytest args]   run a sample of the tests in some minutes; with --all every test
    python3 do.py bench [NAME ...]     run the benchmarks, all of them or those named
    python3 do.py mutants FOLDER       find the tests of a folder that notice no small fault of the code, in hours
    python3 do.py check                check lint, format, types, imports, size, structure and prose of src
    python3 do.py docs [serve]         build the documentation site into build/site, or show it while you write
    python3 do.py help                 print this text

It works from any folder. The command itself runs in the repository, so paths in args are relative to it.

    pyproject.toml ──┐
    constraints.txt ─┼─ fingerprint ── the same as in the stamp? ── yes ──> run the command in .venv
    Python version ──┘                             └── no ──> install into .venv, write the stamp ──┘

Nothing outside the repository changes, so an externally managed system pip (PEP 668) does not matter. The stamp is
removed before an install and written after it, so an interrupted install is repeated.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:
    sys.exit("do.py needs Linux or macOS. Elsewhere, in a venv: pip install -c constraints.txt -e .[examples,test]")

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed.stamp"
LOCK = ROOT / ".venv.lock"
VERSION = sys.version.split()[0]
EXAMPLES = ("unet_pipeline", "unet_ranks", "gpt2_pipeline", "char_rnn", "remote_experts", "report")
DEFAULT_EXTRAS = ("examples", "test")
FOR_TESTS = (*DEFAULT_EXTRAS, "manifests", "hf", "lora", "lightning", "docs")
EXTRAS = {
    "test": FOR_TESTS,
    "mutants": FOR_TESTS,
    "bench": (*DEFAULT_EXTRAS, "bench", "hf"),
    "check": DEFAULT_EXTRAS,
    "docs": ("docs",),
}
# Tests run in one process per core. A file is not divided, because its tests share servers and compiled cells.
TESTS = ("pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--progress", "30")
# `docs serve` builds again after each change of a page or of a source.
SITE = ("-b", "dirhtml", "-d", "build/doctrees", "docs", "build/site")
BUILD = ("sphinx", "--fail-on-warning", "--keep-going", *SITE)
SERVE = ("sphinx_autobuild", "--watch", "src", "--ignore", "*/docs/reference/*", *SITE)
MODULES = {"test": TESTS, "bench": ("benchmarks",)}


class Stop(Exception):
    """The command cannot continue. The message says why, and what to do."""


def say(text: str) -> None:
    """Print progress on stderr, so that stdout belongs to the command."""
    print(f"do.py: {text}", file=sys.stderr, flush=True)


def call(argv: Sequence[str | Path]) -> int:
    """Run one command in the repository and return its exit code, which is 128 + n if signal n killed it."""
    # A user-wide `pip install --user` setting must not install the packages outside .venv.
    code = subprocess.call([str(word) for word in argv], cwd=ROOT, env={**os.environ, "PIP_USER": "0"})
    return code if code >= 0 else 128 - code


def checks(tools: Path, python: Path) -> dict[str, list[str]]:
    """The commands of `check`, by name, with the tools of one folder. The tests run this table too."""
    return {
        "ruff check": [str(tools / "ruff"), "check", "."],
        "ruff format": [str(tools / "ruff"), "format", "--check", "."],
        "pyright": [str(tools / "pyright"), "--pythonpath", str(python)],
        "import layers": [str(tools / "lint-imports")],
        "structure": [str(python), str(ROOT / "tools" / "structure.py")],
        "prose": [str(python), str(ROOT / "tools" / "prose.py")],
    }


def fingerprint() -> str:
    """A hash of everything that determines the installed packages, except the extras."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    parts += [VERSION.encode(), os.fsencode(ROOT)]  # a moved venv is broken: its scripts contain their old path
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def installed() -> set[str]:
    """The installed extras. Empty if the fingerprint has changed since."""
    try:
        mark, *extras = STAMP.read_text(encoding="utf-8").split() or [""]
    except FileNotFoundError:
        return set()
    return set(extras) if mark == fingerprint() and PYTHON.exists() else set()


def stamp(mark: str, extras: Iterable[str]) -> None:
    """Record a finished install atomically, so that no reader sees half a stamp."""
    draft = STAMP.with_suffix(".draft")
    draft.write_text("\n".join([mark, *sorted(extras)]) + "\n", encoding="utf-8")
    os.replace(draft, STAMP)


@contextmanager
def install_lock() -> Generator[None, None, None]:
    """Hold the install lock. The kernel frees it if its holder dies, so no stale lock remains."""
    try:
        file = LOCK.open("w")
    except OSError as error:
        raise Stop(
            f"the environment belongs into {VENV}, but this checkout cannot be written to ({error.strerror}). Copy it "
            "to a folder of yours, or install it: python3 -m venv ~/torchweft && ~/torchweft/bin/pip install "
            f"-c {ROOT}/constraints.txt {ROOT}"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is installing; waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(extras: Iterable[str]) -> None:
    """Install `extras` into .venv, if anything is missing. Raises Stop if that fails."""
    if installed() >= set(extras):
        return
    with install_lock():
        have = installed()  # again, because another run may have installed them during the wait
        if not have >= set(extras):
            install(have | set(extras))


def install(extras: set[str]) -> None:
    """Create .venv for this Python if necessary, and install torchweft, editable, with `extras`."""
    STAMP.unlink(missing_ok=True)
    # Before the install: if the files are edited during it, the next run installs again.
    mark = fingerprint()
    if not venv_fits():
        make_venv()
    names = ",".join(sorted(extras))
    say(f"installing torchweft[{names}] into {VENV}; the first time this takes minutes, for torch is large")
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    if code := call([*pip, "-c", ROOT / "constraints.txt", "-e", f".[{names}]"]):
        raise Stop(f"pip ended with code {code}, see above. Once that is fixed, run the same command again.")
    stamp(mark, extras)


def venv_fits() -> bool:
    """Whether .venv has a working pip and the Python version that runs this file."""
    if not PYTHON.exists():
        return False
    probe = [str(PYTHON), "-c", "import sys, pip; print(sys.version.split()[0])"]
    seen = subprocess.run(probe, capture_output=True, text=True, check=False)
    return seen.stdout.strip() == VERSION


def make_venv() -> None:
    """Create .venv. An existing one is broken or of another Python, and is replaced."""
    if importlib.util.find_spec("ensurepip") is None:
        raise Stop(
            f"Python {VERSION} ({sys.executable}) has no ensurepip, so it cannot create a virtual environment. "
            "On Debian or Ubuntu: apt install python3-venv. Or run do.py with another Python."
        )
    why = "the existing one is broken or of another Python" if VENV.exists() else "it does not exist yet"
    say(f"creating {VENV} for Python {VERSION}: {why}")
    if call([sys.executable, "-m", "venv", "--clear", VENV]):
        shutil.rmtree(VENV, ignore_errors=True)
        raise Stop(f"could not create {VENV}, see above")


def run_all(commands: Mapping[str, Sequence[str | Path]], done: str) -> int:
    """Run every command, even after a failure. Name those that failed, and return the first exit code that is not 0."""
    failed: dict[str, int] = {}
    for name, argv in commands.items():
        say(name)
        if code := call(argv):
            failed[name] = code
    say(f"failed: {', '.join(failed)}" if failed else done)
    return next(iter(failed.values()), 0)


def example(name: str) -> list[str | Path]:
    """The command that runs one of the examples."""
    return [PYTHON, ROOT / "examples" / f"{name}.py"]


def run(command: str, rest: Sequence[str]) -> int:
    """Run a command with the words after it. "" means all examples."""
    if command == "check":
        return run_all(checks(PYTHON.parent, PYTHON), "all checks hold")
    if command == "":
        return run_all({name: example(name) for name in EXAMPLES}, "all examples ran")
    if command == "docs":
        serve = rest[:1] == ["serve"]
        return call([PYTHON, "-m", *(SERVE if serve else BUILD), *rest[serve:]])
    if command == "mutants":
        return call([PYTHON, ROOT / "tools" / "mutants.py", *rest])
    argv = example(command) if command in EXAMPLES else [PYTHON, "-m", *MODULES[command]]
    return call([*argv, *rest])


def main(args: Sequence[str]) -> int:
    """Run the command in `args` and return its exit code, or 1 for a failed install, or 2 for misuse."""
    if sys.version_info < (3, 11):  # noqa: UP036  (this file can be started by an older one)
        say(f"this is Python {VERSION}, and torchweft needs 3.11 or newer; try: python3.11 do.py")
        return 2
    if args and args[0] in ("help", "-h", "--help"):
        print(__doc__)
        return 0
    command, rest = (args[0], args[1:]) if args else ("", ())
    if command and command not in (*EXAMPLES, *EXTRAS):
        say(f"{command!r} is not a command; choose from {', '.join((*EXAMPLES, *EXTRAS))}, help")
        return 2
    if command == "check" and rest:
        say(f"check takes no arguments, but was given {' '.join(rest)!r}")
        return 2
    try:
        ensure(EXTRAS.get(command, DEFAULT_EXTRAS))
        return run(command, rest)
    except Stop as stop:
        say(str(stop))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
