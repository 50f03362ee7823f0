"""Time until the next owner answers after an owner was stopped (SIGSTOP) while calls of its expert wait.

    clients ── backwards ──> owner (stopped) ──x       its lease ends ── the follower claims the expert
            ── the same, with the same key ──> the new owner

The two servers are processes. The time is measured from the signal to the next acknowledged backward.
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


def stopped_owner(times: int, lease: float) -> list[Verdict]:
    """Stop the owner `times` times. Empty without etcd."""
    if WHERE is None:
        return []
    seconds, steps = list[float](), 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (member,) = stack.enter_context(cluster(folder / "etcd"))
        directory = stack.enter_context(EtcdDirectory(member.endpoint))
        served = replicas.serving(folder, member.endpoint, free_ports(2), stack, lease)
        remote = RemoteExpert(UID, stack.enter_context(Connections(directory)), timeout=60.0)
        x = torch.randn(2, 8)
        for _ in range(times):
            for _ in range(3):
                remote(x).sum().backward()
            time.sleep(1.0)  # gives the follower time to copy the state
            owner = served[directory.get().owners[UID].address]
            y, start = remote(x), time.monotonic()
            owner.send_signal(signal.SIGSTOP)
            try:
                y.sum().backward()
                seconds.append(time.monotonic() - start)
            finally:
                owner.send_signal(signal.SIGCONT)
            steps += 4
            until(lambda: len(directory.get().addresses(UID)) == 2, 30.0)
            time.sleep(1.0)
        kept = remote.describe().steps == steps and not remote.steps_lost
    return [
        Verdict(
            f"a stopped owner, with a lease of {lease:g} s",
            f"{times} times",
            f"the next acknowledgement within {lease + 1:g} s, one step per backward",
            f"{min(seconds):.1f} to {max(seconds):.1f} s; {steps} backwards, {'' if kept else 'not '}one step each",
            kept and max(seconds) <= lease + 1,
        )
    ]
