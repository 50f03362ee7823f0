"""Compiled libraries on disk: found again, never half written, never another's; and no compiler is no disaster."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.recurrent.recurrent_cases import close, eagerly, needs_compiler
from weft.recurrent import Recurrent
from weft.recurrent.backends import NoPlanWarning
from weft.recurrent.native import compiler, program
from weft.recurrent.native.compiler import CompileError, folder, load

TEXT = 'extern "C" int answer() { return 42; }'
KNOWN = (compiler.compiler, compiler.folder, compiler._version, compiler._processor, program.kernels)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; what was found out about this machine is forgotten before and after."""
    home = tmp_path / "cache"
    monkeypatch.setenv("WEFT_CACHE", str(home))
    for each in KNOWN:
        each.cache_clear()
    yield home
    monkeypatch.undo()
    for each in KNOWN:
        each.cache_clear()


def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run from now on."""
    seen: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> object:
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(compiler.subprocess, "run", noted)
    return seen


@needs_compiler
def test_what_was_compiled_once_is_found_again_and_nothing_else_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(TEXT, exact=True).answer() == 42
    assert [each.suffix for each in place.iterdir()] == [".so"]
    seen = runs(monkeypatch)
    assert load(TEXT, exact=True).answer() == 42
    assert not seen
    assert load(TEXT, exact=False).answer() == 42, "other flags, another library"
    assert load(TEXT.replace("42", "43"), exact=True).answer() == 43
    assert len(seen) == 2 and len(list(place.iterdir())) == 3


@needs_compiler
@pytest.mark.parametrize("broken", [b"", b"no library", b"\x7fELF" + b"\0" * 500])
def test_a_broken_file_is_compiled_anew(place: Path, broken: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, made = compiler._compile, []

    def torn(path: str, flags: tuple[str, ...], text: str, target: Path) -> None:
        made.append(target)
        if len(made) == 1:
            target.write_bytes(broken)
        else:
            whole(path, flags, text, target)

    monkeypatch.setattr(compiler, "_compile", torn)
    assert load(TEXT, exact=True).answer() == 42
    assert len(made) == 2


@needs_compiler
def test_two_processes_that_compile_the_same_at_once_both_get_it(place: Path) -> None:
    code = (
        f"from weft.recurrent.native.compiler import load\nprint('ready', flush=True)\ninput()\n"
        f"print(load({TEXT!r}, exact=True).answer())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for each in started:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    assert [each.communicate(timeout=120)[0] for each in started] == ["42\n", "42\n"]
    assert [each.suffix for each in place.iterdir()] == [".so"]


@needs_compiler
def test_an_error_of_the_compiler_is_told_and_leaves_nothing(place: Path) -> None:
    with pytest.raises(CompileError, match=r"(?s)ended with code 1.*nonsense"):
        load("nonsense", exact=True)
    assert not list(place.iterdir())


@needs_compiler
def test_a_compiler_that_takes_too_long_is_given_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "SECONDS", 0.0)
    with pytest.raises(CompileError, match="did not finish"):
        load(TEXT, exact=True)


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    assert load(TEXT, exact=True).answer() == 42
    assert not list(place.iterdir())
    assert folder() != place and not stat.S_IMODE(folder().stat().st_mode) & 0o077


def test_a_folder_that_cannot_be_made_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write_text("a file")
    assert folder() != place and folder().is_dir()


def test_the_cache_is_where_the_environment_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder() == place and stat.S_IMODE(place.stat().st_mode) == 0o700
    monkeypatch.delenv("WEFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    folder.cache_clear()
    assert folder() == place / "weft"


@pytest.fixture
def without_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("PATH", os.fspath(place))


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_a_network_runs_and_says_why_it_is_not_compiled() -> None:
    with pytest.raises(CompileError, match="install g"):
        load(TEXT, exact=True)
    cell, x = nn.GRUCell(3, 4), torch.randn(4, 2, 3)
    from_program = Recurrent(cell)
    close(from_program(x).outputs, eagerly(cell)(x).outputs, 1e-5)
    ((_, name, why),) = from_program.why()
    assert name in ("python", "eager") and "there is no C++ compiler" in why
    asked = Recurrent(cell, backend="c")
    with pytest.warns(NoPlanWarning, match="install g"):
        close(asked(x).outputs, eagerly(cell)(x).outputs, 1e-5)
