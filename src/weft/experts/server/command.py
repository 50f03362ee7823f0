"""``weft serve``: a server in a process of its own, until a signal ends it.

SIGTERM, SIGINT, SIGHUP ──> drain: accepted work is answered, new work is sent elsewhere ── save ── exit 0
    during the start    ──> the start is given up ── exit 0
a GPU fails             ──> its experts cannot run any more: what others hold is saved ── exit 1
SIGKILL                 ──> nothing that was reported durable is lost; the next start goes on from there
"""

import gc
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any

from weft.experts.errors import ExpertError
from weft.experts.server.config import ServeConfig
from weft.experts.server.options import keep_freed_memory, use_large_pages

_LOOK = 0.25  # seconds
_SWITCH = 0.0005
"""Seconds after which a thread that computes hands the interpreter over. By Python's default of 0.005 a call waits that
long in each of the threads that it passes, while another thread writes a checkpoint."""
_FROZEN = 10_000
"""Objects out of garbage collections, from which on the caller has put them there: Python 3.12 begins with 400."""


class _Stop:
    """Signal handler that notes the end. Until the server serves, it also interrupts the main thread.

    The thread in which it runs may hold a lock, such as that of an Event it waits for: a `SimpleQueue` takes none.
    """

    def __init__(self) -> None:
        self.serving = self.asked = False
        self.signals: SimpleQueue[int] = SimpleQueue()

    def __call__(self, number: int, frame: object) -> None:
        again, self.asked = self.asked, True
        self.signals.put(number)
        if not (again or self.serving):  # what a first signal began to close is not to be disturbed by a second
            raise SystemExit(0)


def serve(config: Mapping[str, Any]) -> None:
    """Serve as configured until SIGTERM, SIGINT or SIGHUP. In the main thread of the process.

    SIGHUP is left alone where it is ignored (``nohup``). Prints one line with the address when it listens. Raises what
    `weft.experts.server.config.build` and `Server.start` raise, ``SystemExit`` for a signal before it listens, and
    ``ExpertError`` if a module did not end in time, or a GPU failed.
    """
    keep_freed_memory()
    use_large_pages()
    stop = _Stop()
    with ExitStack() as restored:  # also where the configuration is refused: Ctrl-C is the caller's again
        restored.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH)
        for each in _signals():
            restored.callback(signal.signal, each, signal.signal(each, stop))
        if gc.get_freeze_count() < _FROZEN:
            restored.callback(gc.unfreeze)
        restored.callback(gc.enable)
        found = ServeConfig.parse(config)
        if any(expert.optimizer is not None for expert in found.experts):
            # What the first optimizer would import. Of what that makes, nothing ever goes: it is spared the garbage
            # collections, which would take 0.5 s of a start.
            gc.disable()
            import_module("torch._dynamo")
            gc.freeze()
            gc.enable()
        server = found.server()
        try:
            server.start()
            stop.serving = True
            # A full collection stops all threads, 0.2 s with what importing torch has made, and that never goes.
            gc.freeze()
            _say(f"weft: serving {len(server.experts)} experts at {server.address}")
            if server.panel_url is not None:
                _say(f"weft: status page at {server.panel_url}")
            while not (stop.asked or server.lost):  # a signal can come to any thread, which does not wake this one
                with suppress(Empty):
                    stop.signals.get(timeout=_LOOK)
            if server.lost:  # `shutdown` saves the experts of other devices
                raise ExpertError(server.lost)
            _say("weft: draining")
            if not server.shutdown():
                raise ExpertError("a module did not end in time; what it worked on was not answered")
        finally:
            server.shutdown()


def _signals() -> list[signal.Signals]:
    hang_up: signal.Signals | None = getattr(signal, "SIGHUP", None)  # not on every system
    ignored = hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if hang_up is None or ignored else [hang_up])]


def _say(line: str) -> None:
    """Print one line. A reader that has gone, such as ``| head -1``, does not end the server."""
    try:
        print(line, flush=True)
    except OSError:  # what is still in the buffer would be tried again when the interpreter ends
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
