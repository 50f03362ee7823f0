"""The peer: hivemind as published, in a separate venv because its dependencies differ.

    .venv-hivemind complete? ── no ──> install hivemind.txt ── fails ──> the table gives the reason
                   └── yes ──> its server and client, each in a process with the same protocol as torchweft's

If the peer fails, the benchmark continues without it.
"""

import hashlib
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.experts.helper import ROOT, Helper, HelperLost
from benchmarks.harness import progress

NAME = "hivemind 1.1.12"
VENV = ROOT / ".venv-hivemind"
REQUIREMENTS = Path(__file__).with_name("hivemind.txt")
_PATIENCE = 1800.0  # seconds; torch is large


class NoPeer(RuntimeError):
    """The peer cannot be installed or started. The message has the reason."""


def python() -> str:
    """Path of the peer's Python, which is installed if necessary. Raises ``NoPeer``."""
    executable, stamp = VENV / "bin" / "python", VENV / "installed.stamp"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == digest):
        progress(f"installing {NAME} into {VENV}; the first time this takes minutes")
        _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        _run([str(executable), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)])
        _run([str(executable), "-c", "import hivemind"])
        stamp.write_text(digest)
    return str(executable)


def start(stack: ExitStack, uid: str, width: int) -> tuple[Helper, Helper]:
    """Start its server, and a client that has found the expert. Raises ``NoPeer``."""
    executable = python()
    try:
        options = {"uid": uid, "width": width}
        server = stack.enter_context(Helper("hivemind_server", options, python=executable))
        client = stack.enter_context(Helper("hivemind_client", options, python=executable))
        client.hear()
        client.ask({"address": server.hear()["address"]})
    except HelperLost as fault:
        raise NoPeer(str(fault)) from None
    return server, client


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NoPeer(f"cannot be installed: {fault}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NoPeer(f"cannot be installed: {last}")
