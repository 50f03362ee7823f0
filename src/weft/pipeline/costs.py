"""From recordings of a few steps to the costs that a forecast is made of.

    Recorder (times)  --- median per stage and kind ---> StageCost.forward, .backward, .recompute
    Sizes    (bytes)  --- one lifetime each ----------> StageCost.saved_bytes, .recomputed_bytes, ValueCost

Times and sizes want steps of their own: looking at every tensor that autograd saves would slow down the clock.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from torch import Tensor

from weft.core.errors import UsageError
from weft.core.pytree import flatten
from weft.pipeline.routing import Address
from weft.pipeline.schedule import Action, Schedule
from weft.pipeline.simulate import Forecast, StageCost, ValueCost, forecast
from weft.pipeline.tracing import Recorder, seeing_saved

Storages = dict[int, int]
"""Bytes of storages by address; an address means one storage as long as it is alive."""


@dataclass
class _Sent:
    """One storage on its way: who reads it, and whether the graph of its source holds it too."""

    bytes: int
    kept: bool
    readers: set[int] = field(default_factory=set[int])


class Sizes:
    """Watches one step and notes what every micro-batch keeps and sends; give it to `Pipe.watched_by`.

    `ignore` are tensors that live anyway: parameters, buffers, the mini-batch and its target. Storages are told
    apart by their address, which is compared only while they are alive.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> sizes = weft.pipeline.Sizes(ignore=pipe.parameters())
        >>> with pipe.watched_by(sizes):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> sizes.saved_bytes(1)  # of one micro-batch: the output of Tanh, 2 x 2 numbers of 4 bytes
        16
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignore}
        self._lock = threading.Lock()
        self._graphs: dict[tuple[int, int], Storages] = {}
        self._again: dict[tuple[int, int], Storages] = {}  # the graphs that were made by recomputation
        self._received: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._sent: dict[tuple[int, int], dict[int, _Sent]] = defaultdict(dict)

    @contextmanager
    def doing(self, kind: str, action: Action) -> Generator[None]:
        """See `weft.pipeline.step.Watcher`."""
        if kind not in "FR":
            yield
            return
        at = action.stage, action.micro_batch
        saved: Storages = {}
        graphs = self._again if kind == "R" else self._graphs
        with self._lock:
            graphs[at] = saved

        with seeing_saved(lambda tensor: saved.update(self._storages(tensor))):
            yield
        with self._lock:
            graphs[at] = {key: size for key, size in saved.items() if key not in self._received[at]}

    def sent(self, source: int, address: Address, micro_batch: int, value: Any) -> None:
        """See `weft.pipeline.step.Watcher`. The graph that the value came out of is made, and still there."""
        if address.reader < 0:
            return
        storages = self._storages(value)
        with self._lock:
            graph, sent = self._graphs[source, address.micro_batch], self._sent[source, address.micro_batch]
            for key, size in storages.items():
                kept = graph.pop(key, None) is not None  # from now on it counts as a value
                sent.setdefault(key, _Sent(size, kept)).readers.add(address.reader)
            self._received[address.reader, micro_batch].update(storages)

    def released(self, action: Action) -> None:
        """See `weft.pipeline.step.Watcher`. Sizes are no matter of time."""

    def saved_bytes(self, stage: int) -> int:
        """What a graph that is kept from F on holds beyond the values that the stage reads and sends, on average."""
        return _mean([graph for at, graph in self._graphs.items() if at[0] == stage and at not in self._again])

    def recomputed_bytes(self, stage: int) -> int | None:
        """What a graph that is made again holds beyond the values that the stage reads, on average, if any is."""
        found = [graph for at, graph in self._again.items() if at[0] == stage]
        return _mean(found) if found else None

    def values(self) -> list[ValueCost]:
        """What crosses the cuts, by source and readers, with the bytes of a micro-batch on average.

        A tensor that goes out twice, as main path and as skip, is one value. What the graph of its source keeps
        is learned from the micro-batches that are not recomputed; where all are, nothing is kept.
        """
        total: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        held: dict[tuple[int, tuple[int, ...], bool], int] = defaultdict(int)
        for at, sent in self._sent.items():
            for each in sent.values():
                place = at[0], tuple(sorted(each.readers))
                total[place] += each.bytes
                if at not in self._again:
                    held[*place, each.kept] += each.bytes
        counts = Counter(source for source, _ in self._sent)
        return [
            ValueCost(*place, size, kept)
            for place, whole in sorted(total.items())
            for kept in (False, True)
            if (size := round(whole / counts[place[0]] * _share(held[*place, kept], held[*place, not kept], kept)))
        ]

    def _storages(self, value: Any) -> Storages:
        storages = [leaf.untyped_storage() for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
        return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() and s.data_ptr() not in self._ignored}


def _mean(graphs: Iterable[Storages]) -> int:
    """Bytes of a graph on average; 0 for none."""
    found = [sum(graph.values()) for graph in graphs]
    return round(mean(found)) if found else 0


def _share(one: int, other: int, kept: bool) -> float:
    """The share of `one` kind in both. Where nothing is known nothing is kept."""
    return one / (one + other) if one + other else float(not kept)


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs on each stage, and what crosses the cuts.

    Example:
        >>> from weft.pipeline.simulate import StageCost
        >>> costs = weft.pipeline.Costs([StageCost(forward=1.0, backward=2.0)] * 2)
        >>> costs.forecast(weft.pipeline.gpipe(2, 4)).total  # seconds: 4 micro-batches, and one to fill and drain
        15.0
    """

    stages: list[StageCost]
    values: list[ValueCost] = field(default_factory=list[ValueCost])
    recomputed: frozenset[tuple[int, int]] = frozenset()
    """Which (stage, micro-batch) ran their forward twice."""

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Whether this forward ran twice."""
        return (stage, micro_batch) in self.recomputed

    def forecast(self, schedule: Schedule) -> Forecast:
        """The forecast of a schedule at these costs, with the same recomputations."""
        return forecast(schedule, self.stages, self.values, checkpointed=self.recomputes)


def costs_from(recorders: Sequence[Recorder], sizes: Sizes | None = None) -> Costs:
    """The costs behind some recorded steps of one pipe: the median time of each kind per stage.

    Give a recorder per step, after some to warm up. I and W together count as B. Without `sizes` bytes are 0.
    Bytes are those of an average micro-batch; graphs that are kept and graphs that are made again are averaged apart.
    Raises UsageError when nothing was recorded.

    Example:
        >>> pipe = weft.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), chunks=2, devices=["cpu", "cpu"])
        >>> recorder = weft.Recorder()
        >>> with pipe.watched_by(recorder):
        ...     pipe(torch.randn(4, 2)).sum().backward()
        >>> weft.pipeline.costs_from([recorder]).forecast(weft.pipeline.gpipe(2, 8)).total > 0
        True
    """
    events = [event for recorder in recorders for event in recorder.events]
    if not events:
        raise UsageError("costs come from recorded steps, but these recorders saw no event; run steps under them")
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        times[event.action.stage, event.kind].append(event.end - event.start)
    typical = {at: median(found) for at, found in times.items()}
    stages = [
        StageCost(
            forward=typical.get((stage, "F"), 0.0),
            backward=sum(typical.get((stage, kind), 0.0) for kind in "BIW"),
            recompute=typical.get((stage, "R"), 0.0),
            saved_bytes=sizes.saved_bytes(stage) if sizes is not None else 0,
            recomputed_bytes=sizes.recomputed_bytes(stage) if sizes is not None else None,
        )
        for stage in range(1 + max(stage for stage, _ in times))
    ]
    again = frozenset((e.action.stage, e.action.micro_batch) for e in events if e.kind == "R")
    return Costs(stages, sizes.values() if sizes is not None else [], again)
