"""Side effects of a module: what running it changes besides its outputs, and how that is undone.

    forward:   snapshot ── forward ── restore                           leaves no trace
    backward:  snapshot ── forward ── backward ── guards ── step        everything stays
                   +────────── restore <── any of them fails            nothing stays

So a batch that fails can run again in parts, and a log of the backward batches is enough to replay them. Of a module's
own tensors only those that were seen to change are copied; one that the dummy run left alone and that a later batch
writes to is known from then on, but not restored that once.

    forward   of key k ── seed of k ──> mask          the gradient is that of the forward that was seen, if both
    backward  of key k ── seed of k ──> same mask     ran as the same batch: so tasks of a module that draws run alone

A module that draws random numbers (dropout) gets its own for every batch, by a seed; see `weft.core.rng`. Whether it
draws is observed in the dummy run, in the first batch and backward, and again whenever a number or a flag of a layer
has changed. One that draws for some inputs only is not noticed: its log does not lead to the same bytes.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.rng import RandomUse, RngStreams, drawn, generators, mix
from weft.experts.task import REPEATED, Task

_CONFIGURATIONS = 64

_Slot = tuple[dict[str, Any], str]
"""A place in a module that holds a parameter or a buffer: its table, and its name there."""


class TensorSnapshot:
    """Copies of the tensors in some slots of a module, by the numbers of these slots."""

    def __init__(self, slots: Iterable[tuple[int, _Slot]]) -> None:
        tensors = [(slot, table, name, table.get(name)) for slot, (table, name) in slots]
        self._held = [(slot, table, name, x, x.detach().clone()) for slot, table, name, x in tensors if x is not None]

    def restore(self) -> None:
        """Every tensor back in its place with its bytes."""
        with torch.no_grad():
            for _, table, name, tensor, copy in self._held:
                table[name] = tensor
                tensor.copy_(copy)

    @property
    def copies(self) -> dict[tuple[int, str], Tensor]:
        """What is held, by its slot and its name there."""
        return {(slot, name): copy for slot, _, name, _, copy in self._held}

    def changed(self) -> list[int]:
        """The slots that are not as they were. Versions would not tell: batch norm writes without counting."""
        held = self._held
        return [slot for slot, table, name, x, copy in held if table.get(name) is not x or not torch.equal(x, copy)]


class SideEffects:
    """What is known of one module. Its list of layers must not change any more."""

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self.seed = seed
        self.device = device
        self.writes: set[int] = set()
        self._modules = list(module.modules())
        self._own: list[_Slot] = [(each._parameters, name) for each in self._modules for name in each._parameters]
        self._slots = [*self._own, *((each._buffers, name) for each in self._modules for name in each._buffers)]
        self._changing: set[int] = set()
        self._norms = [  # they may be put into training mode later, and do not count what they write
            (each, [i for i, (table, _) in enumerate(self._slots) if table is each._buffers])
            for each in self._modules
            if isinstance(each, nn.modules.batchnorm._NormBase)
        ]
        self._attributes = [  # also `training`
            (table, name)
            for table in map(vars, self._modules)
            for name, value in table.items()
            if isinstance(value, bool | float) and not name.startswith("_")
        ]
        self._use, self._back = (RandomUse(generators([device])) for _ in range(2))
        self._evaluation = False
        self.draws = {False: False, True: False}  # whether the module draws, by evaluation, as far as was seen

    @property
    def stateful(self) -> bool:
        """Whether a forward was seen to change the module's own tensors."""
        return bool(self._places())

    def rehearse(self, inputs: Sequence[Tensor], forward: Callable[[], Any]) -> Any:
        """Run a forward for the first time, see what it changes, and undo that.

        If the module draws, its seed is one number of the caller's generator.
        """
        every = TensorSnapshot(enumerate(self._slots))
        versions, state = [tensor._version for tensor in inputs], self._state()
        dice = RngStreams({0: self._use}, {0: self._configuration()})
        self.seed = dice.seed or self.seed
        try:
            with dice.scope(0, 0):
                found = forward()
        finally:
            written = [i for i, pair in enumerate(self._state()) if pair != state[i]]  # also where it wrote the same
            changed = every.changed()
            if changed:
                every.restore()
            self._changing.update(written, changed)
        dice.settle()
        self._note()
        self._use.draws = {seen: True for seen, draws in self._use.draws.items() if draws}  # zeros are no sure sign
        self.writes |= {i for i, tensor in enumerate(inputs) if tensor._version != versions[i]}
        return found

    def parameters(self) -> list[nn.Parameter]:
        """All of the module's, each once, in its order; ten times as fast as asking the module."""
        tensors = [table.get(name) for table, name in self._own]
        return list(dict.fromkeys([tensor for tensor in tensors if tensor is not None]))

    def storages(self) -> set[int]:
        """The addresses of the module's own tensors."""
        tensors = [table.get(name) for table, name in self._slots]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}

    def snapshot(self) -> TensorSnapshot | None:
        """What undoes a forward; None of a module that changes nothing, as most."""
        places = self._places()
        return TensorSnapshot([(place, self._slots[place]) for place in sorted(places)]) if places else None

    def seed_for(self, direction: int, count: int, tasks: Sequence[Task]) -> int:
        """The seed of one batch: of its keys, if it may draw and all its tasks have one; else of its number."""
        seen = self._configuration()
        draws = self._use.draws.get(seen) is not False or self._back.draws.get(seen) is not False
        if not draws or any([task.key is None for task in tasks]):
            return mix(self.seed, direction, count)
        # The same number in forward and backward, for the same tasks in this order.
        names = [f"{task.client}\0{str(task.key).partition(REPEATED)[0]}\0{task.rows}" for task in tasks]
        digest = blake2b("\0".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return mix(self.seed, 2, int.from_bytes(digest, "little"))

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """Surrounds the work on a batch in evaluation. The flags are set directly, without calling ``eval()``."""
        training = [each for each in self._modules if each.training]
        for each in training:
            each.training = False
        self._evaluation = True
        try:
            yield
        finally:
            self._evaluation = False
            for each in training:
                each.training = True

    def run(self, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, a forward with random numbers of this seed; notes which of its tensors change."""
        before = self._state()
        try:
            return self._drawn(self._use, seed, function, *args)
        finally:
            after = self._state()
            if after != before:
                self._changing.update(i for i in range(len(after)) if after[i] != before[i])

    def walk(self, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which is a backward. Random numbers, which hooks may draw, as those of `run`."""
        return self._drawn(self._back, seed, function, *args)

    def _drawn(self, use: RandomUse, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        seen = self._configuration()
        if use.draws.get(seen) is False:
            return function(*args)
        if len(use.draws) > _CONFIGURATIONS:  # a number that changes all the time
            use.draws.clear()
        seed = mix(seed, 1) if use is self._back else seed
        found, drew = drawn(use.sources, mix(seed, 0, 0), function, *args)
        use.draws[seen] = use.draws.get(seen, False) or drew
        self._note()
        return found

    def _note(self) -> None:
        seen = self._configuration()
        self.draws[self._evaluation] = bool(self._use.draws.get(seen) or self._back.draws.get(seen))

    def _places(self) -> set[int]:
        """The slots that a forward may write to, as far as is known now."""
        return self._changing.union(*(places for norm, places in self._norms if norm.training))

    def _configuration(self) -> tuple[Any, ...]:
        """What decides whether layers draw, as far as it is seen from outside."""
        return tuple([table.get(name) for table, name in self._attributes])

    def _state(self) -> list[tuple[int, int]]:
        """Which tensor is in every slot, and how often it was written to."""
        tensors = [table.get(name) for table, name in self._slots]
        return [(0, 0) if tensor is None else (id(tensor), tensor._version) for tensor in tensors]
