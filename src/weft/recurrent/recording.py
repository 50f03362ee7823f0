"""Recording what a function does on the GPU, to do it again at the cost of one launch.

    outputs, replay = record(function)      function reads and writes the same memory whenever it runs
    inputs.copy_(...); replay()             and outputs hold what function would have returned

A kernel of a small step runs for some microseconds, and so long takes the host to launch it. A recorded chunk is
launched as a whole (CUDA graphs).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Recorder = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Callable[[], None]]]
"""Makes of a function its outputs, in memory that stays theirs, and a way to fill them anew."""
MOST = 16
"""So many recordings are kept for one plan: each has memory of its own."""


def cuda_recorder(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """Record on the current device. Raises RuntimeError if the function does what cannot be recorded."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # what happens once only, compiling and making handles, must happen before
        function()
        function()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay


@dataclass(frozen=True)
class Recording:
    """A function with memory of its own for what goes in and what comes out."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    replay: Callable[[], None]

    @staticmethod
    def of(record: Recorder, like: Sequence[Tensor], function: Callable[[list[Tensor]], list[Tensor]]) -> "Recording":
        """Record a function of tensors that look like these. Raises RuntimeError if it cannot be recorded."""
        inputs = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in like]
        for place, each in zip(inputs, like, strict=True):
            place.copy_(each)  # what runs before the recording must see sound numbers
        outputs, replay = record(lambda: function(inputs))
        return Recording(inputs, outputs, replay)

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for these values, which stay so until the next run."""
        for place, each in zip(self.inputs, values, strict=True):
            place.copy_(each)
        self.replay()
        return self.outputs


class Recordings:
    """The recordings of a plan; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Recording] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Recording]) -> Recording:
        """The one of this key, made if there is none."""
        if key not in self._known:
            self._known[key] = make()
            if len(self._known) > MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
