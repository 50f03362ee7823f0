"""Timing on a GPU: candidates that do the same work, in turn, and CUDA graphs of such work."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

Work = Callable[[], object]
ROUNDS, WARM_UP = 15, 3


def synchronize(place: str) -> None:
    """Wait for all work on the GPU."""
    if place != "cpu":
        torch.cuda.synchronize(place)


def race(candidates: Mapping[str, Work], place: str, seconds: float) -> dict[str, float]:
    """Median seconds per call of each candidate, over at most `ROUNDS` rounds that begin within `seconds`."""
    calls: dict[str, int] = {}
    for name, work in candidates.items():
        for _ in range(WARM_UP):
            work()
        synchronize(place)
        begun = time.perf_counter()
        work()
        synchronize(place)
        calls[name] = max(1, min(200, round(0.02 / (time.perf_counter() - begun))))
    end = time.perf_counter() + seconds
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for _ in range(ROUNDS):
        for name in order:
            synchronize(place)
            begun = time.perf_counter()
            for _ in range(calls[name]):
                candidates[name]()
            synchronize(place)
            samples[name].append((time.perf_counter() - begun) / calls[name])
        order = [*order[1:], order[0]]
        if time.perf_counter() > end:
            break
    return {name: median(times) for name, times in samples.items()}


def recorded(work: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """Record forward and backward as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()

    def replay() -> Sequence[Tensor]:
        graph.replay()
        return results

    return replay
