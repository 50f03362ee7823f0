"""``torchweft serve``: a server in a process of its own, until a signal ends it.

SIGTERM, SIGINT, SIGHUP ──> drain: accepted work is answered, new work is sent elsewhere ── save ── exit 0
    during the start    ──> the start is aborted ── exit 0
a GPU fails             ──> its experts cannot run any more; those of other devices are saved ── exit 1
SIGKILL                 ──> nothing that was reported as durable is lost; the next start continues from there

Log lines go to standard output, with their time in UTC and their level. systemd is told of the start and of the end
(``Type=notify``).
"""

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any

from torchweft.experts.errors import ExpertError
from torchweft.experts.server.config import ServeConfig
from torchweft.experts.server.options import keep_freed_memory, use_large_pages

_LOG = logging.getLogger("torchweft")
_POLL_SECONDS = 0.25
# Seconds until a computing thread releases the GIL. With Python's default of 0.005, a call waits that long in each of
# its threads while another thread writes a checkpoint.
_SWITCH_SECONDS = 0.0005
# Frozen objects above which the caller of `serve` has frozen them: Python 3.12 starts with 400.
_FROZEN = 10_000


class _StopSignal:
    """Signal handler that records the request to stop. During the start it also aborts the main thread.

    An Event would not work: a handler runs in a thread that can hold the Event's lock. A `SimpleQueue` has no lock.
    """

    def __init__(self) -> None:
        self.received = False
        self._started = False
        self._signals: SimpleQueue[int] = SimpleQueue()

    def __call__(self, number: int, frame: object) -> None:
        repeated, self.received = self.received, True
        self._signals.put(number)
        if not (repeated or self._started):  # a second signal must not disturb the cleanup after the first
            raise SystemExit(0)

    def finish_start(self) -> None:
        """Let later signals end the server in order."""
        self._started = True

    def wait(self, seconds: float) -> None:
        with suppress(Empty):
            self._signals.get(timeout=seconds)


class _UtcFormatter(logging.Formatter):
    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")


class _LogHandler(logging.StreamHandler[Any]):
    """Log lines on standard output. A closed pipe, such as ``| head -1``, does not end the server."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self.setFormatter(_UtcFormatter())

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            return super().handleError(record)
        # The interpreter flushes the buffer again at its end, which must not fail then.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)


def serve(config: Mapping[str, Any], *, log_level: str = "info") -> None:
    """Serve as configured until SIGTERM, SIGINT or SIGHUP. Runs in the main thread of the process.

    An ignored SIGHUP (``nohup``) stays ignored. Logs one line with the address when it listens. Raises the errors of
    `weft.experts.server.config.build` and `Server.start`, ``SystemExit`` for a signal during the start, and
    ``ExpertError`` if a module did not end in time or a GPU failed.
    """
    keep_freed_memory()
    use_large_pages()
    stop = _StopSignal()
    with ExitStack() as restored:  # whatever happens, the caller gets its signal handlers and settings back
        _log_to_stdout(log_level, restored)
        restored.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_SECONDS)
        for number in _stop_signals():
            restored.callback(signal.signal, number, signal.signal(number, stop))
        if gc.get_freeze_count() < _FROZEN:
            restored.callback(gc.unfreeze)
        restored.callback(gc.enable)
        table = ServeConfig.parse(config)
        if any(expert.optimizer is not None for expert in table.experts):
            # The first optimizer imports this. The import creates objects that live forever, and garbage collections
            # of them would take 0.5 s of the start.
            gc.disable()
            import_module("torch._dynamo")
            gc.freeze()
            gc.enable()
        _notify_systemd("STATUS=making and restoring the experts")
        server = table.server()
        restored.callback(_log_end, time.monotonic())  # also if saving fails
        try:
            server.start()
            stop.finish_start()
            if table.directory is not None:
                _check_lease(table.options.lease_seconds)
            # Without this, a full collection would stop all threads for 0.2 s to visit the permanent objects of torch.
            gc.freeze()
            count = len(server.experts)
            serving = f"serving {count} {'expert' if count == 1 else 'experts'} at {server.address}"
            _LOG.info(serving)
            if server.panel_url is not None:
                _LOG.info("status page at %s", server.panel_url)
            _notify_systemd(f"READY=1\nSTATUS={serving}")
            while not (stop.received or server.lost):
                # With a timeout: a signal that the system delivers to another thread does not wake this one.
                stop.wait(_POLL_SECONDS)
            _notify_systemd("STOPPING=1\nSTATUS=answering the accepted calls and saving")
            if server.lost:  # `shutdown` below still saves the experts of other devices
                raise ExpertError(server.lost)
            _LOG.info("draining")
            if not server.shutdown():
                raise ExpertError("a module did not end in time; what it worked on was not answered")
        finally:
            server.shutdown()


def _check_lease(seconds: float) -> None:
    # A full collection is the longest regular pause of all threads. It is made here, before the objects are frozen.
    begin = time.monotonic()
    gc.collect()
    pause = time.monotonic() - begin
    _LOG.debug("a full garbage collection paused all threads for %.2f s", pause)
    if pause > seconds / 2:
        words = "a full garbage collection paused all threads for %.2f s, and lease_seconds is %g: a lease is safe for "
        words += "pauses up to half of it, so set it to %.1f or more in all servers"
        _LOG.warning(words, pause, seconds, 2 * pause)


def _log_end(begin: float) -> None:
    _LOG.info("ended after %s", timedelta(seconds=round(time.monotonic() - begin)))


def _log_to_stdout(level: str, restored: ExitStack) -> None:
    """Write the log of torchweft from this level on, and the warnings of other packages, until the stack closes."""
    root, handler = logging.getLogger(), _LogHandler()
    restored.callback(_LOG.setLevel, _LOG.level)
    restored.callback(root.removeHandler, handler)
    root.addHandler(handler)
    _LOG.setLevel(level.upper())


def _notify_systemd(state: str) -> None:
    """Send the state to systemd, if it started this process with ``Type=notify``. See sd_notify(3)."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        # A lost notification must not end the server. "@" stands for the zero byte of an abstract socket.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.sendto(state.encode(), f"\0{path[1:]}" if path[0] == "@" else path)


def _stop_signals() -> list[signal.Signals]:
    hang_up: signal.Signals | None = getattr(signal, "SIGHUP", None)  # missing on Windows
    ignored = hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if hang_up is None or ignored else [hang_up])]
