"""`torchweft serve` in a separate process, whose memory and descriptors can be measured."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import SOURCE

CONFIG = """
address = "127.0.0.1:0"
{more}
[tokens]
s3cret = "trainer"
[[grants]]
client = "trainer"
[[experts]]
name = "f"
kind = "ffn"
arguments = {{ hidden = 8 }}
optimizer = "SGD"
optimizer_arguments = {{ lr = 0.1 }}
"""
ADMITTED = (("authorization", "Bearer s3cret"),)


class Served:
    """Process that serves the expert ``f``, but only to clients with the token ``s3cret``."""

    def __init__(self, folder: Path, more: str, descriptors: int | None) -> None:
        file = folder / "serve.toml"
        file.write_text(CONFIG.format(more=more), "utf-8")
        words = [sys.executable, "-m", "torchweft", "serve", str(file)]
        if descriptors is not None:
            words = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *words]
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    @property
    def resident(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextmanager
def served(folder: Path, more: str = "", descriptors: int | None = None) -> Generator[Served]:
    """Run a server. ``more``: text at the top of the config file. ``descriptors``: limit of open files."""
    server = Served(folder, more, descriptors)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait(10)
        assert server.process.stdout is not None
        server.process.stdout.close()
