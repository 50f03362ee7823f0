"""The command line: its output, its errors and its exit codes."""

import importlib.metadata
import json
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import torchweft as weft
from tests.processes import ROOT, SOURCE, python, run
from torchweft.cli import SCHEDULE_NAMES, main, plan
from torchweft.core.version import __version__
from torchweft.pipeline.schedule import SCHEDULES, Schedule, one_f_one_b


def run_rejected(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command line that must fail. Returns its exit code and standard error."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    code = stop.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


def test_plan_prints_a_table_that_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--stages", "4", "--chunks", "8"]) == 0
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    assert Schedule.parse(table) == one_f_one_b(4, 8)
    assert "live micro-batches of each stage: 4 3 2 1" in rest
    assert "takes 33, idle 27.3% of the time of 4 workers" in rest


def test_plan_uses_the_given_costs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["plan", "--stages", "1", "--chunks", "2", "--schedule", "gpipe"]
    assert main([*sizes, "--forward", "3", "--backward", "5", "--recompute", "2"]) == 0
    assert "takes 20, idle 0.0% of the time of 1 workers" in capsys.readouterr().out


def test_plan_accepts_every_schedule_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name, make in SCHEDULES.items():
        assert main(["plan", "--stages", "4", "--chunks", "5", "--schedule", name]) == 0
        assert Schedule.parse(capsys.readouterr().out.partition("\n\n")[0]) == make(4, 5)


def test_plan_reads_a_table_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", "utf-8")
    assert main(["plan", "--stages", "2", "--chunks", "2", "--schedule", str(file)]) == 0
    assert capsys.readouterr().out.startswith("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")


def test_binary_file_is_rejected_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.bin"
    file.write_bytes(b"\xff\x00")
    code, errors = run_rejected(["plan", "--stages", "2", "--chunks", "2", "--schedule", str(file)], capsys)
    assert code == 2 and "table.bin is not UTF-8 text" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["dance"], "there is no command 'dance', known are plan, trace, serve"),
        (["serv"], "did you mean 'serve'?"),
        (["--versoin"], "unrecognized arguments: --versoin; did you mean '--version'?"),
        (["version"], "did you mean '--version'?"),
        (["--verbose", "stats"], "did you mean 'status'?"),
        (["plan", "--shedule", "gpipe"], "did you mean '--schedule'?"),
        (["status", "127.0.0.1:1", "--tokenfile=x"], "did you mean '--token-file'?"),
        (["status", "127.0.0.1:1", "--watch", "0"], "'0' is not a number of seconds above 0"),
        (["plan", "--stages", "4"], "--chunks"),
        (["plan", "--stages", "0", "--chunks", "1"], "'0' is not a whole number from 1 up"),
        (["plan", "--stages", "1", "--chunks", "1", "--forward", "nan"], "'nan' is not a number from 0 up"),
        (["plan", "--stages", "1", "--chunks", "1", "--schedule", "zigzag"], "there is no schedule 'zigzag'"),
        (["plan", "--stages", "3", "--chunks", "1", "--schedule", "zbv"], "two stages per worker, but got 3 stages"),
        (["plan", "--stages", "3", "--chunks", "1", "--schedule", "0F0,0B0"], "the schedule cannot be used"),
    ],
)
def test_misuse_exits_with_2_and_a_reason(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = run_rejected(arguments, capsys)
    assert code == 2 and words in errors


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "build", interrupted)
    assert run_rejected(["plan", "--stages", "1", "--chunks", "1"], capsys)[0] == 130


_IMPORTED = """
import sys
from torchweft.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("imported:", *{"torch", "numpy", "grpc"} & set(sys.modules))
"""


@pytest.mark.parametrize("words", ["--help", "--version", "plan --help", "serve --help", "serv", "status --adress x"])
def test_help_version_and_misuse_import_no_torch(words: str) -> None:
    """Importing PyTorch takes seconds, so only commands that need it can import it."""
    done = python(_IMPORTED, *words.split())
    assert done.stdout.splitlines()[-1] == "imported:", done.stdout + done.stderr


def test_names_in_the_help_are_those_of_the_schedules() -> None:
    assert tuple(SCHEDULES) == SCHEDULE_NAMES


def test_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert weft.__version__ == __version__ and "__version__" in dir(weft)
    file = str(SOURCE / "torchweft" / "core" / "version.py")
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert runpy.run_path(file)["__version__"] == "0+not.installed"
    monkeypatch.setattr(importlib.metadata, "version", {"torchweft": "1.2.3"}.__getitem__)
    assert runpy.run_path(file)["__version__"] == "1.2.3"


def test_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert scripts == {"torchweft": "torchweft.cli:main"}
    assert importlib.metadata.EntryPoint("torchweft", scripts["torchweft"], "console_scripts").load() is main


def test_plan_as_json_has_units_in_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--stages", "2", "--chunks", "3", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    rows = [",".join(row) for row in table.pop("actions_by_worker")]
    assert Schedule.parse("\n".join(rows)) == one_f_one_b(2, 3)
    assert table == {
        "schedule": "1f1b",
        "stages": 2,
        "micro_batches": 3,
        "workers": 2,
        "live_micro_batches_by_stage": [2, 1],
        "total_in_cost_units": 12.0,
        "idle_percent": pytest.approx(25.0),
        "crossing_values": [],
        "joined_values": [],
    }


PIPES = """
import torch
import torchweft as weft
from torch import nn

def build():
    return weft.Pipe(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), chunks=2, split=["1"], devices=["cpu"] * 2,
                     sample=torch.randn(2, 8))

def deep():
    raise ValueError("too deep")

class Losing(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def trained():
    pipe = weft.Pipe(Losing(nn.Linear(8, 8), nn.Linear(8, 8)), chunks=2, split=["1"], devices=["cpu"] * 2)
    pipe(torch.randn(4, 8)).backward()
    return pipe

def broken():
    return deep()

def invalid():
    return weft.Pipe(nn.Sequential(nn.ReLU()), chunks=0)
"""


@pytest.fixture
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_pipes.py").write_text(PIPES)
    (tmp_path / "bad_import.py").write_text("import nothing_like_this\n")
    (tmp_path / "bad_syntax.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Only Python's own importer, because that of the type checks adds its frames to the traceback of a failed import.
    monkeypatch.setattr(sys, "path_hooks", sys.path_hooks[-1:])


def test_json_has_the_bytes_of_crossing_values(pipes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--pipe", "some_pipes:build", "--json"]) == 0
    (value,) = json.loads(capsys.readouterr().out)["crossing_values"]
    assert (value["from_stage"], value["to_stages"], value["size_bytes"]) == (0, [1], 64)


def test_values_joined_for_the_end_of_forward_are_listed(pipes: None, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--json"]):
        assert main(["plan", "--pipe", "some_pipes:trained", *options]) == 0
    text, _, table = capsys.readouterr().out.rpartition('{"schedule"')
    assert "all rows: 64 bytes x 2  1, joined for the end of forward()" in text
    assert json.loads('{"schedule"' + table)["joined_values"] == [{"name": "1", "size_bytes": 128}]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("mypipe", 2, ["--pipe mypipe: wanted MODULE:FUNCTION", "such as my_model:make_pipe"]),
        (":build", 2, ["wanted MODULE:FUNCTION"]),
        ("some_pipes:", 2, ["wanted MODULE:FUNCTION"]),
        ("no_such_module:build", 2, ["No module named 'no_such_module'", "neither installed nor in"]),
        ("some_pipes:biuld", 2, ["no function 'biuld'; did you mean 'build'?"]),
        ("some_pipes:broken", 1, ["broken() raised ValueError", "return deep()", "in deep", "ValueError: too deep"]),
        ("some_pipes:invalid", 1, ["invalid() raised UsageError", "in invalid", "chunks"]),
        ("bad_import:f", 1, ["the import of bad_import raised", "bad_import.py", "nothing_like_this"]),
        ("bad_syntax:f", 1, ["the import of bad_syntax raised SyntaxError", "bad_syntax.py"]),
    ],
)
def test_fault_of_a_pipe_shows_no_frame_of_torchweft(
    name: str, code: int, words: list[str], pipes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, errors = run_rejected(["plan", "--pipe", name], capsys)
    assert seen == code and all(word in errors for word in words), errors
    assert "Traceback" not in errors and str(SOURCE) not in errors and "importlib" not in errors, errors


def test_trace_passes_script_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], str]] = []

    def record_script(script: str, arguments: list[str], out: str) -> int:
        calls.append((script, arguments, out))
        return 3

    monkeypatch.setattr("torchweft.report.recording.record_script", record_script, raising=False)
    script = str(tmp_path / "train.py")
    Path(script).touch()
    assert main(["trace", script]) == 3
    assert main(["trace", script, "--out", "a.html", "--", "--lr", "0.1", "--", "--help"]) == 3
    assert main(["trace", "--out", "b.html", script, "--"]) == 3
    assert calls == [
        (script, [], "step.html"),
        (script, ["--lr", "0.1", "--", "--help"], "a.html"),
        (script, [], "b.html"),
    ]


def test_trace_names_a_missing_script(capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = run_rejected(["trace", "no/such.py"], capsys)
    assert code == 2 and "there is no script 'no/such.py'" in errors


TRACED = """
import sys
import torch
import torchweft as weft
from torch import nn
pipe = weft.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunks=2, devices=["cpu"] * 2)
pipe(torch.randn(int(sys.argv[1]), 4)).sum().backward()
open(sys.argv[2]).close()
"""


def test_trace_writes_a_report_and_shows_the_error_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "step.html"
    script.write_text(TRACED)
    assert main(["trace", str(script), "--out", str(out), "--", "8", str(script)]) == 0
    assert f"torchweft: wrote {out}; open it with a browser" in capsys.readouterr().err
    assert "train.py" in out.read_text("utf-8")
    assert main(["trace", str(script), "--out", str(tmp_path / "step.json"), "--", "8", str(script)]) == 0
    assert "step.json; load it into https://ui.perfetto.dev" in capsys.readouterr().err
    assert main(["trace", str(script), "--out", str(out), "--", "8", "missing"]) == 1
    errors = capsys.readouterr().err
    assert "open(sys.argv[2]).close()" in errors and errors.rstrip().endswith("No such file or directory: 'missing'")
    assert "record_script" not in errors and str(SOURCE) not in errors, errors
    script.write_text("def (:")
    assert main(["trace", str(script)]) == 1 and "SyntaxError" in capsys.readouterr().err


def test_env_lists_versions_and_hides_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHWEFT_TOKEN", "s3cret")
    monkeypatch.setenv("TORCHWEFT_CACHE_MIB", "17")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    rows = dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("- "))
    names = ("torchweft", "Python", "platform", "processor", "PyTorch", "devices", "C++ compiler", "packages")
    assert rows.keys() >= set(names) and not any("failed" in row for row in rows.values()), text
    assert rows["torchweft"].startswith(__version__) and rows["Python"].startswith(sys.version.split()[0])
    assert "grpcio " in rows["packages"]
    assert "OMP_NUM_THREADS 3" in text and "TORCHWEFT_CACHE_MIB 17" in text and "s3cret" not in text
    assert main(["env", "--json"]) == 0
    output = capsys.readouterr().out
    read = json.loads(output)
    assert read.keys() == rows.keys() and read["PyTorch"] == rows["PyTorch"] and "s3cret" not in output
    assert read["environment"]["OMP_NUM_THREADS"] == "3" and read["packages"]["grpcio"] != "missing"


def test_env_prints_the_rest_if_torch_is_broken() -> None:
    done = python("import sys; sys.modules['torch'] = None; from torchweft.cli import main; main(['env'])")
    assert "- PyTorch: failed: ModuleNotFoundError" in done.stdout and "- packages: numpy" in done.stdout, done.stderr


def test_completion_names_the_package_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, errors = run_rejected(["completion", "bash"], capsys)
    assert code == 2 and "pip install 'torchweft[completion]'" in errors
    marked: list[str] = []

    def complete(parser: object, shell: str) -> str:
        (commands,) = (action.choices for action in parser._actions if action.dest == "name")  # type: ignore[attr-defined]
        actions = [action for command in commands.values() for action in command._actions]
        marked.extend(action.dest for action in actions if getattr(action, "complete", None) == "FILE")
        return f"script of {shell}"

    shells = ["bash", "zsh"]
    monkeypatch.setitem(sys.modules, "shtab", SimpleNamespace(FILE="FILE", complete=complete, SUPPORTED_SHELLS=shells))
    code, errors = run_rejected(["completion", "fish"], capsys)
    assert code == 2 and "pip install -U shtab" in errors
    assert main(["completion", "zsh"]) == 0 and capsys.readouterr().out == "script of zsh\n"
    assert {"script", "out", "config", "token_file", "certificate"} <= set(marked)


def test_bash_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="the extra `completion` brings shtab, which writes the script")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no `bash` on the path")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "torchweft"
    script.write_text(capsys.readouterr().out)
    for words, completion in (("ser", "serve"), ("plan --sched", "--schedule"), ("completion z", "zsh")):
        line = f"torchweft {words}".split()
        program = f"source {script}; COMP_WORDS=({' '.join(line)}); COMP_CWORD={len(line) - 1}"
        program += '; _shtab_torchweft; echo "${COMPREPLY[*]}"'
        done = subprocess.run([bash, "-c", program], capture_output=True, text=True, check=False)
        assert done.stdout.split() == [completion], (words, done)


def test_fish_gets_a_script_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="the extra `completion` brings shtab, which writes the script")
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    assert "complete" in script and all(word in script for word in ("serve", "schedule", "token-file"))


@pytest.mark.long
def test_module_runs_the_command_line() -> None:
    done = run([sys.executable, "-m", "torchweft", "--version"])
    assert done.returncode == 0 and done.stdout.startswith("torchweft ")
