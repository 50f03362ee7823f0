"""Replies that are lost after the request was handed over: each step is applied once all the same.

by the transport    the request goes to the server over gRPC; its answer, or the wait for it, is thrown away
by a proxy          the connection is cut within a request or an answer, and made again
"""

import random
import threading
from concurrent.futures import Future

from benchmarks.experts.survive_common import Verdict, until
from benchmarks.experts.survive_steps import Count, Trainers, WrappedTransport, counted, marks
from tests.experts.faulty_proxy import NO_FAULTS, FaultyProxy, NetworkFaults
from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport
from torchweft.experts.errors import LostError
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Received


class Forgetful(WrappedTransport):
    """A transport that loses two of three answers: one when it comes, one while the server still works on it."""

    def __init__(self, inner: GrpcTransport) -> None:
        self.lost = 0
        super().__init__(inner)
        self._draw, self._lock = random.Random(5), threading.Lock()

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        answer = self.inner.submit(call, timeout)
        with self._lock:
            fate = self._draw.randrange(3)
            self.lost += fate > 0
        if fate == 0:
            return answer
        dropped: Future[Received] = Future()
        error = LostError("the reply was dropped")
        if fate == 1:
            dropped.set_exception(error)
        else:
            answer.add_done_callback(lambda _: dropped.set_exception(error))
        return dropped


def dropped(times: int) -> Verdict:
    """Until so many replies were lost."""
    backend = marks(times)
    with Server([backend]) as server, GrpcTransport(server.address) as inner:
        forgetful = Forgetful(inner)
        trainers = Trainers(forgetful, threads=2, most=times * 11 // 20)  # two replies of three are lost
        trainers.join()
    return _verdict("replies dropped by the transport", forgetful.lost, trainers, backend)


def cut(times: int) -> Verdict:
    """So many connections cut, one after the other, while trainers go on."""
    backend, pause, draw = marks(1 << 17), threading.Event(), random.Random(9)
    with (
        Server([backend]) as server,
        FaultyProxy(server.address, seed=9) as proxy,
        GrpcTransport(proxy.address) as transport,
    ):
        trainers = Trainers(transport, threads=2, most=1 << 17)
        for _ in range(times):
            told = len(trainers.heard)
            if not until(lambda told=told: len(trainers.heard) > told):  # it is connected again
                break
            pause.wait(draw.random() * 0.005)
            cuts, proxy.network_faults = proxy.cuts, NetworkFaults(cut=1.0)
            if not until(lambda cuts=cuts: proxy.cuts > cuts):
                break
            proxy.network_faults = NO_FAULTS
        trainers.stop()
    return _verdict("connections cut by a proxy", proxy.cuts, trainers, backend)


def _verdict(what: str, times: int, trainers: Trainers, backend: ExpertBackend) -> Verdict:
    weight = next(iter(backend.module.parameters())).detach()
    count: Count = counted(weight, backend.steps)
    missing = trainers.missing(weight)
    seen = f"{len(trainers.heard)} keys answered, {backend.steps} steps, {count.repeated} keys twice, {missing} never"
    return Verdict(
        what,
        f"{times}",
        "each key one step",
        seen + f"; {len(trainers.faults)} calls failed" * bool(trainers.faults),
        count.good and not missing and not trainers.faults and bool(trainers.heard),
    )
