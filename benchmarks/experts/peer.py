"""The peer: hivemind, as its authors publish it, in a venv of its own, for its dependencies are not ours.

    .venv-hivemind there and whole? ── no ──> make it, as hivemind.txt says ── fails ──> the table tells why
                   └── yes ──> its server and a client, each in a process, asked by the same words as torchweft's

A failure here affects the peer alone.
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
    """It cannot be measured here; says why."""


def python() -> str:
    """The peer's Python, installed if need be. Raises ``NoPeer``."""
    found, stamp = VENV / "bin" / "python", VENV / "installed.stamp"
    mark = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == mark):
        progress(f"installing {NAME} into {VENV}; the first time this takes minutes")
        _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
        _run([str(found), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)])
        _run([str(found), "-c", "import hivemind"])
        stamp.write_text(mark)
    return str(found)


def start(stack: ExitStack, uid: str, width: int) -> tuple[Helper, Helper]:
    """Its server and a client that has found the expert. Raises ``NoPeer``."""
    there = python()
    try:
        given = {"uid": uid, "width": width}
        server = stack.enter_context(Helper("hivemind_server", given, python=there))
        client = stack.enter_context(Helper("hivemind_client", given, python=there))
        client.hear()
        client.ask({"address": server.hear()["address"]})
    except HelperLost as fault:
        raise NoPeer(str(fault)) from None
    return server, client


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NoPeer(f"cannot be installed: {fault}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no words").splitlines()[-1]
        raise NoPeer(f"cannot be installed: {last}")
