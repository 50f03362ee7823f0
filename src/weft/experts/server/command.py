"""``weft serve``: a server in a process of its own, until it is told to end.

SIGTERM, SIGINT ──> drain: accepted work is answered, new work is sent elsewhere ── save ── exit 0
SIGKILL         ──> nothing that was reported durable is lost; the next start goes on from there
"""

import gc
import signal
import threading
from collections.abc import Mapping
from typing import Any

from weft.experts.errors import ExpertError
from weft.experts.server.config import build
from weft.experts.server.memory import keep_freed_memory
from weft.experts.server.server import Server


def serve(config: Mapping[str, Any]) -> None:
    """Serve what the configuration says until SIGTERM or SIGINT. In the main thread of the process.

    Prints one line with the address when it listens. Raises what `weft.experts.server.config.build` and
    `Server.start` raise, and ``ExpertError`` if a module did not end in time.
    """
    keep_freed_memory()
    stop = threading.Event()

    def end(number: int, frame: object) -> None:
        stop.set()

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        _until(stop, build(config))
    finally:  # also where the configuration was refused: Ctrl-C is the caller's again
        for each, handler in before.items():
            signal.signal(each, handler)


def _until(stop: threading.Event, server: Server) -> None:
    frozen = gc.get_freeze_count()
    try:
        server.start()
        # A full garbage collection stops all threads, 0.2 s with what importing torch has made, and that never goes.
        gc.freeze()
        print(f"weft: serving {len(server.experts)} experts at {server.address}", flush=True)
        if server.panel_url is not None:
            print(f"weft: status page at {server.panel_url}", flush=True)
        stop.wait()
        print("weft: draining", flush=True)
        if not server.shutdown():
            raise ExpertError("a module did not end in time; what it worked on was not answered")
    finally:
        server.shutdown()
        if not frozen:
            gc.unfreeze()
