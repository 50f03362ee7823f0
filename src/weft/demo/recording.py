"""What the report draws: some steps of each way to run the same model, recorded."""

import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from weft.core.events import Event, Recorder
from weft.core.forecast import Forecast
from weft.core.run import Watcher
from weft.pipeline.pipe import Pipe
from weft.report import Sizes, costs_from, live_bytes

_WARM_UP, _RECORDED, _COUNTED = 3, 9, 3


class Way(NamedTuple):
    """A way to run the model, with the name that the report gives it."""

    name: str
    schedule: str
    checkpoint: Literal["never", "always"]


WAYS = (Way("gpipe", "gpipe", "never"), Way("1f1b", "1f1b", "never"), Way("gpipe, recomputed", "gpipe", "always"))


@dataclass(frozen=True)
class Recording:
    """The quickest of some steps, since a busy machine only ever adds time; the forecast from the medians of all;
    and the live bytes of the quickest of some more."""

    events: list[Event]
    forecast: Forecast
    live: list[tuple[float, int]]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """How long the quickest step took, from its first event to its last."""
        return length(self.events)


def record(
    model: nn.Sequential, way: Way, balance: tuple[int, ...], chunks: int, batch: tuple[Tensor, Tensor]
) -> Recording:
    """Run some steps on a copy of the model with mean squared error, one thread per stage, and record them."""
    pipe = Pipe(
        copy.deepcopy(model),
        chunks=chunks,
        balance=balance,
        devices=["cpu"] * len(balance),
        schedule=way.schedule,
        checkpoint=way.checkpoint,
        loss=nn.functional.mse_loss,
        executor="threads",
    )
    timed = [Recorder() for _ in range(_WARM_UP + _RECORDED)]
    for recorder in timed:
        _step(pipe, batch, recorder)
    known = [*pipe.parameters(), *pipe.buffers(), *batch]
    sizes = Sizes(known)
    _step(pipe, batch, sizes)
    counted = [Recorder(memory=True) for _ in range(_COUNTED)]
    for recorder in counted:
        recorder.ignore(known)
        _step(pipe, batch, recorder)
    memory = min(counted, key=lambda recorder: length(recorder.events))
    costs = costs_from(timed[_WARM_UP:], sizes)
    quickest = min((each.events for each in timed[_WARM_UP:]), key=length)
    forecast = costs.forecast(pipe.schedule_for(len(batch[0])))
    return Recording(quickest, forecast, live_bytes(memory), memory.peak_bytes)


def length(events: list[Event]) -> float:
    """Seconds from the first event to the end of the last."""
    return max(event.end for event in events) - min(event.start for event in events)


def _step(pipe: Pipe, batch: tuple[Tensor, Tensor], watcher: Watcher) -> None:
    pipe.zero_grad()
    with pipe.watched_by(watcher):
        pipe(batch[0], target=batch[1]).backward()
