"""Side effects of a module: the changes of a run besides its outputs, and how they are undone.

    forward:   snapshot ── forward ── restore                           no consequences
    backward:  snapshot ── forward ── backward ── guards ── step        all changes stay
                   +────────── restore <── any of them fails            none stays

A failed batch can therefore run again in parts. Copying all tensors of a module for every batch would be simple, but as
slow as a step. So only those that were seen to change are copied. A tensor that the dummy run did not change and a
later batch does is known from then on, and not restored once.

    forward   of key k ── seed of k ──> mask          the gradient belongs to the forward that the client saw, if both
    backward  of key k ── seed of k ──> same mask     ran as the same batch: so tasks of a drawing module run alone

A module that draws random numbers (dropout) gets its own for every batch, by a seed; see `weft.core.rng`. Whether it
draws is observed in the dummy run, in the first batch and backward, and again whenever a number or a flag of a layer
has changed. A module that draws only for some inputs is not detected, and its backward can draw another mask.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.rng import RandomUse, RngStreams, call_with_seed, derive_seed, generators_of
from torchweft.experts.task import REPEATED, Task

_CONFIGURATIONS = 64

# A place in a module that holds a parameter or a buffer: its table, and its name there.
_Slot = tuple[dict[str, Any], str]


class TensorSnapshot:
    """Copies of the tensors in some slots of a module, by the numbers of these slots."""

    def __init__(self, slots: Iterable[tuple[int, _Slot]]) -> None:
        tensors = [(slot, table, name, table.get(name)) for slot, (table, name) in slots]
        self._held = [(slot, table, name, x, x.detach().clone()) for slot, table, name, x in tensors if x is not None]

    def restore(self) -> None:
        # Slot and values both: a module can have replaced the tensor or written to it.
        with torch.no_grad():
            for _, table, name, tensor, copy in self._held:
                table[name] = tensor
                tensor.copy_(copy)

    @property
    def copies(self) -> dict[tuple[int, str], Tensor]:
        return {(slot, name): copy for slot, _, name, _, copy in self._held}

    def changed_slots(self) -> list[int]:
        # Compared by value, because batch norm writes its statistics without incrementing their versions.
        held = self._held
        return [slot for slot, table, name, x, copy in held if table.get(name) is not x or not torch.equal(x, copy)]


class SideEffects:
    """Knowledge about one module. Its list of layers must not change any more. Guarded by the expert's lock."""

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self.seed, self.device = seed, device
        self.writes: set[int] = set()  # inputs into which the module writes
        layers = self._modules = list(module.modules())
        self._parameter_slots: list[_Slot] = [(one._parameters, name) for one in layers for name in one._parameters]
        self._slots = [*self._parameter_slots, *((layer._buffers, name) for layer in layers for name in layer._buffers)]
        self._changing: set[int] = set()
        # Batch norm can be put into training mode later, and its writes do not increment versions.
        self._norms = [
            (layer, [slot for slot, (table, _) in enumerate(self._slots) if table is layer._buffers])
            for layer in self._modules
            if isinstance(layer, nn.modules.batchnorm._NormBase)
        ]
        self._attributes = [  # numbers and flags of layers, `training` among them
            (table, name)
            for table in map(vars, self._modules)
            for name, value in table.items()
            if isinstance(value, bool | float) and not name.startswith("_")
        ]
        self._forward_use, self._backward_use = (RandomUse(generators_of([device])) for _ in range(2))
        self._evaluation = False
        self.draws = {False: False, True: False}  # by evaluation: whether the module was seen to draw

    @property
    def stateful(self) -> bool:
        # Whether a forward was seen to change the module's own tensors.
        return bool(self._changing_slots())

    def change_seed(self, seed: int) -> None:
        self.seed = seed

    def rehearse(self, inputs: Sequence[Tensor], forward: Callable[[], Any]) -> Any:
        """Run a forward for the first time, observe its side effects, and undo them."""
        # If the module draws, its seed is one number of the caller's generator.
        snapshot = TensorSnapshot(enumerate(self._slots))
        versions, before = [tensor._version for tensor in inputs], self._slot_versions()
        streams = RngStreams({0: self._forward_use}, {0: self._configuration()})
        self.seed = streams.seed or self.seed
        try:
            with streams.scope(0, 0):
                outputs = forward()
        finally:
            # By versions as well as by value: the dummy run is on zeros, and can write the same values again.
            written = [slot for slot, state in enumerate(self._slot_versions()) if state != before[slot]]
            changed = snapshot.changed_slots()
            if changed:
                snapshot.restore()
            self._changing.update(written, changed)
        streams.commit_draws()
        self._note_draws()
        # Drawing is certain. Not drawing is not, because a layer can skip it on zeros: observe the first batch too.
        self._forward_use.draws = {seen: True for seen, draws in self._forward_use.draws.items() if draws}
        self.writes |= {i for i, tensor in enumerate(inputs) if tensor._version != versions[i]}
        return outputs

    def parameters(self) -> list[nn.Parameter]:
        # Ten times as fast as ``module.parameters()``. Each once, because layers can share a parameter.
        tensors = [table.get(name) for table, name in self._parameter_slots]
        return list(dict.fromkeys([tensor for tensor in tensors if tensor is not None]))

    def storage_addresses(self) -> set[int]:
        tensors = [table.get(name) for table, name in self._slots]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}

    def take_snapshot(self) -> TensorSnapshot | None:
        """A snapshot that undoes a forward, or None for a module that changes nothing, like most."""
        slots = self._changing_slots()
        return TensorSnapshot([(slot, self._slots[slot]) for slot in sorted(slots)]) if slots else None

    def batch_seed(self, direction: int, count: int, tasks: Sequence[Task]) -> int:
        """The seed of one batch: of its keys if it can draw and all its tasks have one, else of its number."""
        seen = self._configuration()
        draws = self._forward_use.draws.get(seen) is not False or self._backward_use.draws.get(seen) is not False
        if not draws or any([task.key is None for task in tasks]):
            return derive_seed(self.seed, direction, count)
        # Independent of the direction: the same tasks in the same order get the same seed in forward and backward.
        names = [f"{task.client}\0{str(task.key).partition(REPEATED)[0]}\0{task.rows}" for task in tasks]
        digest = blake2b("\0".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return derive_seed(self.seed, 2, int.from_bytes(digest, "little"))

    @contextmanager
    def evaluation_mode(self) -> Generator[None]:
        # Only layers in training mode are switched, and directly: ``train()`` afterwards would also switch layers that
        # the user has frozen, and can be overridden.
        training = [layer for layer in self._modules if layer.training]
        for layer in training:
            layer.training = False
        self._evaluation = True
        try:
            yield
        finally:
            self._evaluation = False
            for layer in training:
                layer.training = True

    def run_forward(self, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, a forward with random numbers of this seed. Notes which tensors it changes."""
        before = self._slot_versions()
        try:
            return self._run_seeded(self._forward_use, seed, function, *args)
        finally:
            after = self._slot_versions()
            if after != before:
                self._changing.update(slot for slot in range(len(after)) if after[slot] != before[slot])

    def run_backward(self, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, a backward. Hooks can draw too, so it gets random numbers like a forward."""
        return self._run_seeded(self._backward_use, seed, function, *args)

    def _run_seeded(self, use: RandomUse, seed: int, function: Callable[..., Any], *args: Any) -> Any:
        seen = self._configuration()
        if use.draws.get(seen) is False:
            return function(*args)
        if len(use.draws) > _CONFIGURATIONS:  # a number of a layer changes all the time
            use.draws.clear()
        seed = derive_seed(seed, 1) if use is self._backward_use else seed
        outputs, drew = call_with_seed(use.sources, derive_seed(seed, 0, 0), function, *args)
        use.draws[seen] = use.draws.get(seen, False) or drew
        self._note_draws()
        return outputs

    def _note_draws(self) -> None:
        seen = self._configuration()
        self.draws[self._evaluation] = bool(self._forward_use.draws.get(seen) or self._backward_use.draws.get(seen))

    def _changing_slots(self) -> set[int]:
        return self._changing.union(*(slots for norm, slots in self._norms if norm.training))

    def _configuration(self) -> tuple[Any, ...]:
        return tuple([table.get(name) for table, name in self._attributes])

    def _slot_versions(self) -> list[tuple[int, int]]:
        tensors = [table.get(name) for table, name in self._slots]
        return [(0, 0) if tensor is None else (id(tensor), tensor._version) for tensor in tensors]
