#!/usr/bin/env python3
"""Readability of the project in figures, each with its goal. Part of `python3 do.py check`.

    python tools/prose.py          the figures; exit code 1 if one is worse than its limit
    python tools/prose.py FILE     also the lines of these files that break a rule of the style

The rules are in CONTRIBUTING.md. A figure is only an indicator: bad prose can satisfy it, and a listed line can be
right. A limit that is worse than its goal marks a goal not reached yet. It keeps the figure from getting worse.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "torchweft"
SHORTENED_SINCE = "39a6129"
"""Subjects of later commits have at most 72 characters."""

OPENING = re.compile(r"^\W*(What|Who|Whom|How|As|Where|Of which|Of what)\b")
WORDS = {
    "nominal what": re.compile(r"\bwhat(ever)?\b(?![^.]*\?)", re.IGNORECASE),
    "who, whom, whoever": re.compile(r"\b(who|whom|whose|whoever)\b", re.IGNORECASE),
    "is no, is none, nobody": re.compile(r"\b(is|are|was|were|be) (no|none)\b|\bnobody\b", re.IGNORECASE),
    "anew, behind, beside, meanwhile": re.compile(r"\b(anew|behind|beside|meanwhile)\b", re.IGNORECASE),
    "may": re.compile(r"\bmay\b", re.IGNORECASE),
}
# Goal and limit of each figure: minima for the share of comments, maxima for all others.
COMMENTS, ONE_WORD, SEMICOLONS, OPENINGS = (4.0, 4.5), (50.0, 43.0), (3.0, 3.0), (0, 0)
RATES = {
    "nominal what": (6.0, 6.0),
    "who, whom, whoever": (4.0, 4.0),
    "is no, is none, nobody": (6.0, 6.0),
    "anew, behind, beside, meanwhile": (3.0, 3.0),
    "may": (20.0, 20.0),
}
TEST_NAMES, CYCLES, CLASSES, SUBJECTS = (0, 0), (0, 0), (6, 6), (0, 0)
MOST_ATTRIBUTES = 14
REASONS = {
    "ServerStatistics": "a report: one field per number",
    "PoolStatistics": "a report: one field per number",
    "BackendStatistics": "a report: one field per number",
    "Instruction": "the fields of one recorded operation",
    "Pipe": "the settings, which users read and assign as attributes",
    "Task": "one request: its arguments, futures and accounting",
}
"""Reasons for classes with more attributes. Classes without a reason have to be split."""
LONGEST_TEST_NAME, LONGEST_SUBJECT = 60, 72


class Figure(NamedTuple):
    """A figure, its goal, and the limit that it must not exceed, or not fall below if `least`."""

    name: str
    value: float
    goal: float
    limit: float
    least: bool = False

    def within(self, bound: float) -> bool:
        """Whether the figure reaches the bound."""
        return self.value >= bound if self.least else self.value <= bound


class SourceFile:
    """Docstrings, own-line comments and lines of code of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text("utf-8")
        self.tree = ast.parse(text)
        self.docstrings: list[tuple[int, str]] = []
        lines_of_docstrings: set[int] = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if docstring := ast.get_docstring(node):
                first = node.body[0]
                self.docstrings.append((first.lineno, docstring))
                lines_of_docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        lines = text.splitlines()
        self.comments = [
            (token.start[0], token.string.lstrip("# "))
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
            and lines[token.start[0] - 1].lstrip().startswith("#")
            and not token.string.startswith("#!")
        ]
        self.lines_of_code = sum(
            bool(line.strip()) and not line.lstrip().startswith("#") and number not in lines_of_docstrings
            for number, line in enumerate(lines, 1)
        )

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods, including nested ones."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def broken_lines(self) -> Iterator[str]:
        """The lines of docstrings and comments that break a rule, with the rule."""
        for number, text in [*self.docstrings, *self.comments]:
            for offset, line in enumerate(text.splitlines()):
                broken = [rule for rule, pattern in WORDS.items() if pattern.search(prose_of(line))]
                if not offset and OPENING.match(line):
                    broken.append("opening")
                if broken:
                    yield f"{self.path}:{number + offset}: {', '.join(broken)}: {line.strip()}"


def prose_of(text: str) -> str:
    """A docstring without examples, indented blocks and code in backquotes."""
    lines = [
        line
        for line in text.splitlines()
        if not line.lstrip().startswith((">>>", "...")) and not line.startswith("    ")
    ]
    return re.sub(r"``?[^`]*``?", "x", " ".join(lines))


def language(files: list[SourceFile]) -> list[Figure]:
    """Comments, names of functions, and the words of docstrings."""
    docstrings = [text for file in files for _, text in file.docstrings]
    prose = " ".join(map(prose_of, docstrings))
    words = len(prose.split())
    code = sum(file.lines_of_code for file in files)
    names = [function.name for file in files for function in file.functions() if not function.name.startswith("__")]
    print(f"  {words:,} words in {len(docstrings):,} docstrings, {code:,} lines of code")
    return [
        Figure(
            "own-line comments, % of the lines of code",
            100 * sum(len(file.comments) for file in files) / code,
            *COMMENTS,
            least=True,
        ),
        Figure(
            "functions named by one word, %",
            100 * sum("_" not in name.strip("_") for name in names) / len(names),
            *ONE_WORD,
        ),
        Figure("semicolons per 1,000 words of docstrings", 1000 * prose.count(";") / words, *SEMICOLONS),
        Figure(
            "docstrings that open with What, Who, How, As, Where, Of",
            sum(bool(OPENING.match(text)) for text in docstrings),
            *OPENINGS,
        ),
        *(
            Figure(f"{name!r} per 10,000 words", 10_000 * len(pattern.findall(prose)) / words, *RATES[name])
            for name, pattern in WORDS.items()
        ),
    ]


def structure(files: list[SourceFile]) -> list[Figure]:
    """Import cycles, and classes with many attributes."""
    cycles = import_cycles(files)
    for cycle in cycles:
        print(f"  import cycle: {', '.join(cycle)}")
    large = {
        f"{file.path.relative_to(SOURCE)}:{node.name}": count
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and (count := len(attributes_of(node))) > MOST_ATTRIBUTES
    }
    for name, count in sorted(large.items(), key=lambda item: -item[1]):
        reason = REASONS.get(name.partition(":")[2], "to be split")
        print(f"  {name}: {count} attributes ({reason})")
    return [
        Figure("import cycles, including imports inside functions", len(cycles), *CYCLES),
        Figure(f"classes with more than {MOST_ATTRIBUTES} attributes", len(large), *CLASSES),
    ]


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The attributes of instances: fields of the class body, and targets of `self.name = ...` in its methods."""
    is_fields = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    names = {
        item.target.id
        for item in node.body
        if is_fields and isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id == "self"
        ):
            names.add(inner.attr)
    return names


def import_cycles(files: list[SourceFile]) -> list[list[str]]:
    """Groups of modules that import each other, by any import statement that can run."""
    modules = {module_name(file.path): file for file in files}
    graph = {
        name: {target for target in imported_by(file.tree, modules) if target in modules and target != name}
        for name, file in modules.items()
    }
    reached = {name: reachable_from(name, graph) for name in graph}
    cycles = {tuple(sorted({name, *(t for t in reached[name] if name in reached[t])})) for name in graph}
    return [list(cycle) for cycle in sorted(cycles) if len(cycle) > 1]


def module_name(path: Path) -> str:
    """The dotted name of a module of the package."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(tree: ast.Module, modules: Collection[str]) -> Iterator[str]:
    """The modules named by import statements, except those for type checkers alone."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` depends on the module only, not on the other names of the package.
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if name in modules else node.module
        nodes.extend(ast.iter_child_nodes(node))


def reachable_from(start: str, graph: dict[str, set[str]]) -> set[str]:
    """All modules that importing `start` can import."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def long_test_names() -> Figure:
    """The number of tests whose names are too long to scan."""
    names = [
        f"{path.relative_to(ROOT)}: {function.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for function in SourceFile(path).functions()
        if function.name.startswith("test_") and len(function.name) > LONGEST_TEST_NAME
    ]
    return Figure(f"names of tests over {LONGEST_TEST_NAME} characters", len(names), *TEST_NAMES)


def long_subjects() -> Figure:
    """The number of commits since `SHORTENED_SINCE` with a long subject. 0 without a repository, as in an sdist."""
    command = ["git", "log", "--format=%h %s", "--no-merges", f"{SHORTENED_SINCE}..HEAD"]
    try:
        log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        log = ""
    long = [line for line in log.splitlines() if len(line.partition(" ")[2]) > LONGEST_SUBJECT]
    for line in long:
        print(f"  long subject: {line}")
    return Figure(f"subjects of commits over {LONGEST_SUBJECT} characters", len(long), *SUBJECTS)


def report(figures: Iterable[Figure]) -> list[str]:
    """Print the figures. Returns the names of those over their limit."""
    over: list[str] = []
    for figure in figures:
        goal = f"goal {'at least' if figure.least else 'at most'} {figure.goal:g}"
        verdict = "reached" if figure.within(figure.goal) else f"{goal}; limit {figure.limit:g}"
        print(f"  {figure.name}: {figure.value:,.1f} ({verdict})")
        over += [] if figure.within(figure.limit) else [figure.name]
    return over


def main(arguments: list[str]) -> int:
    """Print the figures, and the broken lines of the files in `arguments`. Returns the exit code."""
    for name in arguments:
        for line in SourceFile(Path(name)).broken_lines():
            print(line)
    if arguments:
        return 0
    files = [SourceFile(path) for path in sorted(SOURCE.rglob("*.py"))]
    over = report([*language(files), *structure(files), long_test_names(), long_subjects()])
    if over:
        print(f"over the limit: {', '.join(over)}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
