"""Lanes: how large tensors travel between ranks. All private names of `torch.distributed` that torchweft uses are here.

    lane 0   to higher ranks        lane 1   to lower ranks

NCCL has one communicator per pair and group, in which sends and receives must meet in one order. A group per direction
holds the sends of one rank only, in the order of their headers, and the header of a send posts its receive.

The backends are made directly. `torch.distributed.new_group` would involve ranks outside of the group. The NCCL half
needs two GPUs and is unmeasured.
"""

import threading
from contextlib import nullcontext
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


class Lanes:
    """Send and receive works of one rank. Posting is asynchronous; a lane keeps the order in which it was asked."""

    def __init__(self, group: ProcessGroup, store: Store, address: str, timeout: float) -> None:
        self.rank = group.rank()
        # A timeout of gloo closes its connections, so walks must time out before.
        limit = timedelta(seconds=2 * timeout)
        self._cpu: list[Any] = []
        self._device: list[Any] = []
        self.device: torch.device | None = None
        self._locks = threading.Lock(), threading.Lock()
        for name in ("up", "down"):
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices, options._timeout = [gloo.create_device(hostname=address)], limit
            self._cpu.append(gloo(PrefixStore(f"gloo/{name}", store), self.rank, group.size(), options))
        if "cuda:nccl" in dist.get_backend_config(group).split(","):
            self.device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
            for name in ("up", "down"):
                nccl: Any = dist.ProcessGroupNCCL
                options = nccl.Options()
                options._timeout = limit
                self._device.append(nccl(PrefixStore(f"nccl/{name}", store), self.rank, group.size(), options))

    def send(self, rank: int, tensor: torch.Tensor) -> Any:
        return self._post("send", tensor, rank, rank > self.rank)

    def receive(self, rank: int, tensor: torch.Tensor) -> Any:
        return self._post("recv", tensor, rank, self.rank > rank)

    def _post(self, action: str, tensor: torch.Tensor, rank: int, up: bool) -> Any:
        lanes, lane = self._cpu if tensor.device.type == "cpu" else self._device, int(not up)
        here = nullcontext() if tensor.device.type == "cpu" else torch.cuda.device(tensor.device)
        # A lock per lane: the order of posts is the only thing that pairs a send with its receive. As bytes, because
        # gloo and NCCL do not know every dtype.
        with self._locks[lane], here:
            return getattr(lanes[lane], action)([tensor.view(-1).view(torch.uint8)], rank, 0)

    def abort(self) -> None:
        # NCCL never hears of a dead rank. Its kernels would wait for it on the GPU.
        for backend in self._device:
            backend.abort()

    def close(self) -> None:
        self._cpu, self._device = [], []
