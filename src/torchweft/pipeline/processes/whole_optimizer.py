"""The state of an optimizer over ranks, as that of the whole model's optimizer in one process.

The optimizer of a rank numbers the parameters of this rank, so the same number means another parameter on each rank.
In the whole state, the parameters of each group are those of all ranks, in the order of the model.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Protocol

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torchweft.core.errors import UsageError, WeightsError
from torchweft.pipeline.weights import names_by_tensor


class RankLayout(Protocol):
    """The layout of a pipe over processes, as far as saving and clipping need it."""

    @property
    def group(self) -> ProcessGroup: ...
    def with_placeholders(self) -> AbstractContextManager[None]: ...
    def telling(self) -> AbstractContextManager[None]: ...
    def exchange_reports(self, occasion: str, report: Any) -> list[Any]: ...
    def gather(self, occasion: str, value: Any) -> list[Any]: ...
    def whole_model(self, module: nn.Module, occasion: str) -> AbstractContextManager[bool]: ...


class WholeOptimizer:
    """Hooks on the optimizer of a rank. All ranks of the pipe make them together.

    ``load_state_dict()`` takes the whole state too. ``state_dict()`` gives it on the first rank, inside of `whole`.
    """

    def __init__(self, layout: RankLayout, pipe: nn.Module, optimizer: Optimizer) -> None:
        self._layout = layout
        tensors = names_by_tensor(pipe)
        groups: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
        self._local = [[tensors[id(parameter)][1][0] for parameter in group] for group in groups]
        with layout.with_placeholders():
            order = {name: number for number, (name, _) in enumerate(pipe.named_parameters())}
        reports = layout.exchange_reports("the preparation of an optimizer", self._local)
        if len({len(report) for report in reports}) > 1:
            counts = ", ".join(f"{len(report)} on rank {rank}" for rank, report in enumerate(reports))
            raise UsageError(f"the optimizers of the ranks of a Pipe have different numbers of groups: {counts}")
        names = [{name for report in reports for name in report[group]} for group in range(len(groups))]
        self._whole = [sorted(of_group, key=order.__getitem__) for of_group in names]
        self._numbers = {name: number for number, name in enumerate(chain.from_iterable(self._whole))}
        self._states: Mapping[str, Any] | None = None
        optimizer.register_state_dict_post_hook(self._number_all)
        optimizer.register_load_state_dict_pre_hook(self._choose_local)

    @contextmanager
    def whole(self, optimizer: Optimizer) -> Generator[None]:
        """All ranks enter and leave together. The first one needs memory for the state of the whole model."""
        state: Mapping[int, Any] = optimizer.state_dict()["state"]
        local = {name: state[k] for k, name in enumerate(chain.from_iterable(self._local)) if k in state}
        gathered = self._layout.gather("the saving of an optimizer", local)
        if self._layout.group.rank() == 0:
            self._states = {name: of_name for of_rank in gathered for name, of_name in of_rank.items()}
        try:
            yield
        finally:
            self._states = None
        self._layout.exchange_reports("the end of saving", None)  # files are complete on all ranks

    def _number_all(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._states is None:
            return None
        states = {self._numbers[name]: state for name, state in self._states.items()}
        return {**state_dict, "state": dict(sorted(states.items())), "param_groups": self._groups(state_dict, True)}

    def _choose_local(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        if lengths == [len(names) for names in self._local]:
            return None
        if lengths != [len(names) for names in self._whole]:
            raise WeightsError(
                f"the groups of the saved optimizer have {lengths} parameters, those of the whole model "
                f"{[len(names) for names in self._whole]}; make the same groups as when it was saved"
            )
        whole = state_dict["state"]
        own = enumerate(chain.from_iterable(self._local))
        state = {number: whole[self._numbers[name]] for number, name in own if self._numbers[name] in whole}
        return {**state_dict, "state": state, "param_groups": self._groups(state_dict, False)}

    def _groups(self, state_dict: dict[str, Any], whole: bool) -> list[dict[str, Any]]:
        """The options of the groups, with the numbers of the parameters of the whole model, or of this rank."""
        groups: list[dict[str, Any]] = []
        first = 0
        for options, names in zip(state_dict["param_groups"], self._whole if whole else self._local, strict=True):
            named = {"param_names": names} if "param_names" in options else {}
            groups.append({**options, **named, "params": [*range(first, first + len(names))]})
            first += len(names)
        return groups
