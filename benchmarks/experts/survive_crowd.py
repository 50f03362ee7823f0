"""Many clients with small or abandoned requests: leaks, and the effect on other clients.

submit and cancel     queues are empty, descriptors and resident bytes do not grow
idle, slow readers    the p99 of another client, with and without them
vanished              the connection closes while a request is on the wire, in the queue or in the module
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
    message,
    quantile,
    repeated_calls,
    rows,
    until,
)
from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport
from torchweft.experts.server import Access, Grant, Server, ServerOptions

BLOCK = 100
REQUIRED_MB = 8.0
_MB = 1 << 20


def cancelled_requests(times: int) -> list[Verdict]:
    """Submit and cancel `times` tasks in the server's process, and a fifth as many over gRPC."""
    with Server([backend := awkward()]) as server, GrpcTransport(server.address) as transport:
        x, call = rows(0), forward(rows(0))

        def submit_locally() -> list["Future[Any]"]:
            end = time.monotonic() + PATIENCE
            return [backend.forward_pool.submit_task(x, deadline=end, client="me") for _ in range(BLOCK)]

        def submit_by_grpc() -> list["Future[Any]"]:
            return [transport.submit(call, PATIENCE) for _ in range(BLOCK)]

        return [
            _check_leaks("submit and cancel, in the process", backend, submit_locally, times, transport),
            _check_leaks("submit and cancel, over gRPC", backend, submit_by_grpc, times // 5, transport),
        ]


def _check_leaks(fault: str, backend: ExpertBackend, submit: Any, times: int, transport: GrpcTransport) -> Verdict:
    draw = random.Random(1)

    def block() -> None:
        futures = submit()
        draw.shuffle(futures)
        for future in futures:
            future.cancel()
        until(settled)

    def settled() -> bool:
        pool = backend.forward_pool.statistics()
        return not (pool.waiting_tasks or pool.running_tasks or transport.statistics().waiting)

    for _ in range(times // BLOCK // 10 + 1):  # warm-up, in which buffers and memory pools grow
        block()
    until(settled)
    before = _descriptors(), _resident()
    for _ in range(times // BLOCK):
        block()
    is_settled = until(settled)
    after = _descriptors(), _resident()
    growth = (after[1] - before[1]) / _MB
    statistics = backend.forward_pool.statistics()
    return Verdict(
        fault,
        f"{times}",
        f"nothing waits, descriptors as before, at most {REQUIRED_MB:g} MB more",
        f"{statistics.waiting_tasks} wait; {after[0] - before[0]:+d} descriptors, {growth:+.1f} MB; "
        f"{statistics.cancelled} cancelled in the queue so far",
        is_settled and after[0] <= before[0] and growth <= REQUIRED_MB,
    )


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def idle_and_slow_clients(idle: int, slow: int, calls: int) -> list[Verdict]:
    """Compare the p99 of one client alone, with idle connections, and with slow readers as well."""
    options = ServerOptions(connection_bytes=4 << 20)
    access = Access([Grant("*")], {"mine": "me"})  # quotas apply per authenticated name, otherwise per host
    with ExitStack() as stack:
        server = stack.enter_context(Server([awkward()], access=access, options=options))
        mine = stack.enter_context(GrpcTransport(server.address, token="mine"))
        crowd = stack.enter_context(Helper("survive_crowd", {"address": server.address}, python=sys.executable))
        crowd.hear()
        _latencies(mine, calls // 4)
        alone = _latencies(mine, calls)
        crowd.ask({"idle": idle}, 60.0)
        with_idle = _latencies(mine, calls)
        frame = base64.b64encode(message(*[forward(rows(0, MOST_ROWS), number=n) for n in range(1, 129)])).decode()
        sent = crowd.ask({"slow": slow, "frame": frame}, 60.0)["sent"] if slow else 0
        with_slow = _latencies(mine, calls)
        held = max((connection.nbytes for connection in server._grpc_server.handlers.connections), default=0) / _MB
        connections = server.statistics().connections
    all_connected = connections == idle + slow + 1
    verdicts: list[Verdict] = []
    for fault, latencies, details in (
        (f"{idle} idle connections", with_idle, f"{connections} connections"),
        (f"{slow} slow readers as well", with_slow, f"{sent} frames accepted from them, {held:.1f} MB held for one"),
    ):
        p99, limit = quantile(latencies) * 1e3, 2 * quantile(alone) * 1e3
        verdicts.append(
            Verdict(
                fault,
                f"{calls} calls of another client",
                f"its p99 <= {limit:.2f} ms, twice that alone",
                f"p99 {p99:.2f} ms; {details}",
                p99 <= limit and all_connected,
            )
        )
    return verdicts


def _latencies(transport: GrpcTransport, calls: int) -> list[float]:
    call, seconds = forward(rows(1)), list[float]()
    for _ in range(calls):
        start = time.perf_counter()
        transport.submit(call, PATIENCE).result(PATIENCE)
        seconds.append(time.perf_counter() - start)
    return seconds


def vanished_clients(times: int) -> Verdict:
    """Clients disconnect before their answer, while another client repeats a call."""
    draw = random.Random(3)
    with Server([backend := awkward()]) as server, GrpcTransport(server.address) as other:
        frame = message(*[forward(rows(0, MOST_ROWS), number=n) for n in range(1, 33)])
        with repeated_calls(other) as answers:
            for turn in range(times):
                with connected(server.address) as channel:
                    stream = Raw(channel)
                    stream.opened()
                    stream.send(frame)
                    time.sleep(draw.random() * 0.005)
                    if turn % 2:
                        channel.close()  # closes the connection first, otherwise the stream is cancelled first
                    stream.__exit__()
        gone = until(lambda: server.statistics().connections == 1)
        empty = until(lambda: backend.forward_pool.statistics().waiting_tasks == 0)
        left = server.statistics().connections - 1, backend.forward_pool.statistics().waiting_tasks
    return Verdict(
        "a client that disconnects during its request",
        f"{times}",
        "no connection or task left; other answers bit-equal",
        f"{left[0]} connections and {left[1]} tasks left; {answers}",
        gone and empty and answers.holds,
    )
