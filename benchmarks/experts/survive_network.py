"""Network that delays, cuts and drops, between trainers and a server. Keys must step once, calls must end in time.

long deadlines    all calls are answered, and each key takes one step
short deadlines   calls have half a second and many fail: none ends late, and no key steps twice
silence           a connection drops everything and never ends: time until the client uses another one
"""

import threading
import time

from benchmarks.experts.sleeper import Sleeper
from benchmarks.experts.survive_common import Verdict, until
from benchmarks.experts.survive_steps import UID, Trainers, counted, marks
from tests.experts.faulty_proxy import NO_FAULTS, FaultyProxy, NetworkFaults
from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport, Retry
from torchweft.experts.client.calls import FixedResolver, RetryingCaller
from torchweft.experts.errors import DeadlineError, LostError, UnreachableError
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Header, Kind

LOSSY = NetworkFaults(late=0.005, cut=0.01, silent=0.005, silent_seconds=1.0, stall=0.01, stall_seconds=0.3)
WORSE = NetworkFaults(late=0.05, cut=0.01, silent=0.01, silent_seconds=3.0, stall=0.05, stall_seconds=0.4)
RETRY = Retry(attempts=100_000, first=0.005, longest=0.1, attempt_seconds=2.0)
LATE = 0.1
"""Allowed seconds from the deadline of a call to its end."""
_THREADS = 4
_LONG = 120.0
_FAULTS = (DeadlineError, LostError, UnreachableError)


def long_deadlines(times: int) -> Verdict:
    """Step `times` keys with a deadline of two minutes each."""
    backend, network, trainers = _trained(LOSSY, times, _LONG)
    count, missing = _counted(backend, trainers)
    return Verdict(
        "a network that delays, cuts and drops",
        f"{times} keys",
        "all answered, each key one step",
        f"{len(trainers.heard)} answered, {backend.steps} steps, {count} keys twice, {missing} never; "
        f"{network.cuts} cuts, {network.silences} silences" + _failed(trainers),
        len(trainers.heard) == backend.steps == times and not (count or missing) and network.cuts > 0,
    )


def short_deadlines(times: int) -> Verdict:
    """Step `times` keys with a deadline of half a second each, over a worse network."""
    with Sleeper() as sleeper:
        backend, network, trainers = _trained(WORSE, times, 0.5)
    count, missing = _counted(backend, trainers)
    return Verdict(
        "calls of half a second over a worse network",
        f"{times} keys",
        f"at most {LATE * 1e3:g} ms after the deadline, no key twice",
        f"latest {trainers.latest * 1e3:+.0f} ms, a process that only sleeps {sleeper.latest * 1e3:+.0f} ms; "
        f"{len(trainers.heard)} answered, {count} keys twice, {missing} never; "
        f"{network.cuts} cuts, {network.silences} silences" + _failed(trainers),
        trainers.latest <= LATE and not (count or missing or trainers.faults) and bool(trainers.heard),
    )


def _trained(network_faults: NetworkFaults, times: int, seconds: float) -> tuple[ExpertBackend, FaultyProxy, Trainers]:
    backend = marks(times)
    with (
        Server([backend]) as server,
        FaultyProxy(server.address, network_faults, seed=13) as network,
        GrpcTransport(network.address) as transport,
    ):
        trainers = Trainers(transport, _THREADS, times, seconds, RETRY, _FAULTS)
        trainers.join()
    return backend, network, trainers


def _counted(backend: ExpertBackend, trainers: Trainers) -> tuple[int, int]:
    """Number of extra steps, and of answered keys that did not take exactly one step."""
    weight = next(iter(backend.module.parameters())).detach()
    count = counted(weight, backend.steps)
    return count.repeated + abs(count.unexplained), trainers.missing(weight)


def _failed(trainers: Trainers) -> str:
    texts = [f"{count} {name}" for name, count in trainers.failed.items()] + [repr(error) for error in trainers.faults]
    return f"; calls failed: {', '.join(texts)}" * bool(texts)


def silent_connections(times: int) -> Verdict:
    """Make the connection silent for good during a call of 30 s, the default timeout."""
    seconds: list[float] = []
    failed = 0
    with Server([marks(8)]) as server:
        for _ in range(times):
            with FaultyProxy(server.address) as network, GrpcTransport(network.address) as transport:
                caller = RetryingCaller(FixedResolver(transport), RETRY)
                ping = Call(Header(kind=Kind.PING, call_id=0, uid=UID))
                caller.call(ping, 30.0)
                network.network_faults = NetworkFaults(silent=1.0)
                restorer = threading.Thread(target=_restore_once_silent, args=(network,))
                restorer.start()
                start = time.monotonic()
                try:
                    caller.call(ping, 30.0)
                except _FAULTS:
                    failed += 1
                seconds.append(time.monotonic() - start)
                restorer.join()
    return Verdict(
        "a connection that drops everything and never ends, during a call",
        f"{times}",
        "the call of 30 s succeeds over another connection",
        f"{failed} calls failed; the longest took {max(seconds):.1f} s",
        not failed,
    )


def _restore_once_silent(network: FaultyProxy) -> None:
    """Let later connections work. The silent one stays silent."""
    until(lambda: network.silences > 0)
    network.network_faults = NO_FAULTS
