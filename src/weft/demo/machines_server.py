"""A server process of the act: what ``weft serve`` does, with its configuration on the first line of its input.

When its input ends, it drains and ends as after SIGTERM. So it does not outlive who started it, however that ended.
"""

import json
import os
import signal
import sys
import threading

import torch

from weft.experts.server.command import serve


def main() -> None:
    """The process. The line is a JSON object: ``threads`` of torch, and ``config`` as `weft serve` reads it."""
    told = json.loads(sys.stdin.readline())
    torch.set_num_threads(told["threads"])
    threading.Thread(target=_until_closed, name="weft-demo-input", daemon=True).start()
    serve(told["config"])


def _until_closed() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin itself: its lock would be held while Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # all is saved and closed; to take Python apart with gRPC in it may take seconds
