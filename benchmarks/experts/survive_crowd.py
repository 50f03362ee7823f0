"""Many clients with small or abandoned requests: their remains, and their effect on other clients.

submit and cancel     queues empty, descriptors and resident bytes as before
idle, slow readers    another client's p99, with and without them
vanished              its connection goes while its request is on the way, in the queue, or in the module
"""

import base64
import gc
import os
import random
import sys
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.experts.helper import Helper
from benchmarks.experts.survive_common import (
    MOST_ROWS,
    PATIENCE,
    Raw,
    Verdict,
    awkward,
    connected,
    forward,
    goes_on,
    message,
    quantile,
    rows,
    until,
)
from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport
from torchweft.experts.server import Access, Grant, Server, ServerOptions

BLOCK = 100
REQUIRED_MB = 8.0
_MB = 1 << 20


def cancelled(times: int) -> list[Verdict]:
    """So many tasks submitted and cancelled in the server's process, and a fifth of them over gRPC."""
    with Server([backend := awkward()]) as server, GrpcTransport(server.address) as transport:
        x, call = rows(0), forward(rows(0))

        def here() -> list["Future[Any]"]:
            end = time.monotonic() + PATIENCE
            return [backend.forward_pool.submit_task(x, deadline=end, client="me") for _ in range(BLOCK)]

        def over() -> list["Future[Any]"]:
            return [transport.submit(call, PATIENCE) for _ in range(BLOCK)]

        return [
            _flat("submit and cancel, in the process", backend, here, times, transport),
            _flat("submit and cancel, over gRPC", backend, over, times // 5, transport),
        ]


def _flat(what: str, backend: ExpertBackend, submit: Any, times: int, transport: GrpcTransport) -> Verdict:
    draw = random.Random(1)

    def block() -> None:
        futures = submit()
        draw.shuffle(futures)
        for future in futures:
            future.cancel()
        until(settled)

    def settled() -> bool:
        seen = backend.forward_pool.statistics()
        return not (seen.waiting_tasks or seen.running_tasks or transport.statistics().waiting)

    for _ in range(times // BLOCK // 10 + 1):  # buffers and pools of memory have their size after this
        block()
    until(settled)
    before = _descriptors(), _resident()
    for _ in range(times // BLOCK):
        block()
    flat = until(settled)
    after = _descriptors(), _resident()
    grown = (after[1] - before[1]) / _MB
    statistics = backend.forward_pool.statistics()
    return Verdict(
        what,
        f"{times}",
        f"nothing waits, descriptors as before, at most {REQUIRED_MB:g} MB more",
        f"{statistics.waiting_tasks} wait; {after[0] - before[0]:+d} descriptors, {grown:+.1f} MB; "
        f"{statistics.cancelled} cancelled in the queue so far",
        flat and after[0] <= before[0] and grown <= REQUIRED_MB,
    )


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def crowded(idle: int, slow: int, calls: int) -> list[Verdict]:
    """The p99 of one client: alone, with so many idle connections, and with slow readers as well."""
    options = ServerOptions(connection_bytes=4 << 20)
    access = Access([Grant("*")], {"mine": "me"})  # quotas go by the proven name, else by the host
    with ExitStack() as stack:
        server = stack.enter_context(Server([awkward()], access=access, options=options))
        mine = stack.enter_context(GrpcTransport(server.address, token="mine"))
        crowd = stack.enter_context(Helper("survive_crowd", {"address": server.address}, python=sys.executable))
        crowd.hear()
        _latencies(mine, calls // 4)
        alone = _latencies(mine, calls)
        crowd.ask({"idle": idle}, 60.0)
        beside_idle = _latencies(mine, calls)
        frame = base64.b64encode(message(*[forward(rows(0, MOST_ROWS), number=n) for n in range(1, 129)])).decode()
        sent = crowd.ask({"slow": slow, "frame": frame}, 60.0)["sent"] if slow else 0
        beside_slow = _latencies(mine, calls)
        held = max((each.nbytes for each in server._grpc_server.handlers.connections), default=0) / _MB
        connections = server.statistics().connections
    all_there = connections == idle + slow + 1
    verdicts: list[Verdict] = []
    for what, seen, more in (
        (f"{idle} idle connections", beside_idle, f"{connections} connections"),
        (f"{slow} slow readers beside them", beside_slow, f"{sent} frames taken from them, {held:.1f} MB held of one"),
    ):
        p99, wanted = quantile(seen) * 1e3, 2 * quantile(alone) * 1e3
        verdicts.append(
            Verdict(
                what,
                f"{calls} calls of another",
                f"its p99 <= {wanted:.2f} ms, twice that alone",
                f"p99 {p99:.2f} ms; {more}",
                p99 <= wanted and all_there,
            )
        )
    return verdicts


def _latencies(transport: GrpcTransport, calls: int) -> list[float]:
    call, took = forward(rows(1)), list[float]()
    for _ in range(calls):
        start = time.perf_counter()
        transport.submit(call, PATIENCE).result(PATIENCE)
        took.append(time.perf_counter() - start)
    return took


def vanished(times: int) -> Verdict:
    """So many clients that are gone before their answer, while another one goes on."""
    draw = random.Random(3)
    with Server([backend := awkward()]) as server, GrpcTransport(server.address) as fine:
        frame = message(*[forward(rows(0, MOST_ROWS), number=n) for n in range(1, 33)])
        with goes_on(fine) as good:
            for turn in range(times):
                with connected(server.address) as channel:
                    stream = Raw(channel)
                    stream.opened()
                    stream.send(frame)
                    time.sleep(draw.random() * 0.005)
                    if turn % 2:
                        channel.close()  # the connection goes; else the stream is cancelled first
                    stream.__exit__()
        gone = until(lambda: server.statistics().connections == 1)
        empty = until(lambda: backend.forward_pool.statistics().waiting_tasks == 0)
        left = server.statistics().connections - 1, backend.forward_pool.statistics().waiting_tasks
    return Verdict(
        "a client that vanishes with its request under way",
        f"{times}",
        "nothing of it is left; others to the bit",
        f"{left[0]} connections and {left[1]} tasks left; {good}",
        gone and empty and good.holds,
    )
