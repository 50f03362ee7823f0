#!/usr/bin/env python3
"""Size and structure of `src/torchweft`, each figure with its budget. Part of `python3 do.py check`.

    python tools/structure.py [-v]

    sizes     lines and files of each package
    names     public classes that share a name, base names of files that recur, modules of core that one package imports
    walks     the code that one warm forward and backward runs: files, functions, lines, calls from file to file

With -v, also the files of each walk with the number of their functions. Exit code 1 if a figure is over its limit. A
limit above the budget marks a budget not reached yet. It keeps the figure from getting worse.
"""

import ast
import importlib
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

SOURCE = Path(__file__).resolve().parents[1] / "src" / "torchweft"
VERBOSE = "-v" in sys.argv


class Figure(NamedTuple):
    """A figure, its budget, and the limit that it must not exceed."""

    name: str
    value: int
    budget: int
    limit: int


def sizes() -> list[Figure]:
    """Lines and files, in total and by package. Only the totals have a budget."""
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    packages: Counter[str] = Counter()
    for path, count in lines.items():
        relative = path.relative_to(SOURCE).parts
        packages[relative[0] if len(relative) > 1 else "(top)"] += count
    for name, count in packages.most_common():
        print(f"  {name:12} {count:6} lines")
    return [
        Figure("lines of src/torchweft", sum(lines.values()), *LINES),
        Figure("files of src/torchweft", len(lines), *FILES),
    ]


def names() -> list[Figure]:
    """Names that stand for more than one thing."""
    classes: defaultdict[str, list[str]] = defaultdict(list)
    bases: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE)
        if path.name != "__init__.py":
            bases[path.name].append(module.as_posix())
        tree = ast.parse(path.read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(module.as_posix())
    twice = {name: where for name, where in classes.items() if len(where) > 1}
    in_package = {
        name: where for name, where in bases.items() if max(Counter(path.split("/")[0] for path in where).values()) > 1
    }
    often = {name: where for name, where in bases.items() if len(where) > 3}
    alone = lonely_modules_of_core()
    for title, found in (("class", twice), ("file", in_package), ("file in all", often), ("core for one", alone)):
        for name, where in sorted(found.items()) if VERBOSE else ():
            print(f"  {title} {name}: {', '.join(where)}")
    return [
        Figure("public class names that stand for several things", len(twice), *CLASSES),
        Figure("base names of files twice within a package", len(in_package), *BASES),
        Figure("base names of files more than three times", len(often), *OFTEN),
        Figure("modules of core with importers in fewer than two packages", len(alone), *CORE),
    ]


def lonely_modules_of_core() -> dict[str, list[str]]:
    """The modules of `core` that fewer than two other packages import, with their importers."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchweft.core.") and node.module:
                importers[node.module.split(".")[2]].add(path.relative_to(SOURCE).parts[0])
    core = [path.stem for path in (SOURCE / "core").glob("*.py") if path.name != "__init__.py"]
    return {name: sorted(importers[name] - {"core"}) for name in core if len(importers[name] - {"core"}) < 2}


class Walk:
    """A trace of the code of torchweft that runs in any thread: functions, lines, and calls from file to file."""

    def __init__(self) -> None:
        self.on = False
        self.lines: set[tuple[str, int]] = set()
        self.functions: set[tuple[str, str]] = set()
        self.crossings = 0

    def call(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(str(SOURCE)):
            return None
        if self.on:
            self.functions.add((file, frame.f_code.co_qualname))
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(str(SOURCE)):
                caller = caller.f_back
            self.crossings += caller is not None and caller.f_code.co_filename != file
        return self.line

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.on and event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line


def walked(name: str, start: Callable[[], Callable[[], object]], warm: int, files: Any, crossings: Any) -> list[Figure]:
    """The figures of one run after `warm` warm-up runs."""
    walk = Walk()
    threading.settrace(walk.call)
    sys.settrace(walk.call)
    try:
        run = start()
        for _ in range(warm):
            run()
        time.sleep(0.3)  # for threads that have not finished yet
        walk.on = True
        run()
        time.sleep(0.1)
        walk.on = False
    finally:
        sys.settrace(None)
        threading.settrace(None)
    seen = Counter(file for file, _ in walk.functions)
    print(f"  {name}: {len(walk.functions)} functions, {len(walk.lines)} lines")
    for file, count in sorted(seen.items()) if VERBOSE else ():
        print(f"    {Path(file).relative_to(SOURCE)}: {count}")
    return [Figure(f"{name}: files", len(seen), *files), Figure(f"{name}: calls", walk.crossings, *crossings)]


def public(name: str, *modules: str) -> Any:
    """A public name of `torchweft`, or else of one of these modules."""
    for module in ("torchweft", *modules):
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise SystemExit(f"{name} is neither in torchweft nor in {', '.join(modules)}")


def pipe_walks() -> list[Figure]:
    """A pipe of two stages and two micro-batches, by each executor."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(8, 8)
    found: list[Figure] = []
    for executor in ("serial", "threads", "auto"):
        pipe = public("Pipe")(model, chunks=2, balance=[2, 2], devices=["cpu", "cpu"], executor=executor)
        found += walked(f"Pipe, {executor}", lambda pipe=pipe: lambda: pipe(x).sum().backward(), 14, *PIPE)
    # Program choice, program, state it read, displayed class; and forward() on all rows: expected calls, tail, forms.
    files = found[0].value + 12
    split = public("Pipe")(Residual(), chunks=2, split=["second"], devices=["cpu", "cpu"], executor="serial")
    calls = found[1].value + 120
    budget = (files, files), (calls, calls)
    walk = walked("Pipe with split=, serial", lambda: lambda: split(x).sum().backward(), 14, *budget)
    return [*found, *walk]


class Residual(nn.Module):
    """A model with an ordinary forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.first(x).relu())


class Cell(nn.Module):
    """A simple recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.carried = nn.Linear(8, 16), nn.Linear(16, 16)

    def initial_state(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(x), 16)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (self.given(x) + self.carried(h)).tanh()
        return h, h


def recurrent_walks() -> list[Figure]:
    """A sequence of 20 steps in compiled loops."""
    x = torch.randn(20, 4, 8)
    net = public("Recurrent", "torchweft.recurrent")(Cell(), backend="c")
    return walked("Recurrent, C", lambda: lambda: net(x).outputs.sum().backward(), 3, *RECURRENT)


def expert_walks() -> list[Figure]:
    """A call of a remote expert, with the server's optimizer step."""
    spec, backend = public("TensorSpec", "torchweft.experts"), public("ExpertBackend", "torchweft.experts")
    server_kind, remote_kind = (
        public("Server", "torchweft.experts.server"),
        public("RemoteExpert", "torchweft.experts.client"),
    )
    rows = (spec((None, 64), torch.float32),)
    expert = backend("ffn.0", nn.Linear(64, 64), torch.optim.Adam, args_schema=rows)
    x = torch.randn(4, 64, requires_grad=True)
    ends: list[Any] = []

    def start() -> Callable[[], object]:
        server = server_kind([expert]).__enter__()
        remote = remote_kind("ffn.0", server.address).__enter__()
        ends.extend([remote, server])
        return lambda: remote(x).sum().backward()

    try:
        return walked("RemoteExpert and the server's step", start, 4, *EXPERT)
    finally:
        for end in ends:
            end.__exit__(None, None, None)


# (budget, limit) of each figure
LINES, FILES = (31_500, 54_195), (195, 243)
CLASSES, BASES, OFTEN, CORE = (0, 0), (0, 0), (0, 0), (0, 0)
PIPE = (14, 15), (120, 126)
RECURRENT = (12, 13), (70, 55)
EXPERT = (20, 20), (150, 155)


def main() -> int:
    """Print all figures. Returns the exit code."""
    torch.manual_seed(0)
    over: list[str] = []
    for title, measure in (
        ("sizes", sizes),
        ("names", names),
        ("walks of a step", pipe_walks),
        ("walk of a sequence", recurrent_walks),
        ("walk of a call to an expert", expert_walks),
    ):
        print(title)
        for figure in measure():
            verdict = "within the budget" if figure.value <= figure.budget else f"budget {figure.budget:,}"
            print(f"  {figure.name}: {figure.value:,} ({verdict})")
            over += [figure.name] * (figure.value > figure.limit)
    if over:
        print(f"over the limit: {', '.join(over)}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
