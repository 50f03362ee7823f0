"""do.py installs only when necessary, reports its actions, and passes exit codes on. Runs without network and pip."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[1] / "do.py"
Capture = pytest.CaptureFixture[str]


def load(folder: Path) -> ModuleType:
    """Import the do.py of `folder`."""
    spec = importlib.util.spec_from_file_location("do", folder / "do.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Shell:
    """Replaces the runner: records every command, creates the files of venv, and returns the given exit codes."""

    def __init__(self, do: ModuleType) -> None:
        self.do = do
        self.lines: list[str] = []
        self.codes: dict[str, int] = {}  # a word of the command -> its exit code
        self.during_install: Callable[[], None] = lambda: None

    def __call__(self, argv: list[str | Path]) -> int:
        line = " ".join(map(str, argv))
        self.lines.append(line)
        if "-m venv" in line:
            self.do.PYTHON.parent.mkdir(parents=True, exist_ok=True)
            self.do.PYTHON.touch()
        if "pip install" in line:
            self.during_install()
        return next((code for word, code in self.codes.items() if word in line), 0)

    def count(self, word: str) -> int:
        return sum(word in line for line in self.lines)


@pytest.fixture
def do(tmp_path: Path) -> ModuleType:
    """A copy of do.py in a temporary repository."""
    shutil.copy(SOURCE, tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    return load(tmp_path)


@pytest.fixture
def shell(do: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell(do)
    monkeypatch.setattr(do, "call", shell)
    monkeypatch.setattr(do, "venv_fits", do.PYTHON.exists)
    return shell


def test_first_run_creates_a_venv_installs_and_runs(do: ModuleType, shell: Shell) -> None:
    assert do.main([]) == 0
    venv, pip, *examples = shell.lines
    assert venv == f"{sys.executable} -m venv --clear {do.VENV}"
    assert pip.startswith(f"{do.PYTHON} -m pip install")
    assert pip.endswith(f"-c {do.ROOT / 'constraints.txt'} -e .[examples,test]")
    assert examples == [f"{do.PYTHON} {do.ROOT}/examples/{name}.py" for name in do.EXAMPLES]


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["char_rnn"], "{root}/examples/char_rnn.py"),
        (["report", "--steps", "2"], "{root}/examples/report.py --steps 2"),
        (
            ["test", "-k", "x", "tests/core"],
            "-m pytest -n auto --maxprocesses 4 --dist loadfile --progress 30 -k x tests/core",
        ),
        (["mutants", "tests/core"], "{root}/tools/mutants.py tests/core"),
        (["bench"], "-m benchmarks"),
        (["bench", "pipeline"], "-m benchmarks pipeline"),
        (["docs", "-q"], "-m sphinx --fail-on-warning --keep-going -b dirhtml -d build/doctrees docs build/site -q"),
        (
            ["docs", "serve", "--port", "80"],
            "-m sphinx_autobuild --watch src --ignore */docs/reference/* -b dirhtml -d build/doctrees docs build/site "
            "--port 80",
        ),
    ],
)
def test_each_command_runs_its_module_with_its_words(
    do: ModuleType, shell: Shell, args: list[str], command: str
) -> None:
    assert do.main(args) == 0
    assert shell.lines[-1] == f"{do.PYTHON} {command.format(root=do.ROOT)}"


def test_second_run_installs_nothing(do: ModuleType, shell: Shell) -> None:
    """Changed sources do not cause an install either."""
    do.main(["test"])
    (do.ROOT / "module.py").write_text("x = 1")
    for args in (["test"], ["check"], []):
        do.main(args)
    assert shell.count("pip install") == 1


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_metadata_installs_again_into_the_same_venv(
    do: ModuleType, shell: Shell, name: str, during: bool
) -> None:
    """A change during an install counts too, because pip can have read the old file."""

    def change() -> None:
        (do.ROOT / name).write_text("changed")

    shell.during_install = change if during else shell.during_install
    do.main(["test"])
    change()
    do.main(["test"])
    do.main(["test"])
    assert shell.count("pip install") == 2
    assert shell.count("-m venv") == 1


def test_another_python_recreates_the_venv(
    do: ModuleType, shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    do.main(["test"])
    monkeypatch.setattr(do, "VERSION", "3.99.0")
    monkeypatch.setattr(do, "venv_fits", lambda: False)
    do.main(["test"])
    assert shell.count("pip install") == shell.count("-m venv") == 2
    assert "of another Python" in capfd.readouterr().err


def test_only_a_working_venv_of_this_python_fits(do: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not do.venv_fits()
    monkeypatch.setattr(do, "PYTHON", Path(sys.executable))
    assert do.venv_fits()
    monkeypatch.setattr(do, "VERSION", "3.99.0")
    assert not do.venv_fits()
    monkeypatch.setattr(do, "PYTHON", Path(shutil.which("false") or "/bin/false"))
    assert not do.venv_fits()


def test_more_extras_join_the_installed_ones(do: ModuleType, shell: Shell) -> None:
    for _ in range(2):
        do.main(["test"])
        do.main(["bench"])
    assert shell.count("-e .[bench,docs,examples,hf,lightning,lora,manifests,test]") == 1
    assert do.installed() == {"bench", "docs", "examples", "hf", "lightning", "lora", "manifests", "test"}
    assert shell.count("pip install") == 2


def test_failed_install_leaves_no_stamp_and_is_repeated(do: ModuleType, shell: Shell, capfd: Capture) -> None:
    shell.codes = {"pip install": 9}
    assert do.main(["test"]) == 1
    assert "pip ended with code 9" in capfd.readouterr().err
    assert not do.STAMP.exists()
    assert shell.count("-m pytest") == 0
    shell.codes = {}
    assert do.main(["test"]) == 0
    assert shell.count("pip install") == 2


def test_interrupted_install_removes_the_old_stamp(do: ModuleType, shell: Shell) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    do.main(["test"])
    shell.during_install = interrupt
    assert do.main(["bench"]) == 130
    shell.during_install = lambda: None
    assert do.installed() == set()
    assert do.main(["test"]) == 0
    assert shell.count("pip install") == 3


def test_torn_stamp_is_ignored(do: ModuleType, shell: Shell) -> None:
    do.main(["test"])
    for torn in ("", do.fingerprint()[:10], do.fingerprint(), f"{do.fingerprint()} examples"):
        do.STAMP.write_text(torn)
        assert not do.installed() >= {"examples", "test"}


def test_two_runs_at_once_install_once(do: ModuleType, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    second_waits = threading.Event()
    codes: list[int] = []
    monkeypatch.setattr(do, "say", lambda text: second_waits.set() if "another run" in text else None)
    second = threading.Thread(target=lambda: codes.append(do.main(["test"])))

    def start_second() -> None:
        second.start()
        assert second_waits.wait(30), "the second run neither waited nor reported it"

    shell.during_install = start_second
    codes.append(do.main(["test"]))
    second.join(30)
    assert codes == [0, 0]
    assert shell.count("pip install") == 1
    assert shell.count("-m pytest") == 2


def test_failing_command_passes_its_exit_code_on(do: ModuleType, shell: Shell) -> None:
    shell.codes = {"-m pytest": 5, "report.py": 3}
    assert do.main(["test"]) == 5
    assert do.main(["report"]) == 3


def test_all_examples_run_even_after_a_failure(do: ModuleType, shell: Shell, capfd: Capture) -> None:
    shell.codes = {"unet_pipeline": 3, "remote_experts": 4}
    assert do.main([]) == 3
    assert shell.count("examples/") == len(do.EXAMPLES)
    assert "failed: unet_pipeline, remote_experts" in capfd.readouterr().err


def test_all_checks_run_even_after_a_failure(do: ModuleType, shell: Shell, capfd: Capture) -> None:
    shell.codes = {"--check": 3, "pyright": 4}
    assert do.main(["check"]) == 3
    tools = [line.split()[0].rsplit("/", 1)[1] for line in shell.lines[2:]]
    assert tools == ["ruff", "ruff", "pyright", "lint-imports", "python", "python"]
    assert "failed: ruff format, pyright" in capfd.readouterr().err


def test_every_example_is_among_those_that_run() -> None:
    folder = SOURCE.parent / "examples"
    assert {path.stem for path in folder.glob("*.py")} == {*load(SOURCE.parent).EXAMPLES}


def test_call_runs_in_the_repository_and_maps_signals(do: ModuleType) -> None:
    kill = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    check_folder = f"import os, sys; sys.exit(os.getcwd() != {str(do.ROOT)!r})"
    for program, code in ((check_folder, 0), ("raise SystemExit(4)", 4), (kill, 128 + signal.SIGKILL)):
        assert do.call([sys.executable, "-c", program]) == code


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["tset"], "report, test, mutants, bench, check, docs, help"),
        (["--steps", "2"], "unet_pipeline"),
        (["check", "x"], "'x'"),
    ],
)
def test_misuse_is_reported_and_exits_with_2(
    do: ModuleType, shell: Shell, capfd: Capture, args: list[str], names: str
) -> None:
    assert do.main(args) == 2
    assert names in capfd.readouterr().err
    assert not shell.lines


def test_python_without_ensurepip_gets_a_remedy(
    do: ModuleType, shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(do.importlib.util, "find_spec", lambda name: None)
    assert do.main(["test"]) == 1
    assert "apt install python3-venv" in capfd.readouterr().err
    assert not shell.lines


def test_old_python_is_rejected(do: ModuleType, shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr(do.sys, "version_info", (3, 9, 1))
    code = do.main(["test"])
    monkeypatch.undo()
    assert code == 2
    assert "needs 3.11" in capfd.readouterr().err


def test_help_works_from_another_folder_and_installs_nothing(do: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    argv = [sys.executable, os.path.relpath(do.ROOT / "do.py", folder), "help"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    assert "python3 do.py test" in done.stdout
    assert not do.VENV.exists()


def test_read_only_checkout_is_explained(do: ModuleType, shell: Shell, capsys: Capture) -> None:
    do.LOCK = do.ROOT / "missing" / ".venv.lock"  # as root, a folder without write permission can be written to
    assert do.main([]) == 1 and shell.lines == []
    assert "this checkout cannot be written to (No such file or directory). Copy it" in capsys.readouterr().err
