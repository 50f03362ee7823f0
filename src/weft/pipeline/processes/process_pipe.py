"""A Pipe over processes: ``weft.Pipe(model, chunks=8, schedule="1f1b", loss=fn, group=process_group)``.

Every rank of the group runs the same script, as under `torchrun`. Worker k of the schedule is rank k of the group.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft.core.errors import ScheduleError, UsageError, WeightsError, listed
from weft.core.validation import Validator
from weft.pipeline.batchnorm import convert_deferred_batch_norm
from weft.pipeline.config import layers_of, places_of
from weft.pipeline.pipe import Pipe
from weft.pipeline.pipe_runtime import PipeRuntime, on_meta
from weft.pipeline.pipeline_plan import Crossing, build_stages
from weft.pipeline.processes.links import Links
from weft.pipeline.processes.loans import BorrowingStage, Loans
from weft.pipeline.processes.ownership import (
    HiddenTensors,
    find_uses,
    first_homes,
    forbid_shared_buffers,
    placeholder_of,
    plan_loans,
)
from weft.pipeline.processes.process_runtime import Placement, ProcessRuntime
from weft.pipeline.processes.rank_executor import Channel
from weft.pipeline.schedule import build
from weft.pipeline.stage import Stage


class GroupHandle:
    """A process group as a part of a pipe: a copy of the pipe keeps the group, a pickle does not."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    @property
    def group(self) -> ProcessGroup:
        """The group. Raises UsageError after unpickling."""
        if self._group is None:
            raise UsageError(
                "this Pipe was unpickled, and a pickle does not keep the process group; save pipe.state_dict(), make "
                "the Pipe again with group=, and load into it"
            )
        return self._group

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupHandle":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupHandle, (None,)


class OverProcesses(Pipe):
    """What pipes over processes have in common: the group, the links to its ranks, equal settings on all of them."""

    _workers_made: tuple[int, ...]
    """The rank of each stage, when the pipe was made."""
    _hidden: HiddenTensors

    def _lay_out(self, check: Validator, module: Any, dims: Any, **given: Any) -> int:
        group = check.call(_checked_group, given["group"])
        check.that(
            given["executor"] in ("auto", "serial"),
            f"executor is {given['executor']!r}, but a rank runs its stages in its own thread; leave it out",
        )
        check.that(
            not _scales_alone(given["loss_scale"]),
            "loss_scale is of a torch.amp.GradScaler, which would skip a step and change its scale on one rank only; "
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=group)",
        )
        if group is None:
            return 0
        self._handle = GroupHandle(group)
        stages = check.call(_stages_of, group, given) or group.size()
        device = check.call(_device_of, group, given, stages)
        if device is None:
            return 0
        return super()._lay_out(check, module, dims, **{**given, "devices": [device] * stages})

    def _keep_workers(self) -> tuple[int, ...]:
        """The rank of each stage, which stays from now on. Nothing is connected yet."""
        self._workers_made = self._workers()
        self.__dict__.setdefault("_channel", None)
        self.__dict__["_compared"] = None
        return self._workers_made

    @property
    def group(self) -> ProcessGroup:
        """The process group whose ranks run the stages."""
        return self._handle.group

    def _workers(self) -> tuple[int, ...]:
        """The rank of each stage. Raises ScheduleError if the schedule is not for as many workers as the group has."""
        table, size = build(self.schedule, len(self.balance), self.chunks), self.group.size()
        if len(table.workers) != size:
            raise ScheduleError(
                f"the schedule has {len(table.workers)} workers for {len(self.balance)} stages, but the group has "
                f"{size} ranks, one per worker; change balance= or schedule="
            )
        return table.worker_of

    def _linked(self) -> Channel:
        """The channel to the other ranks; the first call connects them, on all ranks together."""
        if self.__dict__["_channel"] is None:
            self.__dict__["_channel"] = Channel(Links(self.group))
        return cast(Channel, self.__dict__["_channel"])

    def _made_runtime(self) -> PipeRuntime:
        runtime = super()._made_runtime()
        if self._compared != self._checked:
            self._compare_settings()
            self._compared = self._checked
        return runtime

    def _runtime_over(self, loans: Loans, stages: Sequence[Stage], crossing: Crossing, splits: bool) -> ProcessRuntime:
        """A runtime for stages of all ranks. Raises UsageError if a stage is on another rank than before."""
        workers = self._workers()
        if workers != self._workers_made:
            raise UsageError(
                "the number of stages, or the rank of a stage, changed after this Pipe was made, but its parameters "
                "are spread over processes already; make another Pipe, and load a checkpoint into it"
            )
        placement = Placement(self._linked(), workers, loans, self.output == "all")
        loss, reduction = self._loss
        return ProcessRuntime(
            placement,
            stages,
            crossing,
            self.checkpoint,
            "serial",
            loss,
            reduction,
            self._loss_weight,
            self._dims,
            splits=splits,
        )

    def _axes_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, target: bool) -> Any:
        if self._dims.whole is not None or self._workers_made[0] == self.group.rank():
            return super()._axes_of(args, kwargs, target=target)
        # The arguments count on the rank of the first stage only, so others can leave them out.
        return (None, self._dims.of_call(0, ["target"], target=False)[1]["target"]) if target else None

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module. Keys of tensors that other ranks have are ignored, so a rank can load the whole state."""
        with self._showing_hidden():
            hidden = set(self.state_dict())
        hidden -= set(self.state_dict())
        found: Any = super().load_state_dict(state_dict, False, assign)
        unexpected: list[str] = [key for key in found.unexpected_keys if key not in hidden]
        missing: list[str] = found.missing_keys
        faults = [f"{key}: missing" for key in missing] + [f"{key}: unexpected" for key in unexpected]
        if strict and faults:
            raise WeightsError(listed("the state_dict does not fit the part of the model on this rank:", faults))
        return type(found)(missing, unexpected)

    def _showing_hidden(self) -> AbstractContextManager[None]:
        return self._hidden.shown()

    def _agree(self, what: str, report: Any) -> list[Any]:
        channel = self._linked()
        channel.open(what)
        try:
            return channel.walk.agree(report)
        finally:
            channel.end()

    def _compare_settings(self) -> None:
        """Raise UsageError on all ranks if their settings differ."""
        what = "the comparison of settings, which a rank makes when it has changed some"
        reports: list[dict[str, Any]] = self._agree(what, self._settings_in_words())
        faults = [
            f"{key}: {reports[0].get(key)} on rank 0 of the group, {other.get(key)} on rank {rank}"
            for rank, other in enumerate(reports)
            for key in {**reports[0], **other}
            if reports[0].get(key) != other.get(key)
        ]
        if faults:
            raise UsageError(listed("all ranks must give the Pipe the same settings; but:", faults))

    def _settings_in_words(self) -> dict[str, Any]:
        """All that must be equal on all ranks, as plain values."""
        loss, reduction = self._loss
        given: Any = self.checkpoint
        modes: list[Any] = [*given] if isinstance(given, list | tuple) else [given]
        layers = {
            f"layer {name!r}": f"{type(layer).__name__} with {sum(1 for _ in layer.modules())} modules"
            for name, layer in self._layers()
        }
        return {
            "chunks": self.chunks,
            "balance": list(self.balance),
            "schedule": build(self.schedule, len(self.balance), self.chunks).text(),
            "checkpoint": [mode if isinstance(mode, str) else "a function" for mode in modes],
            "loss": None if loss is None else getattr(loss, "__name__", type(loss).__name__),
            "loss_reduction": reduction,
            "output": self.output,
            "axes": repr((self._dims.arguments, self._dims.outputs)),
            **layers,
        }

    def statistics(self) -> dict[str, Any]:
        """As of any pipe; also the bytes that this rank sent, by destination rank and route."""
        channel = self.__dict__["_channel"]
        return {**super().statistics(), "wire": {} if channel is None else channel.links.statistics()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_channel": None, "_compared": None}


class ProcessPipe(OverProcesses):
    """See `Pipe`, which makes one where `group` is given."""

    _stage_type = BorrowingStage

    def _adopt(self, module: nn.Module, sample: Any, *, deferred_batch_norm: bool) -> None:
        self._partitions = (None, [])
        for name, layer in layers_of(module):
            self._modules[name] = convert_deferred_batch_norm(layer) if deferred_batch_norm else layer
        workers, rank = self._keep_workers(), self.group.rank()
        stages = build_stages(self._layers(), self.balance, self.devices)[0]
        uses = list(find_uses([stage.layers for stage in stages]))
        forbid_shared_buffers(uses, workers)
        homes = first_homes(uses, workers)
        owned = {id(use.tensor): use.slot for use in reversed(uses)}
        self._loans, self._slots = plan_loans(uses, homes, workers, rank, owned)
        local = {id(use.module) for use in uses if workers[use.stage] == rank}
        self._hidden = HiddenTensors(uses, homes, rank, lambda use: id(use.module) in local, placeholder_of)
        for _, layer in self._layers():
            if not on_meta(layer):
                layer.to(self.devices[0])
        self._balance_made = list(self.balance)

    def _new_runtime(self, splits: bool) -> PipeRuntime:
        if list(self.balance) != self._balance_made:
            raise UsageError(
                f"balance is {list(self.balance)}, but the parameters of this Pipe are spread over processes by "
                f"{self._balance_made}; make another Pipe, and load a checkpoint into it"
            )
        stages, crossing = self._built_stages()
        for number, slots in self._slots.items():
            cast(BorrowingStage, stages[number]).borrow_into(slots)
        return self._runtime_over(Loans(self._loans, self.group.rank()), stages, crossing, splits)


def _checked_group(given: Any) -> ProcessGroup:
    """The process group. Raises UsageError for a mesh of several dimensions, and in a process outside of the group."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise UsageError(
                f"group is a DeviceMesh of {given.ndim} dimensions; give that of the stages, as mesh['pp']"
            )
        given = given.get_group()
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this process is not in the group; only the ranks of the group make the Pipe")
    if not isinstance(given, ProcessGroup):
        raise UsageError(f"group is {type(given).__name__}; give a process group, or a one-dimensional DeviceMesh")
    return given


def _scales_alone(loss_scale: Any) -> bool:
    """Whether a loss scale is of a gradient scaler that does not ask other ranks for infinite gradients."""
    scaler = getattr(loss_scale, "__self__", None)
    return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and not hasattr(scaler, "process_group")


def _stages_of(group: ProcessGroup, given: dict[str, Any]) -> int:
    """How many stages there are: as many as the split points make, or as the lists that were given have, or as the
    schedule needs for a worker per rank."""
    if isinstance(given["split"], list | tuple):
        return len(cast("list[Any]", given["split"])) + 1
    lists = [
        len(cast("list[Any]", given[key])) for key in ("balance", "devices") if isinstance(given[key], list | tuple)
    ]
    if lists:
        return lists[0]
    size = group.size()
    for stages in (size, 2 * size):  # some schedules have two stages per worker
        with suppress(ScheduleError):
            if len(build(given["schedule"], stages, given["chunks"]).workers) == size:
                return stages
    return size


def _device_of(group: ProcessGroup, given: dict[str, Any], stages: int) -> torch.device:
    """The device of this rank: the one that was given for its stages, or else that of the group's backend."""
    devices = given["devices"]
    if devices is None:
        has_cuda = torch.cuda.is_available() and "cuda" in dist.get_backend_config(group)
        return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    if not isinstance(devices, list | tuple):
        return places_of(devices)[0]
    workers = build(given["schedule"], stages, given["chunks"]).worker_of
    pairs = zip(cast("Sequence[Any]", devices), workers, strict=False)
    own = set(places_of([device for device, worker in pairs if worker == group.rank()]))
    if len(own) != 1:
        raise UsageError(
            f"a rank has one device, but its stages have {sorted(map(str, own))}; give devices=, one per stage"
        )
    return own.pop()
