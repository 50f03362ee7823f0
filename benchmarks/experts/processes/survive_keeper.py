"""Starts servers with checkpoints on request, each in a child process that can be killed.

``python survive_keeper.py '{"root": "the repository", "folder": "of the checkpoints", "keys": 1000}'``

{"start": "host:port"}   -> {"pid": ..., "address": ...}     forks a child, so that imports are done only once
{"reap": pid}            -> {}                               waits for a killed child
"""

import json
import os
import select
import sys
import threading
from typing import Any

from words import Answer, answer_until_the_end, take_stdout_aside

take_stdout_aside()
_OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
sys.path.insert(0, _OPTIONS["root"])

import torch  # noqa: E402

from benchmarks.experts.survive_steps import marks  # noqa: E402
from torchweft.experts.checkpoint import FolderCheckpointStore  # noqa: E402
from torchweft.experts.server import Server, ServerOptions  # noqa: E402

SECONDS = 30.0


def start(address: str) -> Answer:
    """Fork a server. This is safe because this process has no other threads."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _serve(address, writer)
        finally:
            os._exit(1)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], SECONDS)
    served = os.read(reader, 100).decode() if ready else ""
    os.close(reader)
    return {"pid": child, "address": served}


def _serve(address: str, writer: int) -> None:
    store, options = FolderCheckpointStore(_OPTIONS["folder"]), ServerOptions(checkpoint_seconds=0.01)
    with Server([marks(_OPTIONS["keys"])], address=address, checkpoints=store, options=options) as server:
        os.write(writer, server.address.encode())
        os.close(writer)
        threading.Event().wait()


def handle(question: Answer) -> Answer:
    """Answer one question."""
    if "start" in question:
        return start(question["start"])
    os.waitpid(question["reap"], 0)
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    marks(1)  # the first optimizer imports modules, which must happen before any fork
    answer_until_the_end({}, handle)
