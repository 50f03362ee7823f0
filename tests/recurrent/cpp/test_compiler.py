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

from tests.recurrent.recurrent_cases import close, eagerly, grid, needs_compiler
from weft.core.errors import UsageError
from weft.recurrent import Recurrent
from weft.recurrent.cpp import compiler
from weft.recurrent.cpp import cpp_backend as backend
from weft.recurrent.cpp.compiler import CompileError, folder, load

TEXT = 'extern "C" int answer() { return 42; }'
KNOWN = (compiler.compiler, compiler.folder, compiler._version, compiler._processor, backend.kernels)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; what was found out about this machine is forgotten before and after."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    for each in KNOWN:
        each.cache_clear()
    yield tmp_path / "cache" / "compiled"
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
@pytest.mark.parametrize("broken", ["nothing", "no library", "the head", "a flipped bit"])
def test_a_torn_library_is_never_loaded_but_made_anew(
    place: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A program that maps a file of which the end is missing is ended by a bus error.
    load(TEXT, exact=True)
    (path,) = place.iterdir()
    whole = path.read_bytes()
    flipped = bytes([*whole[:-1], whole[-1] ^ 1])
    path.unlink()  # it stays whole in this process
    path.write_bytes({"nothing": b"", "no library": b"text", "the head": whole[:4096]}.get(broken, flipped))
    seen = runs(monkeypatch)
    assert load(TEXT, exact=True).answer() == 42
    assert len(seen) == 1
    assert path.read_bytes() == whole and [*place.iterdir()] == [path]


@needs_compiler
def test_the_cache_is_bounded_and_what_was_used_longest_ago_goes_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TEXT.replace("42", str(number)) for number in range(4)]
    paths: list[Path] = []
    for age, text in enumerate(texts[:3]):
        load(text, exact=True)
        (path,) = {*place.iterdir()} - {*paths}
        os.utime(path, (1000 + age, 1000 + age))
        paths.append(path)
    load(texts[0], exact=True)  # used again, so that the second is the oldest now
    monkeypatch.setenv("WEFT_CACHE_MIB", str(3.5 * paths[0].stat().st_size / 2**20))
    load(texts[3], exact=True)
    assert {*place.iterdir()} >= {paths[0], paths[2]} and not paths[1].exists()
    monkeypatch.setenv("WEFT_CACHE_MIB", "0")
    assert load(texts[1], exact=True).answer() == 1
    assert not [*place.iterdir()]
    for wrong in ("much", "nan", "-1"):
        monkeypatch.setenv("WEFT_CACHE_MIB", wrong)
        with pytest.raises(UsageError, match=f"WEFT_CACHE_MIB is '{wrong}', wanted a number of mebibytes"):
            load(TEXT, exact=True)


@needs_compiler
def test_all_is_for_its_owner_alone_and_what_a_killed_compilation_left_is_removed(place: Path) -> None:
    for name, age in (("compiling-old", 1000.0), ("compiling-new", None)):
        (place / name).mkdir(parents=True)
        if age is not None:
            os.utime(place / name, (age, age))
    place.chmod(0o755)
    load(TEXT, exact=True)
    assert [each.name for each in place.glob("compiling-*")] == ["compiling-new"]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (place, *place.glob("*.so"))] == [0o700, 0o600]


@pytest.mark.long
@needs_compiler
def test_two_processes_that_compile_the_same_at_once_both_get_it(place: Path) -> None:
    code = (
        f"from weft.recurrent.cpp.compiler import load\nprint('ready', flush=True)\ninput()\n"
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
def test_an_error_of_the_compiler_is_told_and_one_that_takes_too_long_given_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompileError, match=r"(?s)ended with code 1.*nonsense"):
        load("nonsense", exact=True)
    assert not list(place.iterdir())
    monkeypatch.setattr(compiler, "SECONDS", 0.0)
    with pytest.raises(CompileError, match="did not finish"):
        load(TEXT, exact=True)


@needs_compiler
@grid(mode=[0o777, 0o770, 0o702], depth=[0, 1, 2])
def test_a_folder_that_others_could_change_is_not_used(place: Path, mode: int, depth: int) -> None:
    place.mkdir(parents=True)
    [place, *place.parents][depth].chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"(?s)others may write to .* \(mode {mode:04o}\).*set WEFT_CACHE"):
        assert load(TEXT, exact=True).answer() == 42
    assert not list(place.iterdir())
    assert folder() != place and not stat.S_IMODE(folder().stat().st_mode) & 0o077


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_link_that_others_could_repoint_is_resolved_once(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    safe, shared = tmp_path / "safe", tmp_path / "shared"
    for each in (safe, shared):
        each.mkdir()
    shared.chmod(mode)
    (shared / "link").symlink_to("../safe")
    (tmp_path / "there").symlink_to("shared/link")
    for way in (shared / "link", tmp_path / "there", safe / ".." / "safe"):
        monkeypatch.setenv("WEFT_CACHE", str(way))
        folder.cache_clear()
        assert folder() == safe.resolve() / "compiled"
    monkeypatch.setenv("WEFT_CACHE", str(shared / "own"))
    folder.cache_clear()
    if mode == 0o1777:  # with the sticky bit, nobody else can replace a folder of ours
        assert folder() == shared.resolve() / "own" / "compiled"
    else:
        with pytest.warns(RuntimeWarning, match="others may write to"):
            assert not folder().is_relative_to(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_below_one_of_somebody_else_is_not_used(place: Path) -> None:
    place.mkdir(parents=True)
    os.chown(place.parent, 12345, -1)
    with pytest.warns(RuntimeWarning, match=f"{place.parent} belongs to user 12345"):
        assert folder() != place


def test_a_folder_that_cannot_be_made_is_replaced(place: Path) -> None:
    place.parent.write_text("a file")
    assert folder() != place and folder().is_dir()


def test_the_cache_is_where_the_environment_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder() == place and stat.S_IMODE(place.stat().st_mode) == 0o700
    monkeypatch.delenv("WEFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    folder.cache_clear()
    assert folder() == place / "weft" / "compiled"


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
    with pytest.raises(UsageError, match="install g"):
        Recurrent(cell, backend="c")(x)
