"""A Pipe around an ordinary model over processes: ``weft.Pipe(model, chunks=8, split=[...], group=process_group)``.

When the pipe is made, each rank finds for itself where every parameter belongs: with a sample from the stage that uses
it first, else by the order in which modules were registered. All that belongs elsewhere is hidden from then on.
"""

import copy
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.core.errors import UsageError
from weft.core.validation import Validator
from weft.pipeline.pipe_runtime import PipeRuntime
from weft.pipeline.processes.loans import Loans
from weft.pipeline.processes.ownership import HiddenTensors, find_uses, placeholder_of
from weft.pipeline.processes.process_pipe import OverProcesses
from weft.pipeline.processes.split_model import ProcessSplitModel, TensorPlacement, named_tensors
from weft.pipeline.split.auto import Arguments
from weft.pipeline.split.program import Program
from weft.pipeline.split.split_pipe import SplitModel, SplitPipe
from weft.pipeline.weights import map_tensors


class ProcessSplitPipe(OverProcesses, SplitPipe):
    """See `Pipe`, which makes one where `split` and `group` are given."""

    def _automatic_split(self, call: Arguments | None) -> list[str]:
        # Ranks would measure different times, so the first one measures for all of them.
        self.__dict__["_channel"] = None
        channel = self._linked()
        channel.open("the choice of split points")
        try:
            found = super()._automatic_split(call) if self.group.rank() == 0 else None
            reports = channel.walk.agree(found)
        except BaseException as error:
            channel.walk.fail(error)
            raise
        finally:
            channel.end()
        return reports[0]

    def _lay_over_stages(self, call: Arguments | None) -> None:
        with Validator("this Pipe cannot be used") as check:
            self._check_layout(check)
        workers, rank = self._keep_workers(), self.group.rank()
        stages, self._sampled = self._first_stages(call)
        homes = {name: workers[stage] for name, stage in stages.items()}
        by_id = {id(each): homes[name] for name, each in named_tensors(self.module)}
        uses = list(find_uses([[("", self.module)]]))
        # Buffers keep their values: code between blocks can read them, and they are not in every file of weights.
        hidden = HiddenTensors(uses, by_id, rank, lambda _: False, self._placeholder)
        self._placement = TensorPlacement(workers, homes, hidden, rank, self.devices[0])
        self._split_made = self.split
        map_tensors(self.module, self._on_device)

    def _first_stages(self, call: Arguments | None) -> tuple[dict[str, int], Program | None]:
        """By name of each parameter and buffer the first stage that uses it; and the program of the sample."""
        model = self._model_alone(self.module)
        if call is not None and any(each.is_meta for each in self.module.parameters()):
            try:
                model = self._model_alone(_with_fake_parameters(self.module))
                self._record_sample(model, call)
            except Exception as error:
                warnings.warn(
                    "the sample was not used: forward() cannot run while parameters are on the meta device "
                    f"({type(error).__name__}: {error}), so they go to stages in the order in which modules were "
                    "registered",
                    stacklevel=2,
                )
                model = self._model_alone(self.module)
        elif call is not None:
            self._record_sample(model, call)
        homes = model.homes()
        return {name: homes[id(each)] for name, each in named_tensors(model.model)}, model.latest

    def _model_alone(self, module: nn.Module) -> SplitModel:
        """The model with all its stages where it is now."""
        here = next((each.device for each in module.parameters() if not each.is_meta), torch.device("cpu"))
        return SplitModel(module, self.split, [here] * len(self.devices), self._dims)

    def _showing_hidden(self) -> AbstractContextManager[None]:
        return self._placement.hidden.shown()

    def _placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        return placeholder_of(tensor) if isinstance(tensor, nn.Parameter) else self._on_device(tensor)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this rank on its device."""
        if tensor.is_meta or not isinstance(tensor, nn.Parameter):
            return tensor if tensor.is_meta else tensor.to(self.devices[0])
        tensor.data = tensor.data.to(self.devices[0])
        return tensor

    def _new_model(self) -> SplitModel:
        if list(self.split) != self._split_made:
            raise UsageError(
                f"split is {list(self.split)}, but the parameters of this Pipe are spread over processes by "
                f"{self._split_made}; make another Pipe, and load a checkpoint into it"
            )
        settings = self.module, self.split, self.devices, self._dims, self._number_reduction
        return ProcessSplitModel(self._placement, *settings, latest=self._sampled)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._own_model()  # first, as its layout is one of the settings
        self._made_runtime()
        channel = self._linked()
        model.open(channel)
        try:
            return super()._forward(args, kwargs)
        except BaseException as error:
            if (walk := channel.end()) is not None:
                walk.fail(error)
            raise

    def _rebuilt_runtime(self) -> PipeRuntime:
        runtime = SplitPipe._made_runtime(self)
        self._compared = self._checked  # another layout is no other setting
        return runtime

    def _new_runtime(self, splits: bool) -> PipeRuntime:
        stages, crossing = self._built_stages()
        return self._runtime_over(Loans(self._own_model().loans, self.group.rank()), stages, crossing, splits)

    def _own_model(self) -> ProcessSplitModel:
        model = self._cut()
        assert isinstance(model, ProcessSplitModel)
        return model

    def _settings_in_words(self) -> dict[str, Any]:
        return {**super()._settings_in_words(), "split": list(self.split), "verify": self.verify}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sampled": None}


def _with_fake_parameters(module: nn.Module) -> nn.Module:
    """A copy of the model that runs without the values of its parameters. Its buffers are real, because Python between
    blocks goes by their values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        with mode:
            return nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), tensor.requires_grad)

    made = copy.deepcopy(module)
    map_tensors(made, change)
    return made
