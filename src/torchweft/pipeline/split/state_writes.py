"""Writes of forward() to state between blocks that depend on no row, such as a counter or the factor of a ramp.

    scale = self.decay ** self.step     read:   the stages get a copy of it, made at this call
    self.step += 1                      write:  runs in forward() itself, once per step of training
    x = self.block(x) * scale

State is a parameter or a buffer of the model. The undivided model writes it once per step, so the stages, which
run once per micro-batch, must not. They start later than the code before the tail, and a recomputation runs later
still. So a tensor that a stage reads before a write is copied when forward() reads it.

A write that depends on rows, such as that of running statistics, stays in the stages and runs once per micro-batch.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from torchweft.core.errors import InPlaceError
from torchweft.pipeline.split.recording import Instruction, RecordedValue

# Copies of argument leaves, by the number of the step and the index of the leaf.
Captured = dict[int, dict[int, Tensor]]


class StateWrites:
    """The writes of a recording to state. `tail` are the steps of the tail, `is_of_state` says whether a step depends
    on no row, and `needed` finds some steps and all that they depend on.

    Raises InPlaceError for state that cannot have the numbers of the undivided model.
    """

    def __init__(
        self,
        steps: Sequence[Instruction],
        tail: Collection[int],
        is_of_state: Callable[[int], bool],
        needed: Callable[[Iterable[int]], set[int]],
    ) -> None:
        self._steps, self._tail, self._is_of_state, self._needed = steps, tail, is_of_state, needed
        self.steps: set[int] = set()  # writes that run in forward()
        self.before: set[int] = set()  # other steps that run there too, because these writes need them
        self.state: list[RecordedValue] = []  # the state that they write to
        self.captured: dict[int, list[int]] = {}  # the leaves of each step that the stages get as copies
        self._held: dict[int, RecordedValue] = {}  # one value by its storage
        for step in steps:
            for value in step.reads.values():
                if value.kind in ("own", "const") and value.storage is not None:
                    self._held.setdefault(value.storage, value)
        writers: dict[int, list[int]] = {}
        for k, step in enumerate(steps):
            for storage in step.stored & self._held.keys():
                writers.setdefault(storage, []).append(k)
        by_rows = self._find_written_by_rows(writers)
        late: set[int] = set()
        for storage, of_storage in writers.items():
            own = [k for k in of_storage if k not in tail]
            if own and self._held[storage].kind == "const":
                raise InPlaceError(
                    f"{steps[own[0]]} writes into a tensor of shape {tuple(self._held[storage].key.shape)} that is "
                    "neither made in forward() nor registered; register it with register_buffer(name, tensor), or "
                    "write to it in a submodule"
                )
            free = [k for k in own if self._is_free(k, by_rows)]
            if free and len(free) < len(own):
                other = next(k for k in own if k not in free)
                raise InPlaceError(
                    f"{steps[free[0]]} writes into {self._name(storage)} once per step of training, and {steps[other]} "
                    "once per micro-batch, because it depends on rows or draws random numbers; use two tensors, or "
                    "move both writes into one submodule"
                )
            self.steps.update(free)
            if free:
                self._check_blocks(storage, free)
            if (free or not own) and self._must_copy(storage, of_storage[-1]):
                late.add(storage)
        if self.steps:
            self.before = self._needed(self.steps) - self.steps
            self.state = [self._held[s] for s, of_storage in writers.items() if not self.steps.isdisjoint(of_storage)]
        self._capture(late)

    def _find_written_by_rows(self, writers: dict[int, list[int]]) -> set[int]:
        """The storages that a step of the stages writes to once per micro-batch."""
        found: set[int] = set()
        while True:
            more = {
                storage
                for storage, of_storage in writers.items()
                if any(k not in self._tail and not self._is_free(k, found) for k in of_storage)
            }
            if more == found:
                return found
            found = more

    def _is_free(self, k: int, by_rows: set[int]) -> bool:
        """Whether a write has the same effect for any micro-batch and for all rows."""
        step = self._steps[k]
        if not all(leaf in step.reads for leaf in step.writes) or not self._is_of_state(k):
            return False
        needed = [self._steps[j] for j in self._needed([k])]
        return all(
            step.module is None and not step.draws and storages_of(step).isdisjoint(by_rows - self._steps[k].stored)
            for step in needed
        )

    def _check_blocks(self, storage: int, free: Collection[int]) -> None:
        """Raise InPlaceError if a block reads state before a write to it. A block has the tensor itself, not a copy."""
        value = self._held[storage]
        for k, step in enumerate(self._steps):
            inside = step.module is not None and value.key.startswith(f"{step.name}.")
            if inside and k not in self._tail and k < max(free):
                raise InPlaceError(
                    f"{self._steps[max(free)]} writes into {self._name(storage)} after block {step.name!r} has used "
                    "it, so micro-batches that run later would see the new numbers; write before the block, or in it"
                )

    def _must_copy(self, storage: int, last_write: int) -> bool:
        """Whether a stage would find other numbers in the tensor than forward() has at the call."""
        readers = [k for k, step in enumerate(self._steps) if k not in self._tail and storage in storages_of(step)]
        readers = [k for k in readers if k not in self.steps]
        return bool(readers) and readers[0] < last_write

    def _capture(self, late: Collection[int]) -> None:
        for k, step in enumerate(self._steps if late else ()):
            leaves = [leaf for leaf, value in step.reads.items() if value.storage in late]
            if not leaves or k in self._tail or k in self.steps:
                continue
            self.captured[k] = leaves
            # A view must be there when it is copied.
            self.before |= self._needed(step.reads[leaf].step for leaf in leaves if step.reads[leaf].kind == "made")

    def _name(self, storage: int) -> str:
        return repr(self._held[storage].key)


def storages_of(step: Instruction) -> set[int | None]:
    """The storages of the tensors that a step reads."""
    return {value.storage for value in step.reads.values()}
