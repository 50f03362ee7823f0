"""A network that delays, cuts and swallows, between trainers and a server: steps once, and calls that end in time.

rough      calls have time enough: all are answered, each key one step
in a hurry calls have half a second, and many are given up: none ends late, none steps twice
silent     a connection that swallows everything and never ends: how soon the client has another one
"""

import threading
import time

from benchmarks.experts.sleeper import Sleeper
from benchmarks.experts.survive_common import Verdict, until
from benchmarks.experts.survive_steps import UID, Trainers, counted, marks
from tests.experts.faulty_proxy import NO_FAULTS, FaultyProxy, NetworkFaults
from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport, Retry
from torchweft.experts.client.retry import FixedResolver, RetryingCaller
from torchweft.experts.errors import DeadlineError, LostError, UnreachableError
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Header, Kind

ROUGH = NetworkFaults(late=0.005, cut=0.01, silent=0.005, silent_seconds=1.0, stall=0.01, stall_seconds=0.3)
HURRY = NetworkFaults(late=0.05, cut=0.01, silent=0.01, silent_seconds=3.0, stall=0.05, stall_seconds=0.4)
RETRY = Retry(attempts=100_000, first=0.005, longest=0.1, attempt_seconds=2.0)
LATE = 0.1
"""Seconds that a call may end after its deadline."""
_THREADS = 4
_LONG = 120.0
_FAULTS = (DeadlineError, LostError, UnreachableError)


def rough(times: int) -> Verdict:
    """So many keys, with time enough."""
    backend, network, trainers = _trained(ROUGH, times, _LONG)
    count, missing = _counted(backend, trainers)
    return Verdict(
        "a network that delays, cuts and swallows",
        f"{times} keys",
        "all answered, each key one step",
        f"{len(trainers.heard)} answered, {backend.steps} steps, {count} keys twice, {missing} never; "
        f"{network.cuts} cuts, {network.silences} silences" + _failed(trainers),
        len(trainers.heard) == backend.steps == times and not (count or missing) and network.cuts > 0,
    )


def in_a_hurry(times: int) -> Verdict:
    """So many keys, without."""
    with Sleeper() as sleeper:
        backend, network, trainers = _trained(HURRY, times, 0.5)
    count, missing = _counted(backend, trainers)
    return Verdict(
        "calls of half a second, over one that is worse",
        f"{times} keys",
        f"none ends {LATE * 1e3:g} ms after its deadline, no key twice",
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
    """Keys with more than one step, or steps without a key; and keys that were answered but have none."""
    weight = next(iter(backend.module.parameters())).detach()
    count = counted(weight, backend.steps)
    return count.repeated + abs(count.unexplained), trainers.missing(weight)


def _failed(trainers: Trainers) -> str:
    told = [f"{count} {name}" for name, count in trainers.failed.items()] + [repr(each) for each in trainers.faults]
    return f"; calls failed: {', '.join(told)}" * bool(told)


def silent(times: int) -> Verdict:
    """So many connections that fall silent for good under a call of 30 s, as is the default."""
    took: list[float] = []
    failed = 0
    with Server([marks(8)]) as server:
        for _ in range(times):
            with FaultyProxy(server.address) as network, GrpcTransport(network.address) as transport:
                line, ask = (
                    RetryingCaller(FixedResolver(transport), RETRY),
                    Call(Header(kind=Kind.PING, call_id=0, uid=UID)),
                )
                line.call(ask, 30.0)
                network.network_faults = NetworkFaults(silent=1.0)
                calming = threading.Thread(target=_calm_once_silent, args=(network,))
                calming.start()
                start = time.monotonic()
                try:
                    line.call(ask, 30.0)
                except _FAULTS:
                    failed += 1
                took.append(time.monotonic() - start)
                calming.join()
    return Verdict(
        "a connection that swallows all and never ends, under a call",
        f"{times}",
        "the call of 30 s comes through over another",
        f"{failed} calls failed; the longest took {max(took):.1f} s",
        not failed,
    )


def _calm_once_silent(network: FaultyProxy) -> None:
    """The next connection is to be a good one; the silent one stays silent."""
    until(lambda: network.silences > 0)
    network.network_faults = NO_FAULTS
