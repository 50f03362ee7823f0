"""Recordings of launches on a GPU: work that the host launches once, and a CUDA graph repeats.

    run(key, work, read, written)    first time:  work on copies, recorded
                                     then:        copy `read` in, replay, copy `written` out

A kernel of a small step runs for microseconds, about as long as the host takes to launch it. So all launches of a chunk
of steps are one recording. A recording has memory of its own. Tensors hold all steps of a chunk, so that a few copies
suffice: a tensor per step would cost the host more than the step itself.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweft.core.recording import RECORDING, capture, recording_stream
from torchweft.core.segment import can_have_gradient
from torchweft.core.torch_internals import foreach_copy
from torchweft.recurrent.verify import difference

# Tensors by their role. None stands for a tensor that this call does not have.
Tables = Mapping[str, Sequence[Tensor | None]]
Work = Callable[[Tables, Tables], None]
# Records a function. Returns a function that repeats it.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]
MAX_RECORDINGS = 16  # Each has memory of its own. The oldest is dropped first.


def cuda_recorder(function: Callable[[], None]) -> Callable[[], None]:
    """Record on the current stream. Raises RuntimeError if the function cannot be recorded."""
    # Compilation and the creation of library handles happen in the first runs. They cannot be recorded.
    function()
    function()
    return capture(function)


@dataclass(frozen=True)
class _Recording:
    read: Tables
    written: Tables
    replay: Callable[[], None]


class Recordings:
    """The recordings of one plan. Without a recorder, or once recording has failed, work runs directly."""

    def __init__(self, record: Recorder | None) -> None:
        self.record = record
        self.why_not = ""
        self._recordings: dict[Hashable, _Recording] = {}

    def run(self, key: Hashable, work: Work, read: Tables, written: Tables) -> None:
        """Let `work` read the tensors of `read`, and write those of `written`."""
        if self.record is None:
            work(read, written)
            return
        device = next(iter(_tensors(read))).device
        form = key, *(tuple((name, *(t is None for t in some)) for name, some in t.items()) for t in (read, written))
        with RECORDING, recording_stream(device):
            recording = self._find(form, work, read, written)
            if recording is not None:
                foreach_copy(_tensors(recording.read), _tensors(read))
                recording.replay()
                foreach_copy(_tensors(written), _tensors(recording.written))
                return
        work(read, written)

    def _find(self, key: Hashable, work: Work, read: Tables, written: Tables) -> _Recording | None:
        found = self._recordings.get(key)
        if found is not None or self.record is None:
            return found
        own_read, own_written = _copied(read, torch.clone), _copied(written, torch.empty_like)
        try:
            replay = self.record(lambda: work(own_read, own_written))
            recording = _Recording(own_read, own_written, replay)
            _check(recording, work)
        except RuntimeError as error:
            self.record, self.why_not = None, f"it could not be recorded: {error}"
            return None
        if len(self._recordings) == MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        return self._recordings.setdefault(key, recording)


def _check(recording: _Recording, work: Work) -> None:
    """Replay with other values. Raises RuntimeError if the results are stale, or differ from those of the work."""
    values = _copied(recording.read, lambda t: t * 0.5 + 0.25 if can_have_gradient(t) else t.clone())
    expected = _copied(recording.written, torch.empty_like)
    work(values, expected)
    results = _tensors(recording.written)
    for result in results:  # an empty replay would leave these
        result.fill_(float("nan") if can_have_gradient(result) else 1)
    foreach_copy(_tensors(recording.read), _tensors(values))
    recording.replay()
    for reference, result in zip(_tensors(expected), results, strict=True):
        if fault := difference("a value of its replay", reference, result):
            raise RuntimeError(fault)


def _tensors(tables: Tables) -> list[Tensor]:
    return [tensor for some in tables.values() for tensor in some if tensor is not None]


def _copied(tables: Tables, copy: Callable[[Tensor], Tensor]) -> Tables:
    return {name: [None if t is None else copy(t) for t in some] for name, some in tables.items()}
