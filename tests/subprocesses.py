"""Programs in a process of their own, for what run-time type checks, threads or memory of this one would disturb."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


def run(argv: Sequence[str], **variables: str | None) -> "subprocess.CompletedProcess[str]":
    """Run a command in the repository, on the sources of this checkout, with more variables set; None: without it."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    wanted = {**os.environ, "PYTHONPATH": path, **variables}
    env = {name: value for name, value in wanted.items() if value is not None}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def python(program: str, *words: str, **variables: str | None) -> "subprocess.CompletedProcess[str]":
    """Run a program of Python likewise. It may import tests, too."""
    return run([sys.executable, "-c", program, *words], **variables)
