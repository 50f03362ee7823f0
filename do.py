#!/usr/bin/env python3
"""From a bare machine to running code, with one command and nothing but Python 3.11 and pip.

    python3 do.py                      run the examples, one after the other
    python3 do.py EXAMPLE [options]    run one: unet_pipeline, unet_ranks, gpt2_pipeline, char_rnn, remote_experts,
                                       report
    python3 do.py test [pytest args]   run the tests; with --all those that take long as well
    python3 do.py bench [NAME ...]     run the benchmarks, all of them or those named
    python3 do.py check                lint, format, types, the layers of import, and the size and structure of src
    python3 do.py docs [FOLDER]        write the API reference from the docstrings, into build/api
    python3 do.py help                 this text

It works from any folder; the command itself runs in the repository, so paths in args are meant from there.

    pyproject.toml ──┐
    constraints.txt ─┼─ fingerprint ── the same as in the stamp? ── yes ──> run the command in .venv
    Python version ──┘                             └── no ──> install into .venv, write the stamp ──┘

Nothing outside the repository is touched, so a locked system pip (PEP 668) does not matter. The stamp goes
before an install and comes back after it, so an install that was interrupted is done again.
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
USUAL = ("examples", "test")
EXTRAS = {
    "test": (*USUAL, "manifests", "hf", "docs"),
    "bench": (*USUAL, "bench", "hf"),
    "check": USUAL,
    "docs": ("docs",),
}
# Tests run in a process per core; files stay whole, since their tests share servers and compiled cells.
TESTS = ("pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")
MODULES = {"test": TESTS, "bench": ("benchmarks",)}


class Stop(Exception):
    """Nothing more can be done; the message says why and what to do."""


def say(text: str) -> None:
    """Tell what happens now, on stderr, so that stdout belongs to the command."""
    print(f"do.py: {text}", file=sys.stderr, flush=True)


def call(argv: Sequence[str | Path]) -> int:
    """Run one command in the repository and return its exit code; killed by signal n counts as 128 + n."""
    # A user-wide `pip install --user` setting must not send the packages past .venv.
    code = subprocess.call([str(word) for word in argv], cwd=ROOT, env={**os.environ, "PIP_USER": "0"})
    return code if code >= 0 else 128 - code


def checks(tools: Path, python: Path) -> dict[str, list[str]]:
    """What `check` runs, by name, with the tools out of one folder. The tests run this table too."""
    return {
        "ruff check": [str(tools / "ruff"), "check", "."],
        "ruff format": [str(tools / "ruff"), "format", "--check", "."],
        "pyright": [str(tools / "pyright"), "--pythonpath", str(python)],
        "import layers": [str(tools / "lint-imports")],
        "structure": [str(python), str(ROOT / "tools" / "structure.py")],
    }


def fingerprint() -> str:
    """A hash of all that decides what gets installed, apart from the extras."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    parts += [VERSION.encode(), os.fsencode(ROOT)]  # a moved venv is broken: its scripts hold their old path
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def installed() -> set[str]:
    """The extras that are in place for the fingerprint of now; none if anything changed."""
    try:
        mark, *extras = STAMP.read_text(encoding="utf-8").split() or [""]
    except FileNotFoundError:
        return set()
    return set(extras) if mark == fingerprint() and PYTHON.exists() else set()


def stamp(mark: str, extras: Iterable[str]) -> None:
    """Record a finished install, in one step: a reader sees the whole stamp or none."""
    draft = STAMP.with_suffix(".draft")
    draft.write_text("\n".join([mark, *sorted(extras)]) + "\n", encoding="utf-8")
    os.replace(draft, STAMP)


@contextmanager
def alone() -> Generator[None, None, None]:
    """Hold the install lock. The kernel frees it when its holder dies, so no stale lock can be left."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is installing; waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(extras: Iterable[str]) -> None:
    """Make .venv hold `extras`; next to free when it does already. Raises Stop when it cannot."""
    if installed() >= set(extras):
        return
    with alone():
        have = installed()  # again: the run that we waited for may have done the work
        if not have >= set(extras):
            install(have | set(extras))


def install(extras: set[str]) -> None:
    """Make .venv if there is none for this Python, and install weft, editable, with `extras`."""
    STAMP.unlink(missing_ok=True)
    mark = fingerprint()  # now: if the files are edited meanwhile, the next run installs again
    if not venv_fits():
        make_venv()
    names = ",".join(sorted(extras))
    say(f"installing weft[{names}] into {VENV}; the first time this takes minutes, for torch is large")
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    if code := call([*pip, "-c", ROOT / "constraints.txt", "-e", f".[{names}]"]):
        raise Stop(f"pip ended with code {code}, see above. Once that is mended, run the same command again.")
    stamp(mark, extras)


def venv_fits() -> bool:
    """Whether .venv has a working pip and the Python version that runs this file."""
    if not PYTHON.exists():
        return False
    probe = [str(PYTHON), "-c", "import sys, pip; print(sys.version.split()[0])"]
    seen = subprocess.run(probe, capture_output=True, text=True, check=False)
    return seen.stdout.strip() == VERSION


def make_venv() -> None:
    """Make .venv afresh; one that is there is broken or of another Python, and goes."""
    if importlib.util.find_spec("ensurepip") is None:
        raise Stop(
            f"Python {VERSION} ({sys.executable}) has no ensurepip and so cannot make a virtual environment. "
            "On Debian or Ubuntu: apt install python3-venv. Or run do.py with another Python."
        )
    why = "the one there is broken or of another Python" if VENV.exists() else "there is none yet"
    say(f"making {VENV} for Python {VERSION}: {why}")
    if call([sys.executable, "-m", "venv", "--clear", VENV]):
        shutil.rmtree(VENV, ignore_errors=True)
        raise Stop(f"could not make {VENV}, see above")


def run_all(commands: Mapping[str, Sequence[str | Path]], done: str) -> int:
    """Run every command, also after one failed, and name those that did; return the first one's exit code."""
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
    """Run a command with the words after it; "" stands for all examples."""
    if command == "check":
        return run_all(checks(PYTHON.parent, PYTHON), "all checks hold")
    if command == "":
        return run_all({name: example(name) for name in EXAMPLES}, "all examples ran")
    if command == "docs":
        return call([PYTHON, ROOT / "tools" / "reference.py", *rest])
    argv = example(command) if command in EXAMPLES else [PYTHON, "-m", *MODULES[command]]
    return call([*argv, *rest])


def main(args: Sequence[str]) -> int:
    """Do what `args` say and return the exit code: the command's, 1 for a failed install, 2 for misuse."""
    if sys.version_info < (3, 11):  # noqa: UP036  (whoever starts this may well have an older one)
        say(f"this is Python {VERSION}, and weft needs 3.11 or newer; try: python3.11 do.py")
        return 2
    if args and args[0] in ("help", "-h", "--help"):
        print(__doc__)
        return 0
    command, rest = (args[0], args[1:]) if args else ("", ())
    if command and command not in (*EXAMPLES, *EXTRAS):
        say(f"there is no command {command!r}; there are {', '.join((*EXAMPLES, *EXTRAS))}, help")
        return 2
    if command == "check" and rest:
        say(f"check takes no arguments, but was given {' '.join(rest)!r}")
        return 2
    try:
        ensure(EXTRAS.get(command, USUAL))
        return run(command, rest)
    except Stop as stop:
        say(str(stop))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
