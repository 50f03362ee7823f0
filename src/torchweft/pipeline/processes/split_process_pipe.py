"""The layout of an ordinary model over processes: ``weft.Pipe(model, chunks=8, split=[...], group=process_group)``.

When the pipe is made, each rank computes the owner of every parameter: with a sample, the rank of the stage that uses
it first, else by the order in which modules were registered. Tensors of other ranks are hidden from then on. The ranks
need no messages for this, because they have the same model and the same sample.
"""

import copy
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchweft.pipeline.config import Layers
from torchweft.pipeline.processes.loans import Loans
from torchweft.pipeline.processes.ownership import HiddenTensors, find_uses, placeholder_of
from torchweft.pipeline.processes.process_pipe import GroupLayout
from torchweft.pipeline.processes.split_model import CHOICE, ProcessSplitModel, TensorPlacement, named_tensors
from torchweft.pipeline.sequential import CurrentRuntime, MakePipe, PipeSettings
from torchweft.pipeline.split.auto import Arguments
from torchweft.pipeline.split.isolation import place_tensor
from torchweft.pipeline.split.model_programs import SplitModel
from torchweft.pipeline.split.program import Program
from torchweft.pipeline.split.split_pipe import SplitLayout, split_of
from torchweft.pipeline.weights import map_tensors


class ProcessSplitLayout(GroupLayout, SplitLayout):
    _cut_setting = "split"
    _placement: TensorPlacement
    _sampled: Program | None  # the program of the sample

    def _automatic_split(self, settings: PipeSettings, sample: Any, make_pipe: MakePipe) -> list[str]:
        # Ranks would measure different times, so the first one measures for all of them.
        with self._in_walk("the choice of split points") as walk:
            names = super()._automatic_split(settings, sample, make_pipe) if self.group.rank() == 0 else None
            return walk.agree(names)[0]

    def place(self, settings: PipeSettings, current_runtime: CurrentRuntime, sample: Any) -> None:
        workers, rank = self._fix_cuts(settings), self.group.rank()
        device = settings.devices[0]
        stages, self._sampled = self._first_stages(settings, self._sample_call(sample))
        ranks = {name: workers[stage] for name, stage in stages.items()}
        owners = {id(tensor): ranks[name] for name, tensor in named_tensors(self._model)}
        if sample is None and not rank:
            _warn_if_uneven(self._model, ranks, self.group.size())
        uses = find_uses([[("", self._model)]])
        self._hidden = HiddenTensors(uses, owners, rank, partial(_placeholder, device=device))
        # Hidden before the rest moves, so that tensors of other ranks never take memory on the device.
        self._placement = TensorPlacement(workers, ranks, self._hidden, rank, device)
        map_tensors(self._model, partial(place_tensor, device=device))

    def _first_stages(self, settings: PipeSettings, call: Arguments | None) -> tuple[dict[str, int], Program | None]:
        """The first stage that uses each parameter and buffer, by name; and the program of the sample."""
        model = self._local_model(self._model, settings)
        has_meta = any(parameter.is_meta for parameter in self._model.parameters())
        if call is not None:
            try:
                if has_meta:
                    model = self._local_model(_with_fake_parameters(self._model), settings)
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
                model = self._local_model(self._model, settings)
        # By name, because the model with fake parameters has other objects.
        stages = model.homes()
        return {name: stages[id(tensor)] for name, tensor in named_tensors(model.model)}, model.latest

    def _local_model(self, module: nn.Module, settings: PipeSettings) -> SplitModel:
        here = next((x.device for x in module.parameters() if not x.is_meta), torch.device("cpu"))
        return SplitModel(module, split_of(settings), [here] * len(settings.devices), self._fixed.dims)

    def _new_model(self, settings: PipeSettings) -> SplitModel:
        self._reject_new_cuts(settings)
        fixed = self._fixed
        options = self._model, split_of(settings), settings.devices, fixed.dims
        return ProcessSplitModel(self._placement, *options, latest=self._sampled)

    def run_step(self, settings: PipeSettings, current_runtime: CurrentRuntime, *call: Any) -> Any:
        model = self._process_model(settings)  # before the runtime, because its layout is part of `key`
        current_runtime()
        model.set_channel(self._connect(), shares_output=settings.output == "all")
        with self._in_walk(CHOICE):
            return super().run_step(settings, current_runtime, *call)

    def _planned_loans(self, settings: PipeSettings) -> Loans:
        return self._process_model(settings).loans

    def _process_model(self, settings: PipeSettings) -> ProcessSplitModel:
        return cast(ProcessSplitModel, self._current_model(settings))

    def _describe_settings(self, settings: PipeSettings, layers: Layers) -> dict[str, Any]:
        own = {"split": list(split_of(settings)), "verify": cast(Any, settings).verify}
        return {**super()._describe_settings(settings, layers), **own}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_split_model": None, "_sampled": None}


def _warn_if_uneven(model: nn.Module, ranks: Mapping[str, int], size: int) -> None:
    shares = [0] * size
    for name, parameter in model.named_parameters():
        shares[ranks[name]] += parameter.nbytes
    # Twice the mean; or of two ranks, twice the share of the other one.
    if max(shares) >= 2 * sum(shares) / max(size, 3) > 0:
        listed = ", ".join(f"rank {rank} {share:,}" for rank, share in enumerate(shares))
        warnings.warn(
            f"the parameters of {type(model).__name__} are spread unevenly over the ranks, in bytes: {listed}. Without "
            "a sample, a parameter belongs to a stage by the order in which modules were registered, which can be "
            "another than that of their calls; give Pipe sample=, a micro-batch, and each goes to the stage that uses "
            "it first. If it stays uneven, choose other split points",
            stacklevel=2,
        )


def _placeholder(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Buffers keep their values: code between blocks can read them, and they are not in every file of weights.
    return placeholder_of(tensor) if isinstance(tensor, nn.Parameter) else place_tensor(tensor, device)


def _with_fake_parameters(module: nn.Module) -> nn.Module:
    """A copy of the model that runs without the values of its parameters."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        # Buffers stay real, because Python between blocks can depend on their values.
        if not isinstance(tensor, nn.Parameter):
            return tensor
        with mode:
            return nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), tensor.requires_grad)

    fake = copy.deepcopy(module)
    map_tensors(fake, change)
    return fake
