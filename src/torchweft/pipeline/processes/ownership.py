"""Ownership: which rank has which parameter and buffer of a pipe over processes.

Every rank has the whole tree of modules, but only its own tensors. The slots of the others hold None, so PyTorch's own
`parameters()`, `state_dict()`, optimizers and DistributedDataParallel see the local tensors under the model's own keys.
A smaller tree per rank would have other keys. A wrapper around each parameter would need support everywhere.
For each hidden tensor there is a placeholder with its shape, dtype and ties.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple, cast

from torch import Tensor, nn

from torchweft.core.errors import SpecError, join_faults
from torchweft.pipeline.processes.loans import Loan, Loans, Place
from torchweft.pipeline.weights import Slot, tables_of, typed_like

Layers = Sequence[Sequence[tuple[str, nn.Module]]]  # the modules of every stage, by name


class Use(NamedTuple):
    stage: int
    name: str
    module: nn.Module
    slot: Slot
    tensor: Tensor


def find_uses(layers: Layers) -> Iterator[Use]:
    for stage, of_stage in enumerate(layers):
        for name, layer in of_stage:
            for path, module in cast("Iterable[tuple[str, nn.Module]]", layer.named_modules(prefix=name)):
                for table in tables_of(module):
                    for key, tensor in table.items():
                        if tensor is not None:
                            yield Use(stage, f"{path}.{key}".removeprefix("."), module, (table, key), tensor)


class HiddenTensors:
    """The tensors that other ranks have: their slots hold None, except inside of `placeholders`. `owners` gives the
    rank of each tensor, by its id(). `replace` makes the placeholder of a hidden tensor."""

    def __init__(
        self, uses: Iterable[Use], owners: Mapping[int, int], rank: int, replace: Callable[[Tensor], Tensor]
    ) -> None:
        # Keyed by slot, because several stages can use one module. Tied tensors have one placeholder.
        self._slots: dict[tuple[int, str], tuple[Slot, Tensor]] = {}
        placeholders: dict[int, Tensor] = {}
        for use in uses:
            if owners[id(use.tensor)] != rank:
                if id(use.tensor) not in placeholders:
                    placeholders[id(use.tensor)] = replace(use.tensor)
                self._slots[id(use.slot[0]), use.slot[1]] = use.slot, placeholders[id(use.tensor)]
        self._hide()

    def _hide(self) -> None:
        for (table, key), _ in self._slots.values():
            table[key] = None

    def keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        tables = {id(module._buffers) for module in modules}
        # A list, because entries are removed in the loop.
        for slot_id in [slot_id for slot_id in self._slots if slot_id[0] in tables]:
            (table, key), buffer = self._slots.pop(slot_id)
            # With split=, the placeholder of a buffer is the buffer itself. It stays when the others are hidden again.
            table[key] = buffer

    @contextmanager
    def placeholders(self, tensors: Mapping[int, Tensor] = MappingProxyType({})) -> Generator[None]:
        """Inside, the slots have their placeholders, or the tensors that are given for these, by their id()."""
        self._show(tensors)
        try:
            yield
        finally:
            self._hide()

    @contextmanager
    def hidden(self) -> Generator[None]:
        """Inside of `placeholders`: a context in which the slots hold None."""
        self._hide()
        try:
            yield
        finally:
            self._show()

    def _show(self, tensors: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        for (table, key), placeholder in self._slots.values():
            table[key] = tensors.get(id(placeholder), placeholder)


def placeholder_of(tensor: Tensor) -> Tensor:
    # A tensor that is on the meta device already stays the same object, so that its ties stay.
    return tensor if tensor.is_meta else typed_like(tensor, tensor.detach().to("meta"))


def plan_loans(
    uses: Iterable[Use],
    owners: Mapping[int, int],
    workers: Sequence[int],
    rank: int,
    layers: Sequence[tuple[str, nn.Module]],
) -> Loans:
    """The loans of all ranks, in an order that is the same on all of them, and the places of this rank for copies.
    `layers` are the whole model, by name."""
    names: dict[int, list[str]] = {}
    for prefix, layer in layers:
        for name, parameter in layer.named_parameters(prefix=prefix, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    # Slots of the model, because the code between blocks has tables of its own, which are filled at each scan.
    slots_of_model = {id(use.tensor): use.slot for use in reversed([*find_uses([layers])])}
    loans: list[Loan] = []
    # One loan per parameter and borrower, even if several modules or stages there use the parameter: the borrower sums
    # their gradients into one, as a single process does.
    numbers: dict[tuple[int, int], int] = {}
    places: dict[int, list[tuple[int, Place]]] = {}
    for use in uses:
        owner, borrower = owners[id(use.tensor)], workers[use.stage]
        if owner == borrower or not isinstance(use.tensor, nn.Parameter):
            continue
        number = numbers.setdefault((id(use.tensor), borrower), len(loans))
        if number == len(loans):
            # The slot and not the parameter, because materialize() replaces parameters by new objects.
            key = id(use.tensor)
            lent = Place(slots_of_model[key], names[key]) if owner == rank else None
            loans.append(Loan(number, owner, borrower, lent, use.tensor.requires_grad, use.name))
        if borrower == rank:
            places.setdefault(use.stage, []).append((number, Place(use.slot, [use.name])))
    return Loans(loans, places, rank)


def reject_shared(uses: Iterable[tuple[int, str, int]], workers: Sequence[int], headline: str) -> None:
    """Raise SpecError that names each tensor which stages of several ranks use. A use is the id() of the tensor, the
    name of the tensor or of its module, and the stage."""
    names: dict[int, str] = {}
    ranks: dict[str, set[int]] = {}
    for tensor, name, stage in uses:
        ranks.setdefault(names.setdefault(tensor, name), set()).add(workers[stage])
    if shared := [f"{name}, on the ranks {sorted(of)}" for name, of in ranks.items() if len(of) > 1]:
        raise SpecError(join_faults(headline, shared))
