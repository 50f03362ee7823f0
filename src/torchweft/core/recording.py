"""Recordings of launches on GPUs: work that the host launches once, and a CUDA graph repeats.

    record    on the recording streams of the devices: the kernels do not run, their memory stays theirs
    replay    caller's streams --wait--> [ recording streams: the graph ] --wait--> caller's streams

PyTorch captures one graph at a time in a process, and the memory of a capture comes from the pool of one device. So
work on several devices is one graph: the streams of the other devices fork from that of the first one and join it
again, and these devices get a `torch.cuda.MemPool` each. One graph per device, with events between them, would need
captures that are underway at the same time.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

# Held in the whole process while work is recorded or replayed. A recording has one set of buffers, which threads that
# share a network would overwrite for each other, and PyTorch records one graph at a time.
RECORDING = threading.RLock()
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def recording_stream(device: torch.device) -> Generator[None]:
    """Make the one stream of all recordings on this device current, in order with the caller's current stream."""
    # The buffers of recordings belong to it, so replays run one after another, whichever streams they serve.
    with ExitStack() as stack:
        if device.type == "cuda":
            # PyTorch hands out 32 streams of each priority in turn. Stages of a pipe have streams of normal priority.
            # If a stage had the recording stream too, its kernels would be recorded into the graph.
            recording = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device, priority=-1))
            current = torch.cuda.current_stream(device)
            recording.wait_stream(current)
            stack.callback(current.wait_stream, recording)
            stack.enter_context(torch.cuda.stream(recording))  # also makes the device the current one
        yield


def capture(function: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Capture the launches of `function` on the current stream. Returns a function that repeats them.

    Raises RuntimeError for work that a graph cannot hold. `pool` is a ``torch.cuda.graph_pool_handle()``."""
    graph = torch.cuda.CUDAGraph()
    # The default stream belongs to the device that recorded first. Kernels on another device would not be recorded.
    with torch.cuda.graph(graph, pool, torch.cuda.current_stream(), "thread_local"):
        function()
    return graph.replay


class GraphRecorder(Protocol):
    """Records work that reads and writes tensors with fixed memory. All recordings of a recorder share their memory, so
    they are replayed in the order in which they were recorded."""

    def record(self, work: Callable[[], None], /) -> Callable[[], None]:
        """Call `work` once, without its effects on memory. Returns a function that makes these effects. Raises
        RuntimeError for work that cannot be repeated without the host."""
        ...


class CudaRecorder:
    """A `GraphRecorder` of work on CUDA devices, in one graph."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._pool = torch.cuda.graph_pool_handle()
        self._other_pools: list[tuple[torch.device, Any]] = []
        for device in self._devices[1:]:
            with torch.cuda.device(device):
                self._other_pools.append((device, torch.cuda.MemPool()))

    def record(self, work: Callable[[], None], /) -> Callable[[], None]:
        """See `GraphRecorder`. The host waits for the devices, and the kernels do not run."""
        with RECORDING, self._streams() as streams, ExitStack() as stack:
            for device, pool in self._other_pools:
                stack.enter_context(torch.cuda.use_mem_pool(pool, device))

            def forked() -> None:
                _fork(streams)
                work()
                _join(streams)

            launch = capture(forked, self._pool)

        def replay() -> None:
            with RECORDING, self._streams() as streams:
                _join(streams)
                launch()
                _fork(streams)

        return replay

    @contextmanager
    def _streams(self) -> Generator[list[torch.cuda.Stream]]:
        with ExitStack() as stack:
            for device in reversed(self._devices):  # the stream of the first device is then the current one
                stack.enter_context(recording_stream(device))
            yield [_streams[device] for device in self._devices]


def _fork(streams: Sequence[torch.cuda.Stream]) -> None:
    for other in streams[1:]:
        other.wait_stream(streams[0])


def _join(streams: Sequence[torch.cuda.Stream]) -> None:
    for other in streams[1:]:
        streams[0].wait_stream(other)
