"""Ownership: which rank has which parameter and buffer of a pipe over processes.

Every rank has the whole tree of modules, but only its own tensors. The slots of the others hold None, so PyTorch's own
`parameters()`, `state_dict()`, optimizers and DistributedDataParallel see the local tensors under the model's own keys.
A placeholder on the meta device keeps shape, dtype and ties of each hidden tensor.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] # no public name

from weft.core.errors import SpecError, listed
from weft.pipeline.processes.loans import Loan, Slot

_TABLES = "_parameters", "_buffers"


class _Use(NamedTuple):
    """A slot of a module, by which a stage uses a tensor."""

    stage: int
    name: str
    module: nn.Module
    slot: Slot
    tensor: Tensor


def _uses(layers: Iterable[Iterable[tuple[str, nn.Module]]]) -> Iterator[_Use]:
    for stage, of_stage in enumerate(layers):
        for name, layer in of_stage:
            for path, module in layer.named_modules(prefix=name):
                for table in (getattr(module, each) for each in _TABLES):
                    for key, tensor in table.items():
                        if tensor is not None:
                            yield _Use(stage, f"{path}.{key}", module, (table, key), tensor)


class Ownership:
    """The tensors of this rank, those that are hidden, and the loans between ranks.

    `layers` are those of every stage, by name; `workers` gives the rank of each stage. A tensor belongs to the rank of
    the first stage that uses it. Buffers that stages of several ranks use stay on each of these ranks.

    Raises SpecError for a norm with running statistics that stages of several ranks share, because their statistics
    would drift apart.
    """

    def __init__(self, layers: Sequence[Sequence[tuple[str, nn.Module]]], workers: Sequence[int], rank: int) -> None:
        uses = list(_uses(layers))
        self.homes: dict[int, int] = {}
        for use in uses:
            self.homes.setdefault(id(use.tensor), workers[use.stage])
        _forbid_shared_statistics(uses, workers)
        users: dict[int, list[int]] = {}
        originals: dict[int, Tensor] = {}
        for use in uses:
            if isinstance(use.tensor, nn.Parameter):
                originals[id(use.tensor)] = use.tensor
                ranks = users.setdefault(id(use.tensor), [])
                if workers[use.stage] not in ranks:
                    ranks.append(workers[use.stage])
        self.loans: list[Loan] = []
        numbers: dict[int, int] = {}  # of this rank's loans, by the id() of the parameter
        for key, (owner, *borrowers) in users.items():
            for borrower in sorted(borrowers):
                if borrower == rank:
                    numbers[key] = len(self.loans)
                lent = originals[key] if owner == rank else None
                self.loans.append(Loan(len(self.loans), owner, borrower, lent, originals[key].requires_grad))
        self.slots: dict[int, list[tuple[int, Slot]]] = {}
        here = {id(use.slot[0]) for use in uses if workers[use.stage] == rank}
        self._hidden: dict[tuple[int, str], tuple[Slot, Tensor]] = {}
        for use in uses:
            foreign = self.homes[id(use.tensor)] != rank
            if foreign and (isinstance(use.tensor, nn.Parameter) or id(use.slot[0]) not in here):
                self._hidden.setdefault((id(use.slot[0]), use.slot[1]), (use.slot, use.tensor))
                if workers[use.stage] == rank:
                    self.slots.setdefault(use.stage, []).append((numbers[id(use.tensor)], use.slot))

    def hide(self, empty: Callable[[Tensor], Tensor]) -> None:
        """Empty the slots of tensors that belong to other ranks. What `empty` makes of each is kept in its place."""
        made: dict[int, Tensor] = {}
        for at, (slot, tensor) in self._hidden.items():
            placeholder = made.setdefault(id(tensor), tensor if tensor.is_meta else empty(tensor))
            self._hidden[at] = slot, placeholder
            slot[0][slot[1]] = None

    @contextmanager
    def shown(self) -> Generator[None]:
        """Put the placeholders into their slots inside."""
        try:
            for (table, key), placeholder in self._hidden.values():
                table[key] = placeholder
            yield
        finally:
            for (table, key), _ in self._hidden.values():
                table[key] = None


def placeholder_of(tensor: Tensor) -> Tensor:
    """A tensor on the meta device in the place of one that belongs to another rank."""
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _forbid_shared_statistics(uses: Sequence[_Use], workers: Sequence[int]) -> None:
    ranks: dict[int, set[int]] = {}
    names: dict[int, str] = {}
    for use in uses:
        if isinstance(use.module, _NormBase) and use.module.track_running_stats:
            ranks.setdefault(id(use.module), set()).add(workers[use.stage])
            names.setdefault(id(use.module), use.name.rpartition(".")[0])
    shared = [
        f"{names[key]} in stages of the ranks {sorted(of_norm)}" for key, of_norm in ranks.items() if len(of_norm) > 1
    ]
    if shared:
        raise SpecError(
            listed(
                "norms with running statistics cannot be shared by stages of several ranks, because their statistics "
                "would drift apart; put the layers that share one into stages of one rank (balance=):",
                shared,
            )
        )
