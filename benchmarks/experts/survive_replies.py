"""Replies that are lost after the request was sent. Each step must still be applied exactly once.

by the transport    the request reaches the server over gRPC, and its answer is dropped, then or early
by a proxy          the connection is cut within a request or an answer, and reconnected
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


class LossyTransport(WrappedTransport):
    """Transport that drops two of three answers: one on arrival, one while the server still computes it."""

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


def dropped_replies(times: int) -> Verdict:
    """Train until about `times` replies were dropped."""
    backend = marks(times)
    with Server([backend]) as server, GrpcTransport(server.address) as inner:
        transport = LossyTransport(inner)
        trainers = Trainers(transport, threads=2, most=times * 11 // 20)  # two of three replies are dropped
        trainers.join()
    return _verdict("replies dropped by the transport", transport.lost, trainers, backend)


def cut_connections(times: int) -> Verdict:
    """Cut `times` connections one after another during a training."""
    backend, pause, draw = marks(1 << 17), threading.Event(), random.Random(9)
    with (
        Server([backend]) as server,
        FaultyProxy(server.address, seed=9) as proxy,
        GrpcTransport(proxy.address) as transport,
    ):
        trainers = Trainers(transport, threads=2, most=1 << 17)
        for _ in range(times):
            before = len(trainers.heard)
            if not until(lambda before=before: len(trainers.heard) > before):  # wait until reconnected
                break
            pause.wait(draw.random() * 0.005)
            cuts, proxy.network_faults = proxy.cuts, NetworkFaults(cut=1.0)
            if not until(lambda cuts=cuts: proxy.cuts > cuts):
                break
            proxy.network_faults = NO_FAULTS
        trainers.stop()
    return _verdict("connections cut by a proxy", proxy.cuts, trainers, backend)


def _verdict(fault: str, times: int, trainers: Trainers, backend: ExpertBackend) -> Verdict:
    weight = next(iter(backend.module.parameters())).detach()
    count: Count = counted(weight, backend.steps)
    missing = trainers.missing(weight)
    counts = f"{len(trainers.heard)} keys answered, {backend.steps} steps, {count.repeated} keys twice, {missing} never"
    return Verdict(
        fault,
        f"{times}",
        "each key one step",
        counts + f"; {len(trainers.faults)} calls failed" * bool(trainers.faults),
        count.good and not missing and not trainers.faults and bool(trainers.heard),
    )
