"""Ownership: which rank has which parameter and buffer of a pipe over processes.

Every rank has the whole tree of modules, but only its own tensors. The slots of the others hold None, so PyTorch's own
`parameters()`, `state_dict()`, optimizers and DistributedDataParallel see the local tensors under the model's own keys.
A placeholder is kept for each hidden tensor, with its shape, dtype and ties.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] # no public name

from weft.core.errors import SpecError, listed
from weft.pipeline.processes.loans import Loan
from weft.pipeline.weights import Slot, tables_of

Layers = Sequence[Sequence[tuple[str, nn.Module]]]
"""The modules of every stage, by name."""


class Use(NamedTuple):
    """A slot of a module, by which a stage uses a tensor."""

    stage: int
    name: str
    module: nn.Module
    slot: Slot
    tensor: Tensor


def find_uses(layers: Layers) -> Iterator[Use]:
    """Every use of a parameter or buffer by a stage, in the order of the stages."""
    for stage, of_stage in enumerate(layers):
        for name, layer in of_stage:
            for path, module in cast("Iterable[tuple[str, nn.Module]]", layer.named_modules(prefix=name)):
                for table in tables_of(module):
                    for key, tensor in table.items():
                        if tensor is not None:
                            yield Use(stage, f"{path}.{key}", module, (table, key), tensor)


def first_homes(uses: Iterable[Use], workers: Sequence[int]) -> dict[int, int]:
    """By the id() of each tensor, the rank of the first stage that uses it. `workers` gives the rank of each stage."""
    homes: dict[int, int] = {}
    for use in uses:
        homes.setdefault(id(use.tensor), workers[use.stage])
    return homes


class HiddenTensors:
    """The tensors that other ranks have: their slots hold None, except inside of `shown`.

    `homes` gives the rank of each tensor, by its id(). What `replace` makes of a hidden tensor is kept as its
    placeholder. A buffer in a module of an own stage (`here`) stays in any case.
    """

    def __init__(
        self,
        uses: Iterable[Use],
        homes: Mapping[int, int],
        rank: int,
        here: Callable[[Use], bool],
        replace: Callable[[Tensor], Tensor],
    ) -> None:
        self._slots: list[tuple[str, Slot, Tensor]] = []
        placeholders: dict[int, Tensor] = {}
        seen: set[tuple[int, str]] = set()
        for use in uses:
            table, key = use.slot
            stays = homes[id(use.tensor)] == rank or (here(use) and not isinstance(use.tensor, nn.Parameter))
            if not stays and (id(table), key) not in seen:
                seen.add((id(table), key))
                if id(use.tensor) not in placeholders:
                    placeholders[id(use.tensor)] = replace(use.tensor)
                self._slots.append((use.name, use.slot, placeholders[id(use.tensor)]))
        self.hide()

    @property
    def names(self) -> set[str]:
        """The keys of hidden tensors, in the words of the modules that they were found in."""
        return {name for name, _, _ in self._slots}

    def hide(self) -> None:
        """Empty the slots."""
        for _, (table, key), _ in self._slots:
            table[key] = None

    def keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules have their buffers from now on: a stage of this rank runs them."""
        tables = {id(module._buffers) for module in modules}
        for _, (table, key), buffer in self._slots:
            if id(table) in tables:
                table[key] = buffer
        self._slots = [hidden for hidden in self._slots if id(hidden[1][0]) not in tables]

    @contextmanager
    def shown(self) -> Generator[None]:
        """Put the placeholders into their slots inside."""
        for _, (table, key), placeholder in self._slots:
            table[key] = placeholder
        try:
            yield
        finally:
            self.hide()


def placeholder_of(tensor: Tensor) -> Tensor:
    """A tensor on the meta device in the place of one that belongs to another rank."""
    if tensor.is_meta:
        return tensor
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def plan_loans(
    uses: Iterable[Use], homes: Mapping[int, int], workers: Sequence[int], rank: int, owned: Mapping[int, Slot]
) -> tuple[list[Loan], dict[int, list[tuple[int, Slot]]]]:
    """The loans of all ranks, in an order that is the same on all of them; and by stage of this rank the slots for
    copies, each with the number of its loan. `owned` gives the slot of each parameter in the model, by its id()."""
    loans: list[Loan] = []
    numbers: dict[tuple[int, int], int] = {}  # of loans, by the id() of the parameter and the borrower
    slots: dict[int, list[tuple[int, Slot]]] = {}
    for use in uses:
        owner, borrower = homes[id(use.tensor)], workers[use.stage]
        if owner == borrower or not isinstance(use.tensor, nn.Parameter):
            continue
        number = numbers.setdefault((id(use.tensor), borrower), len(loans))
        if number == len(loans):
            lent = owned[id(use.tensor)] if owner == rank else None
            loans.append(Loan(number, owner, borrower, lent, use.tensor.requires_grad))
        if borrower == rank:
            slots.setdefault(use.stage, []).append((number, use.slot))
    return loans, slots


def forbid_shared_buffers(uses: Iterable[Use], workers: Sequence[int]) -> None:
    """Raise SpecError that names each module with buffers which stages of several ranks share. Each rank would have a
    copy of the buffers, and would not see the writes of others."""
    modules = [
        use._replace(name=use.name.rpartition(".")[0]) for use in uses if not isinstance(use.tensor, nn.Parameter)
    ]
    names = {id(use.tensor): use.name for use in reversed(modules)}
    ranks: dict[str, set[int]] = {}
    for use in modules:
        ranks.setdefault(names[id(use.tensor)], set()).add(workers[use.stage])
    if shared := [f"{name}, in stages of the ranks {sorted(of)}" for name, of in ranks.items() if len(of) > 1]:
        headline = (
            "modules with buffers cannot be shared by stages of several ranks, each of which would have a copy; let "
            "the stages that share one be on one rank (balance=):"
        )
        raise SpecError(listed(headline, shared))


def forbid_shared_statistics(uses: Iterable[Use], workers: Sequence[int]) -> None:
    """Raise SpecError that names each norm with running statistics which stages of several ranks share, because the
    statistics would drift apart."""
    ranks: dict[str, set[int]] = {}
    names: dict[int, str] = {}
    for use in uses:
        if isinstance(use.module, _NormBase) and use.module.track_running_stats:
            name = names.setdefault(id(use.module), use.name.rpartition(".")[0])
            ranks.setdefault(name, set()).add(workers[use.stage])
    if shared := [f"{name}, in stages of the ranks {sorted(of)}" for name, of in ranks.items() if len(of) > 1]:
        headline = (
            "norms with running statistics cannot be shared by stages of several ranks, because their statistics would "
            "drift apart; let the stages that share one be on one rank (balance=, or split=):"
        )
        raise SpecError(listed(headline, shared))
