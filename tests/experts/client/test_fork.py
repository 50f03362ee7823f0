"""Processes that are forked while a connection is open, as a DataLoader does in each epoch."""

import gc

import pytest
import torch

from tests.experts.expert_cases import fussy_backend, rows
from tests.processes import forked, only_with_fork, python
from torchweft.core.errors import UsageError
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.server import Server

pytestmark = only_with_fork
TRAINER = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchweft.experts.client import RemoteExpert

data = TensorDataset(torch.ones(4, 4, dtype=torch.float64))
with RemoteExpert("fussy", sys.argv[1]) as remote:
    for _ in range(3):
        for (x,) in DataLoader(data, num_workers=2, multiprocessing_context="fork"):
            remote(x.requires_grad_()).sum().backward()
    print(remote.steps)
"""


@pytest.mark.long
def test_forked_data_loader_workers_do_not_disturb_training() -> None:
    with Server([fussy_backend()]) as server:
        done = python(TRAINER, server.address, GRPC_ENABLE_FORK_SUPPORT=None)
    assert (done.stdout, done.stderr) == ("12\n", "")


@torch.no_grad()
def test_forked_child_leaves_its_parents_connections_alone(directory: LocalDirectory) -> None:
    with (
        Server([fussy_backend()], directory=directory) as server,
        Connections(directory) as connections,
        RemoteExpert("fussy", server.address) as remote,
    ):
        listed = RemoteExpert("fussy", connections)
        expected = remote(rows(2, 0))
        assert torch.equal(listed(rows(2, 0)), expected)

        def refused() -> bool:
            for use in (
                lambda: remote(rows(2, 0)),
                lambda: listed(rows(2, 0)),
                lambda: RemoteExpert("fussy", server.address),
                lambda: Server([fussy_backend()]).start(),
            ):
                with pytest.raises(UsageError, match="was forked from one that uses gRPC"):
                    use()
            return True

        def closed() -> bool:
            for inherited in (remote, listed, connections):
                inherited.close()
            return server.shutdown()

        def freed() -> bool:
            nonlocal remote, listed
            del remote, listed
            gc.collect()
            return True

        for child in (refused, closed, freed):
            assert forked(child), child.__name__
            assert torch.equal(remote(rows(2, 0)), expected) and torch.equal(listed(rows(2, 0)), expected)
        assert not server.statistics().draining
