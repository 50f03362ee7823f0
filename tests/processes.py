"""Child processes: forks, and programs that the type checks, threads or memory of this process would disturb."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
only_with_fork = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def run(argv: Sequence[str], **variables: str | None) -> "subprocess.CompletedProcess[str]":
    """Run a command in the repository, on the sources of this checkout. `variables` of None are removed."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    merged = {**os.environ, "PYTHONPATH": path, **variables}
    env = {name: value for name, value in merged.items() if value is not None}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def torchrun(size: int, script: Path, *words: str, seconds: float = 180.0) -> "subprocess.CompletedProcess[str]":
    """Run a script as `size` ranks on this host. After `seconds` they are terminated, and the code is -15."""
    path = os.pathsep.join([str(SOURCE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(script)]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(
        [*argv, *words], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = agent.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        agent.terminate()  # the agent then ends its ranks
        output, errors = agent.communicate(timeout=60)
    finally:
        agent.kill()
    return subprocess.CompletedProcess(agent.args, agent.returncode, output, errors)


def python(program: str, *words: str, **variables: str | None) -> "subprocess.CompletedProcess[str]":
    """Run the text of a Python program, as `run` does. It can import `tests`."""
    return run([sys.executable, "-c", program, *words], **variables)


def forked(work: Callable[[], object]) -> bool:
    """Whether ``work`` returned a true value in a forked child, within 20 seconds."""
    gc.collect()  # garbage of earlier tests must not be collected in the child, where its threads do not exist
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0
