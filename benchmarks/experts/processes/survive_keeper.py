"""Starts servers with checkpoints as often as it is asked, each in a process of its own that may be killed.

``python survive_keeper.py '{"root": "the repository", "folder": "of the checkpoints", "keys": 1000}'``

{"start": "host:port"}   -> {"pid": ..., "address": ...}     a child: the slow part, importing, is done before
{"reap": pid}            -> {}                               after it was killed
"""

import json
import os
import select
import sys
import threading
from typing import Any

from words import Answer, answer_until_the_end, take_stdout_aside

take_stdout_aside()
_GIVEN: dict[str, Any] = json.loads(sys.argv[1])
sys.path.insert(0, _GIVEN["root"])

import torch  # noqa: E402

from benchmarks.experts.survive_steps import marks  # noqa: E402
from torchweft.experts.checkpoint import FolderCheckpointStore  # noqa: E402
from torchweft.experts.server import Server, ServerOptions  # noqa: E402

SECONDS = 30.0


def start(address: str) -> Answer:
    """Fork: nothing here has threads yet."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _serve(address, writer)
        finally:
            os._exit(1)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], SECONDS)
    found = os.read(reader, 100).decode() if ready else ""
    os.close(reader)
    return {"pid": child, "address": found}


def _serve(address: str, writer: int) -> None:
    store, options = FolderCheckpointStore(_GIVEN["folder"]), ServerOptions(checkpoint_seconds=0.01)
    with Server([marks(_GIVEN["keys"])], address=address, checkpoints=store, options=options) as server:
        os.write(writer, server.address.encode())
        os.close(writer)
        threading.Event().wait()


def handle(asked: Answer) -> Answer:
    """See the top of this file."""
    if "start" in asked:
        return start(asked["start"])
    os.waitpid(asked["reap"], 0)
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    marks(1)  # what torch imports when the first optimizer is made is imported before any fork
    answer_until_the_end({}, handle)
