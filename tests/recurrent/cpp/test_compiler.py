"""Compiled libraries on disk are reused, never torn, and never another user's. A compiler is optional."""

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
from torchweft.core.errors import UsageError
from torchweft.recurrent import Recurrent
from torchweft.recurrent.cpp import compiler, cpp_backend
from torchweft.recurrent.cpp.compiler import CompileError, cache_folder, load

TEXT = 'extern "C" int answer() { return 42; }'
CACHED = (
    *(compiler.find_compiler, compiler.cache_folder, compiler.compiler_version, compiler.processor_flags),
    cpp_backend.kernels,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty cache. Cached facts about this machine are cleared before and after."""
    monkeypatch.setenv("TORCHWEFT_CACHE", str(tmp_path / "cache"))
    for function in CACHED:
        function.cache_clear()
    yield tmp_path / "cache" / "compiled"
    monkeypatch.undo()
    for function in CACHED:
        function.cache_clear()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the commands that are run."""
    run, seen = subprocess.run, list[list[str]]()

    def recorded(command: list[str], **options: object) -> object:
        seen.append(command)
        return run(command, **options)

    monkeypatch.setattr(compiler.subprocess, "run", recorded)
    return seen


@needs_compiler
def test_libraries_are_reused_by_text_and_flags(place: Path, commands: list[list[str]]) -> None:
    """Only their owner can read the files, and leftovers of a killed compilation are removed."""
    for name, age in (("compiling-old", 1000.0), ("compiling-new", None)):
        (place / name).mkdir(parents=True)
        if age is not None:
            os.utime(place / name, (age, age))
    place.chmod(0o755)
    assert load(TEXT, exact=True).answer() == 42
    assert [path.name for path in place.glob("compiling-*")] == ["compiling-new"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place, *place.glob("*.so"))] == [0o700, 0o600]
    commands.clear()
    assert load(TEXT, exact=True).answer() == 42
    assert not commands
    assert load(TEXT, exact=False).answer() == 42, "other flags, another library"
    assert load(TEXT.replace("42", "43"), exact=True).answer() == 43
    assert len(commands) == 2 and len(list(place.glob("*.so"))) == 3


@needs_compiler
def test_further_flags_apply_to_loops_of_cells(
    place: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags are part of the key, and cannot override the flag for equal bits. Matrix products never get them."""
    monkeypatch.delenv("TORCHWEFT_CXXFLAGS", raising=False)
    load(TEXT, exact=True)
    load(TEXT, exact=False)
    monkeypatch.setenv("TORCHWEFT_CXXFLAGS", "-O0 -DNAME='a b'")
    commands.clear()
    load(TEXT, exact=False)
    assert not commands
    load(TEXT, exact=True)
    flags = commands[0]
    assert flags.index("-O0") < flags.index("-DNAME=a b") < flags.index("-ffp-contract=off")


@needs_compiler
@pytest.mark.parametrize("broken", ["empty", "text", "the head", "a flipped bit"])
def test_torn_library_is_compiled_again(place: Path, broken: str, commands: list[list[str]]) -> None:
    """Mapping a truncated file would kill the process by a bus error."""
    load(TEXT, exact=True)
    (path,) = place.iterdir()
    content = path.read_bytes()
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    path.unlink()  # it stays mapped in this process
    path.write_bytes({"empty": b"", "text": b"text", "the head": content[:4096]}.get(broken, flipped))
    commands.clear()
    assert load(TEXT, exact=True).answer() == 42
    assert len(commands) == 1
    assert path.read_bytes() == content and [*place.iterdir()] == [path]


@needs_compiler
def test_cache_drops_the_least_recently_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [TEXT.replace("42", str(number)) for number in range(4)]
    paths: list[Path] = []
    for age, text in enumerate(texts[:3]):
        load(text, exact=True)
        (path,) = {*place.iterdir()} - {*paths}
        os.utime(path, (1000 + age, 1000 + age))
        paths.append(path)
    load(texts[0], exact=True)  # used again, so that the second is the oldest now
    monkeypatch.setenv("TORCHWEFT_CACHE_MIB", str(3.5 * paths[0].stat().st_size / 2**20))
    load(texts[3], exact=True)
    assert {*place.iterdir()} >= {paths[0], paths[2]} and not paths[1].exists()
    monkeypatch.setenv("TORCHWEFT_CACHE_MIB", "0")
    assert load(texts[1], exact=True).answer() == 1
    assert not [*place.iterdir()]
    for wrong in ("much", "nan", "-1"):
        monkeypatch.setenv("TORCHWEFT_CACHE_MIB", wrong)
        with pytest.raises(UsageError, match=f"TORCHWEFT_CACHE_MIB is '{wrong}', wanted a number of mebibytes"):
            load(TEXT, exact=True)


@pytest.mark.long
@needs_compiler
def test_two_processes_compile_the_same_text_at_once(place: Path) -> None:
    code = (
        f"from torchweft.recurrent.cpp.compiler import load\nprint('ready', flush=True)\ninput()\n"
        f"print(load({TEXT!r}, exact=True).answer())"
    )
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in processes] == ["42\n", "42\n"]
    assert [path.suffix for path in place.iterdir()] == [".so"]


@needs_compiler
def test_compiler_errors_and_timeouts_are_raised(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match=r"(?s)ended with code 1.*nonsense"):
        load("nonsense", exact=True)
    assert not list(place.iterdir())
    monkeypatch.setattr(compiler, "SECONDS", 0.0)
    with pytest.raises(CompileError, match="did not finish"):
        load(TEXT, exact=True)


@grid(mode=[0o777, 0o770, 0o702], depth=[0, 1, 2])
def test_a_folder_that_others_could_change_is_not_used(place: Path, mode: int, depth: int) -> None:
    place.mkdir(parents=True)
    [place, *place.parents][depth].chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"(?s)others can write to .* \(mode {mode:04o}\).*set TORCHWEFT_CACHE"):
        assert cache_folder() != place
    assert not stat.S_IMODE(cache_folder().stat().st_mode) & 0o077


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_link_that_others_could_repoint_is_resolved_once(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    safe, shared = tmp_path / "safe", tmp_path / "shared"
    for folder in (safe, shared):
        folder.mkdir()
    shared.chmod(mode)
    (shared / "link").symlink_to("../safe")
    (tmp_path / "there").symlink_to("shared/link")
    for path in (shared / "link", tmp_path / "there", safe / ".." / "safe"):
        monkeypatch.setenv("TORCHWEFT_CACHE", str(path))
        cache_folder.cache_clear()
        assert cache_folder() == safe.resolve() / "compiled"
    monkeypatch.setenv("TORCHWEFT_CACHE", str(shared / "own"))
    cache_folder.cache_clear()
    if mode == 0o1777:  # with the sticky bit, other users cannot replace a folder of ours
        assert cache_folder() == shared.resolve() / "own" / "compiled"
    else:
        with pytest.warns(RuntimeWarning, match="others can write to"):
            assert not cache_folder().is_relative_to(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_below_another_users_is_not_used(place: Path) -> None:
    place.mkdir(parents=True)
    os.chown(place.parent, 12345, -1)
    with pytest.warns(RuntimeWarning, match=f"{place.parent} belongs to user 12345"):
        assert cache_folder() != place


def test_cache_folder_follows_the_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be created is replaced by a temporary one."""
    assert cache_folder() == place and stat.S_IMODE(place.stat().st_mode) == 0o700
    monkeypatch.delenv("TORCHWEFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    cache_folder.cache_clear()
    assert cache_folder() == place / "torchweft" / "compiled"
    (place / "file").write_text("a file")
    monkeypatch.setenv("TORCHWEFT_CACHE", str(place / "file"))
    cache_folder.cache_clear()
    assert not cache_folder().is_relative_to(place) and cache_folder().is_dir()


@pytest.mark.long
def test_networks_run_without_a_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is part of `why`."""
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("PATH", os.fspath(place))
    with pytest.raises(CompileError, match="install g"):
        load(TEXT, exact=True)
    cell, x = nn.GRUCell(3, 4), torch.randn(4, 2, 3)
    net = Recurrent(cell)
    close(net(x).outputs, eagerly(cell)(x).outputs, 1e-5)
    ((_, name, why),) = net.why()
    assert name in ("python", "eager") and "there is no C++ compiler" in why
    with pytest.raises(UsageError, match="install g"):
        Recurrent(cell, backend="c")(x)
