"""The layout of a pipe over processes: ``weft.Pipe(model, chunks=8, schedule="1f1b", group=process_group)``.

Every rank of the group runs the same script, as under `torchrun`. Worker k of the schedule is rank k of the group.
A launcher of our own, with a driver process and workers, would need the model and the data in a form that can be sent.
"""

import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchweft.core.errors import ScheduleError, UsageError, join_faults
from torchweft.core.validation import Validator
from torchweft.pipeline.batchnorm import convert_deferred_batch_norm
from torchweft.pipeline.config import BatchDims, Layers, layers_of
from torchweft.pipeline.devices import places_of
from torchweft.pipeline.pipe_runtime import PipeRuntime, on_meta
from torchweft.pipeline.pipeline_plan import build_stages
from torchweft.pipeline.processes import hugging_face
from torchweft.pipeline.processes.gathering import GATHERED, receive_tensors, reject_sharded, send_tensors
from torchweft.pipeline.processes.links import Links, Walk
from torchweft.pipeline.processes.loans import BorrowingStage, Loans
from torchweft.pipeline.processes.ownership import HiddenTensors, find_uses, placeholder_of, plan_loans, reject_shared
from torchweft.pipeline.processes.process_runtime import ProcessRuntime
from torchweft.pipeline.processes.rank_executor import Channel, Placement
from torchweft.pipeline.processes.transfer_order import check_transfers
from torchweft.pipeline.schedule import build
from torchweft.pipeline.sequential import Cuts, FixedSettings, LayoutArguments, PipeLayout, PipeSettings
from torchweft.pipeline.weights import names_by_tensor, typed_like


class GroupHandle:
    """Holder of the process group of a pipe. A copy of the pipe keeps the group, a pickle does not."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    @property
    def group(self) -> ProcessGroup:
        if self._group is None:
            raise UsageError(
                "this Pipe was unpickled, and a pickle does not keep the process group; save pipe.state_dict(), make "
                "the Pipe again with group=, and load into it"
            )
        return self._group

    @property
    def is_known(self) -> bool:
        return self._group is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupHandle":
        # A process group cannot be copied, and a copy of the pipe runs in the same processes.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupHandle, (None,)


class GroupLayout(PipeLayout):
    """Base of layouts over processes: the group, the links between its ranks, equal settings on all of them."""

    hides_tensors = True
    _handle: GroupHandle
    _cut_setting: str  # the setting that says how the model is cut
    _fixed_cuts: list[Any]  # its value when the pipe was made
    _stage_ranks: tuple[int, ...]  # the rank of each stage, since then
    _hidden: HiddenTensors
    _checks_batches: bool
    _device: torch.device  # of the stages of this rank

    def __init__(self) -> None:
        super().__init__()
        self._channel: Channel | None = None
        self._compared: Any = None
        self._told = False  # whether the other ranks know that this one could not connect

    def resolve(self, check: Validator, module: Any, dims: BatchDims | None, given: LayoutArguments) -> Cuts:
        group = check.call(_checked_group, given.group)
        check.require(
            given.executor in ("auto", "serial"),
            f"executor is {given.executor!r}, but a rank runs its stages in its own thread; leave it out",
        )
        check.require(
            not _scales_alone(given.loss_scale),
            "loss_scale is of a torch.amp.GradScaler, which would skip a step and change its scale on one rank only; "
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=group)",
        )
        check.boolean("check_batches", given.check_batches)
        if group is None:
            return Cuts(0, [], [])
        self._checks_batches = given.check_batches
        self._handle = GroupHandle(group)
        stages = check.call(_stages_of, group, given) or group.size()
        device = check.call(_device_of, group, given, stages)
        if device is None:
            return Cuts(0, [], [])
        self._device = device
        return super().resolve(check, module, dims, given._replace(devices=[device] * stages))

    @property
    def group(self) -> ProcessGroup:
        return self._handle.group

    def _fix_cuts(self, settings: PipeSettings) -> tuple[int, ...]:
        self._stage_ranks, self._fixed_cuts = self._ranks_of_stages(settings), self._cuts_of(settings)
        return self._stage_ranks

    def _cuts_of(self, settings: PipeSettings) -> list[Any]:
        return list(getattr(settings, self._cut_setting))

    def _reject_new_cuts(self, settings: PipeSettings) -> None:
        cuts = self._cuts_of(settings)
        if cuts != self._fixed_cuts or self._ranks_of_stages(settings) != self._stage_ranks:
            raise UsageError(
                f"the parameters of this Pipe are spread over processes by {self._cut_setting}={self._fixed_cuts}, "
                f"with stages on the ranks {self._stage_ranks}; now {self._cut_setting} is {cuts}, or the schedule "
                "puts stages on other ranks; make another Pipe, and load a checkpoint into it"
            )

    def _ranks_of_stages(self, settings: PipeSettings) -> tuple[int, ...]:
        stages, size = len(settings.balance), self.group.size()
        table = build(settings.schedule, stages, settings.chunks)
        if len(table.workers) != size:
            enough = self._cut_setting == "split" or sum(settings.balance) >= size
            remedy = f"make {size} stages by {self._cut_setting}=" if enough else f"give the model {size} layers"
            raise ScheduleError(
                f"the schedule has {len(table.workers)} workers for {stages} stages, but the group has {size} ranks, "
                f"one per worker; start {len(table.workers)} ranks (torchrun --nproc-per-node {len(table.workers)} on "
                f"one machine), or {remedy}, or change schedule="
            )
        check_transfers(table)
        return table.worker_of

    def _connect(self) -> Channel:
        if self._channel is None:
            self._told = True  # in case of an error
            self._channel = Channel(Links(self.group, device=self._device))
            self._told = False
        return self._channel

    @contextmanager
    def telling(self) -> Generator[None]:
        """See `PipeLayout.telling`. An exception between walks fails the next one, in which the others wait."""
        self._told = False
        if self._channel is not None:
            self._channel.failed = False
        try:
            yield
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        if self._channel is not None:
            self._channel.tell(error)
        elif not self._told and self._handle.is_known:
            Links.fail_to_connect(self.group, error)
        self._told = True

    def lost_ranks(self) -> list[str]:
        return [] if self._channel is None else self._channel.links.lost_ranks()

    @contextmanager
    def _in_walk(self, what: str) -> Generator[Walk]:
        channel = self._connect()
        channel.open(what)
        try:
            yield channel.walk
        except BaseException as error:
            channel.fail(error)
            raise
        finally:
            channel.end()  # after success, all messages of the walk were exchanged

    def exchange_reports(self, occasion: str, report: Any) -> list[Any]:
        with self._in_walk(occasion) as walk:
            return walk.agree(report)

    def new_runtime(self, settings: PipeSettings, layers: Layers, *, allows_external_loss: bool) -> PipeRuntime:
        self._reject_new_cuts(settings)
        stages, crossing = self.stages(settings, layers)
        loans = self._planned_loans(settings)
        for number, places in loans.places.items():
            cast(BorrowingStage, stages[number]).set_places(places)
        replicas = partial(hugging_face.has_replicas, weakref.ref(cast(nn.Module, settings)))
        shared = settings.output == "all"
        placement = Placement(self._connect(), self._stage_ranks, loans, shared, self._checks_batches, replicas)
        options = settings.checkpoint, "serial", *self._fixed.of_runtime(mixed=not allows_external_loss)
        return ProcessRuntime(placement, stages, crossing, *options, allows_external_loss=allows_external_loss)

    def _planned_loans(self, settings: PipeSettings) -> Loans:
        raise NotImplementedError

    def axes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, target: bool) -> Any:
        dims = self._fixed.dims
        if dims.whole is not None or self._stage_ranks[0] == self.group.rank():
            return super().axes(args, kwargs, target=target)
        # The arguments count on the rank of the first stage only, so others can leave them out.
        return (None, dims.of_call(0, ["target"], target=False)[1]["target"]) if target else None

    def with_placeholders(self) -> AbstractContextManager[None]:
        return self._hidden.placeholders()

    def gather(self, occasion: str, value: Any) -> list[Any]:
        """On the first rank the values of all ranks, elsewhere that of this rank. All ranks call this together."""
        rank, values = self.group.rank(), [value]
        with self._in_walk(occasion) as walk:
            if rank > 0:
                walk.send(0, (GATHERED, rank, 0), value)
            else:
                values += [walk.receive((GATHERED, other, 0), other) for other in range(1, self.group.size())]
            walk.agree(None)
        return values

    @contextmanager
    def whole_model(self, module: nn.Module, occasion: str) -> Generator[bool]:
        """Inside, the first rank has the tensors of all ranks, and its `state_dict()` is that of the whole model. Gives
        whether this rank is the first. All ranks enter together, and leave together or raise together."""
        with self._in_walk(occasion) as walk:
            reject_sharded(module)
            if self.group.rank() > 0:
                send_tensors(walk, module, self.group.rank())
                yield False
            else:
                found = receive_tensors(walk, self.group.size())
                with self.with_placeholders():
                    places = names_by_tensor(module)
                filled = {
                    key: typed_like(place, found[names[0]])
                    for key, (place, names) in places.items()
                    if names[0] in found
                }
                with self._hidden.placeholders(filled):
                    yield True
            walk.agree(None)

    def introduce(self, pipe: nn.Module) -> None:
        hugging_face.connect(pipe)

    def compare_settings(self, settings: PipeSettings, layers: Layers, state: Any, *, compare: bool) -> None:
        # Compared when a setting has changed, not at every step. If it changed on one rank only, the others are in
        # another walk, which is an error that names both walks.
        if compare and self._compared != state:
            occasion = "the comparison of settings, which a rank makes when it has changed some"
            self._reject_differences(self.exchange_reports(occasion, self._describe_settings(settings, layers)))
        self._compared = state

    def _reject_differences(self, reports: list[dict[str, Any]]) -> None:
        faults = [
            f"{key}: {reports[0].get(key)} on rank 0 of the group, {other.get(key)} on rank {rank}"
            for rank, other in enumerate(reports)
            for key in {**reports[0], **other}
            if reports[0].get(key) != other.get(key)
        ]
        if faults:
            raise UsageError(join_faults("all ranks must give the Pipe the same settings; but:", faults))

    def _describe_settings(self, settings: PipeSettings, layers: Layers) -> dict[str, Any]:
        fixed = self._fixed
        checkpoint: Any = settings.checkpoint
        modes: list[Any] = [*checkpoint] if isinstance(checkpoint, list | tuple) else [checkpoint]
        return {
            "chunks": settings.chunks,
            "balance": list(settings.balance),
            "schedule": build(settings.schedule, len(settings.balance), settings.chunks).text(),
            "checkpoint": [mode if isinstance(mode, str) else "a function" for mode in modes],
            "loss": None if fixed.loss is None else getattr(fixed.loss, "__name__", type(fixed.loss).__name__),
            "loss_reduction": fixed.reduction,
            "output": settings.output,
            "check_batches": self._checks_batches,
            "axes": repr((fixed.dims.arguments, fixed.dims.outputs)),
            **{
                f"layer {name!r}": f"{type(layer).__name__} with {sum(1 for _ in layer.modules())} modules"
                for name, layer in layers
            },
        }

    def statistics(self, settings: PipeSettings) -> dict[str, Any]:
        wire = {} if self._channel is None else self._channel.links.statistics()
        return {**super().statistics(settings), "wire": wire}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_channel": None, "_compared": None}


class ProcessLayout(GroupLayout):
    _stage_type = BorrowingStage
    _cut_setting = "balance"
    _loans: Loans

    def take_model(self, fixed: FixedSettings, settings: PipeSettings, model: nn.Module, *, deferred: bool) -> Layers:
        self._fixed = fixed
        layers = [
            (name, convert_deferred_batch_norm(layer) if deferred else layer)
            for name, layer in layers_of(cast("nn.Sequential", model))
        ]
        # Tensors of other ranks are hidden before the layers move, so that they never take memory on the device.
        workers, rank = self._fix_cuts(settings), self.group.rank()
        stages = build_stages(layers, settings.balance, settings.devices)[0]
        uses = list(find_uses([stage.layers for stage in stages]))
        # A copy of the module on each rank would not see the buffers that the others write.
        headline = (
            "modules with buffers cannot be shared by stages of several ranks, each of which would have a copy; let "
            "the stages that share one be on one rank (balance=):"
        )
        buffers = (use for use in uses if not isinstance(use.tensor, nn.Parameter))
        shared = ((id(use.tensor), use.name.rpartition(".")[0], use.stage) for use in buffers)
        reject_shared(shared, workers, headline)
        owners = {id(use.tensor): workers[use.stage] for use in reversed(uses)}  # the first use counts
        self._loans = plan_loans(uses, owners, workers, rank, layers)
        self._hidden = HiddenTensors(uses, owners, rank, placeholder_of)
        for _, layer in layers:
            if not on_meta(layer):
                layer.to(settings.devices[0])
        return layers

    def _planned_loans(self, settings: PipeSettings) -> Loans:
        return self._loans


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
    # The scale is given as the bound method get_scale. A plain GradScaler looks at the gradients of one rank only.
    scaler = getattr(loss_scale, "__self__", None)
    return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and not hasattr(scaler, "process_group")


def _stages_of(group: ProcessGroup, given: LayoutArguments) -> int:
    """The number of stages: by the split points, a list in `given`, or as the schedule needs for a worker per rank."""
    if isinstance(given.split, list | tuple):
        return len(cast("list[Any]", given.split)) + 1
    for setting in (given.balance, given.devices):
        if isinstance(setting, list | tuple):
            return len(cast("list[Any]", setting))
    size = group.size()
    for stages in (size, 2 * size):  # some schedules have two stages per worker
        with suppress(ScheduleError):
            if len(build(given.schedule, stages, given.chunks).workers) == size:
                return stages
    return size


def _device_of(group: ProcessGroup, given: LayoutArguments, stages: int) -> torch.device:
    devices = given.devices
    if devices is None:
        has_cuda = torch.cuda.is_available() and "cuda" in dist.get_backend_config(group)
        return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    if not isinstance(devices, list | tuple):
        return places_of(devices)[0]
    workers = build(given.schedule, stages, given.chunks).worker_of
    pairs = zip(cast("Sequence[Any]", devices), workers, strict=False)
    own = set(places_of([device for device, worker in pairs if worker == group.rank()]))
    if len(own) != 1:
        raise UsageError(
            f"a rank has one device, but its stages have {sorted(map(str, own))}; give devices=, one per stage"
        )
    return own.pop()
