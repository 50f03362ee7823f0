"""An owner that is stopped (SIGSTOP) while calls of its expert wait: how long until the next owner answers one?

    clients ── backwards ──> owner (stopped) ──x       its lease ends ── the follower claims the expert
            ── the same, under the same key ──> the new owner

Two servers are processes; the clock runs from the signal to the next acknowledged backward, which waited all the time.
"""

import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.experts.survive_common import Verdict, until
from tests.experts.etcd_cases import WHERE, cluster, free_ports
from tests.experts.server import test_replicas_etcd as replicas
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.discovery.etcd import EtcdDirectory

UID = "ffn.0"


def stopped(times: int, lease: float) -> list[Verdict]:
    """The longest of so many stops; empty without etcd."""
    if WHERE is None:
        return []
    taken, steps = list[float](), 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (member,) = stack.enter_context(cluster(folder / "etcd"))
        there = stack.enter_context(EtcdDirectory(member.endpoint))
        served = replicas.serving(folder, member.endpoint, free_ports(2), stack, lease)
        remote = RemoteExpert(UID, stack.enter_context(Connections(there)), timeout=60.0)
        x = torch.randn(2, 8)
        for _ in range(times):
            for _ in range(3):
                remote(x).sum().backward()
            time.sleep(1.0)  # the follower has the state
            owner = served[there.get().owners[UID].address]
            y, start = remote(x), time.monotonic()
            owner.send_signal(signal.SIGSTOP)
            try:
                y.sum().backward()
                taken.append(time.monotonic() - start)
            finally:
                owner.send_signal(signal.SIGCONT)
            steps += 4
            until(lambda: len(there.get().addresses(UID)) == 2, 30.0)
            time.sleep(1.0)
        kept = remote.describe().steps == steps and not remote.steps_lost
    return [
        Verdict(
            f"an owner that is stopped, at a lease of {lease:g} s",
            f"{times} times",
            f"the next acknowledgement within {lease + 1:g} s, each backward one step",
            f"{min(taken):.1f} to {max(taken):.1f} s; {steps} backwards, {'each' if kept else 'not each'} one step",
            kept and max(taken) <= lease + 1,
        )
    ]
