"""A Pipe around an ordinary model over processes: ``weft.Pipe(model, chunks=8, split=[...], group=process_group)``.

When the pipe is made, each rank computes the owner of every parameter: with a sample, the rank of the stage that uses
it first, else by the order in which modules were registered. Tensors of other ranks are hidden from then on. The ranks
need no messages for this, because they have the same model and the same sample.
"""

import copy
import warnings
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.core.validation import Validator
from weft.pipeline.pipe_runtime import PipeRuntime
from weft.pipeline.processes.loans import Loans
from weft.pipeline.processes.ownership import HiddenTensors, find_uses, placeholder_of
from weft.pipeline.processes.process_pipe import GroupPipe
from weft.pipeline.processes.split_model import CHOICE, ProcessSplitModel, TensorPlacement, named_tensors
from weft.pipeline.split.auto import Arguments
from weft.pipeline.split.program import Program
from weft.pipeline.split.split_pipe import SplitModel, SplitPipe
from weft.pipeline.weights import map_tensors


class ProcessSplitPipe(GroupPipe, SplitPipe):
    """See `Pipe`, which makes one where `split` and `group` are given."""

    _cut_setting = "split"

    def _automatic_split(self, call: Arguments | None) -> list[str]:
        # Ranks would measure different times, so the first one measures for all of them.
        with self._in_walk("the choice of split points") as walk:
            names = super()._automatic_split(call) if self.group.rank() == 0 else None
            return walk.agree(names)[0]

    def _lay_over_stages(self, call: Arguments | None) -> None:
        with Validator("this Pipe cannot be used") as check:
            self._check_layout(check)
        workers, rank = self._fix_layout(), self.group.rank()
        stages, self._sampled = self._first_stages(call)
        ranks = {name: workers[stage] for name, stage in stages.items()}
        owners = {id(tensor): ranks[name] for name, tensor in named_tensors(self.module)}
        self._hidden = HiddenTensors(find_uses([[("", self.module)]]), owners, rank, self._placeholder)
        self._placement = TensorPlacement(workers, ranks, self._hidden, rank, self.devices[0])
        map_tensors(self.module, self._on_device)

    def _first_stages(self, call: Arguments | None) -> tuple[dict[str, int], Program | None]:
        """The first stage that uses each parameter and buffer, by name; and the program of the sample."""
        model, has_meta = self._local_model(self.module), any(x.is_meta for x in self.module.parameters())
        if call is not None:
            try:
                if has_meta:
                    model = self._local_model(_with_fake_parameters(self.module))
                self._record_sample(model, call)
            except Exception as error:
                if not has_meta:
                    raise
                warnings.warn(
                    "the sample was not used: forward() cannot run while parameters are on the meta device "
                    f"({type(error).__name__}: {error}), so they go to stages in the order in which modules were "
                    "registered",
                    stacklevel=2,
                )
                model = self._local_model(self.module)
        # By name, because the model with fake parameters has other objects.
        stages = model.homes()
        return {name: stages[id(tensor)] for name, tensor in named_tensors(model.model)}, model.latest

    def _local_model(self, module: nn.Module) -> SplitModel:
        """The model with all its stages where it is now."""
        here = next((x.device for x in module.parameters() if not x.is_meta), torch.device("cpu"))
        return SplitModel(module, self.split, [here] * len(self.devices), self._dims)

    def _placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        # Buffers keep their values: code between blocks can read them, and they are not in every file of weights.
        return placeholder_of(tensor) if isinstance(tensor, nn.Parameter) else self._on_device(tensor)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this rank on its device."""
        if tensor.is_meta or not isinstance(tensor, nn.Parameter):
            return tensor if tensor.is_meta else tensor.to(self.devices[0])
        tensor.data = tensor.data.to(self.devices[0])  # the same object, which an optimizer can have already
        return tensor

    def _new_model(self) -> SplitModel:
        self._forbid_new_layout()
        settings = self.module, self.split, self.devices, self._dims, self._number_reduction
        return ProcessSplitModel(self._placement, *settings, latest=self._sampled)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._process_model()  # before the runtime, because its layout is one of the settings
        self._made_runtime()
        model.set_channel(self._connect())
        with self._in_walk(CHOICE):
            return super()._forward(args, kwargs)

    def _rebuilt_runtime(self) -> PipeRuntime:
        # Not compared again, which needs a walk of its own: stages for new programs change no setting.
        runtime = SplitPipe._made_runtime(self)
        self._compared = self._checked
        return runtime

    def _planned_loans(self) -> Loans:
        return self._process_model().loans

    def _process_model(self) -> ProcessSplitModel:
        return cast(ProcessSplitModel, self._cut())

    def _describe_settings(self) -> dict[str, Any]:
        return {**super()._describe_settings(), "split": list(self.split), "verify": self.verify}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sampled": None}


def _with_fake_parameters(module: nn.Module) -> nn.Module:
    """A copy of the model that runs without the values of its parameters. Its buffers are real, because Python between
    blocks can depend on their values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        with mode:
            return nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), tensor.requires_grad)

    fake = copy.deepcopy(module)
    map_tensors(fake, change)
    return fake
