"""Lanes: how large tensors travel between ranks. All private names of `torch.distributed` that torchweft uses are here.

    lane 0   to higher ranks        lane 1   to lower ranks

NCCL has one communicator per pair and group, in which sends and receives must meet in one order. A group per direction
holds the sends of one rank only, in the order of their headers, and the header of a send posts its receive.

The backends are made directly. `torch.distributed.new_group` would involve ranks outside of the group. The NCCL half
needs two GPUs and is unmeasured.
"""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_process_group_store


def store_of(group: ProcessGroup) -> Store:
    return _get_process_group_store(group)


def host_of(store: Any) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def timeout_of(group: ProcessGroup) -> float:
    (device, *_) = dist.get_backend_config(group).split(":")
    backend: Any = group._get_backend(torch.device(device))
    return backend.options._timeout.total_seconds()


def has_nccl(group: ProcessGroup) -> bool:
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


class Lane:
    """Send and receive works of one rank, by one kind of backend. Posting is asynchronous, and keeps its order."""

    def __init__(self, rank: int, backends: list[Any]) -> None:
        self.rank, self._backends = rank, backends
        self._locks = threading.Lock(), threading.Lock()

    @classmethod
    def of_gloo(cls, group: ProcessGroup, store: Store, address: str, timeout: float) -> "Lane":
        gloo: Any = dist.ProcessGroupGloo
        backends: list[Any] = []
        for name in ("up", "down"):
            options = gloo._Options()
            # A timeout of gloo closes its connections, so walks must time out before.
            options._devices, options._timeout = [gloo.create_device(hostname=address)], timedelta(seconds=2 * timeout)
            backends.append(gloo(PrefixStore(f"gloo/{name}", store), group.rank(), group.size(), options))
        return cls(group.rank(), backends)

    @classmethod
    def of_nccl(cls, group: ProcessGroup, store: Store, timeout: float) -> "Lane":
        nccl: Any = dist.ProcessGroupNCCL
        backends: list[Any] = []
        for name in ("up", "down"):
            options = nccl.Options()
            # The watchdog of NCCL counts from the post, and ends the process. `DeviceLane` counts from the last
            # progress, and must be the first to act.
            options._timeout = timedelta(seconds=3 * timeout)
            backends.append(nccl(PrefixStore(f"nccl/{name}", store), group.rank(), group.size(), options))
        return cls(group.rank(), backends)

    def send(self, rank: int, tensor: torch.Tensor) -> Any:
        return self._post("send", tensor, rank, rank > self.rank)

    def receive(self, rank: int, tensor: torch.Tensor) -> Any:
        return self._post("recv", tensor, rank, self.rank > rank)

    def _post(self, action: str, tensor: torch.Tensor, rank: int, up: bool) -> Any:
        lane, flat = int(not up), tensor.as_strided((tensor.numel(),), (1,))  # the memory of a dense tensor
        # A lock per direction: the order of posts is the only thing that pairs a send with its receive. As bytes,
        # because gloo and NCCL do not know every dtype.
        with self._locks[lane]:
            return getattr(self._backends[lane], action)([flat.view(torch.uint8)], rank, 0)

    def abort(self) -> None:
        for backend in self._backends:
            backend.abort()

    def close(self) -> None:
        self._backends = []
