"""Pipelines on simulated streams. Steps, walks, stage devices and locks are real. A `Machine` launches the kernels."""

import random
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.streams import Machine, Node, OnGpu, Parameter, Stream, Walk, in_a_thread
from torchweft.core.context import ExecutionContext, set_phase
from torchweft.core.rng import RngStreams
from torchweft.core.segment import Segment, Tape
from torchweft.pipeline import recompute
from torchweft.pipeline.executor import LocalQueue, SerialExecutor, working
from torchweft.pipeline.loss import LossSeed, WeightedLoss
from torchweft.pipeline.recompute import StageReplay
from torchweft.pipeline.routing import (
    OUTSIDE,
    CallerStreams,
    CudaStageDevice,
    EntryPoint,
    EntryPoints,
    Route,
    StageDevice,
    StreamLock,
    Wiring,
    join_walk,
)
from torchweft.pipeline.schedule import Schedule, waits
from torchweft.pipeline.step import ALONE, CutStep, PipeStep


class ShuffledExecutor(SerialExecutor):
    """Executor that runs every action in a separate thread. The next worker is drawn at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def walk(self, schedule: Schedule, perform: Any, given: Any, ambient: ExecutionContext) -> Any:
        queue, left = LocalQueue(), LocalQueue()
        for messages in given.values():
            queue.messages.update(messages)
        outboxes = [*[queue] * schedule.stages, left]
        rows, waiting, done = [deque(row) for row in schedule.workers], waits(schedule.workers), set[Any]()

        def act() -> None:
            with working():
                perform(action, queue, outboxes)

        while any(rows):
            row = self._random.choice([row for row in rows if row and done.issuperset(waiting[row[0]])])
            action = row.popleft()
            in_a_thread(lambda: ambient.run(act))
            done.add(action)
        return left.messages


class Layers:
    """Layers of a stage: a weight, and a module with a buffer that they update.

    They write into the buffer, or assign a new one if it is `replaced`. This frees the memory of the old one.
    """

    replaced = False

    def __init__(self, machine: Machine, number: int, device: torch.device, module: nn.Module, options: Any) -> None:
        self.machine, self.number, self.device, self.module, self.options = machine, number, device, module, options
        self.weight: Parameter = machine.parameter(device)
        self.outputs = 1
        self.replay = StageReplay(number, [("layer", module)], device)

    def __call__(self, context: Any, values: Sequence[OnGpu]) -> list[OnGpu]:
        self.replay.scan([], [self.module], [])
        with self.replay.around(context) or nullcontext():
            if self.replaced:
                self.module.count = self.kernel("count", self.module.count)
            else:
                self.machine.write("count", self.module.count, self.module.count)
            return [self.kernel("forward", *values, self.weight) for _ in range(self.outputs)]

    def kernel(self, name: str, *reads: OnGpu, sparse: bool = False) -> OnGpu:
        name = f"{name} of stage {self.number}"
        if self.machine.current_device() != self.device.index:
            self.machine.faults.add(f"{name}: on another device")
        return self.machine.kernel(name, self.device, *reads, strided=self.options.strided, sparse=sparse)


class GpuTape(Tape):
    """Tape that keeps the inputs, or the graph (the results of the forward, and its stream)."""

    def __init__(self, segment: "GpuSegment", context: Any, values: Sequence[OnGpu], keep: Any) -> None:
        self._segment, self._in, self._at = segment, list(values), context
        self.recomputes, self.tracks, self.edges = keep == "inputs", False, None

    def keep(self, outputs: Sequence[OnGpu]) -> None:
        layers = self._segment.layers
        self._walk, self._saved = Walk(layers.machine, layers.device), [*outputs, *self._in]
        self.edges = [[None] for _ in outputs]

    def prepare(self) -> None:
        if self.edges is None:
            with set_phase("recomputing"):
                self.keep(self._segment.layers(self._at, self._in))

    def backward(self, gradients: Any, *, retain: bool = False) -> Any:
        self.prepare()
        inputs, split = self.backward_inputs(gradients)
        return inputs, split.parameter_gradients()

    def backward_inputs(self, gradients: Any) -> Any:
        layers, walk, saved, arrived = self._segment.layers, self._walk, self._saved, [g for (g,) in gradients]
        with walk.back(*arrived):
            inputs = [[layers.kernel("input gradient", *arrived, *saved, layers.weight)] for _ in self._in]

        def parameter_gradients() -> list[OnGpu]:
            with walk.back(*arrived) as capture:
                gradient = layers.kernel("weight gradient", *arrived, *saved, sparse=layers.options.sparse)
                capture(gradient, layers.weight)
            return [gradient]

        return inputs, SimpleNamespace(parameter_gradients=parameter_gradients)


class GpuSegment(Segment):
    def __init__(self, layers: Layers, parameters: Sequence[Any] = ()) -> None:
        self.layers, self.parameters = layers, list(parameters)

    def forward(self, context: Any, values: Sequence[OnGpu], keep: Any) -> Any:
        tape = GpuTape(self, context, values, keep)
        with set_phase("checkpointing") if keep == "inputs" else nullcontext():
            outputs = self.layers(context, values)
        if keep == "graph":
            tape.keep(outputs)
        return outputs, tape


class OneInput:
    """Mini-batch of one tensor that requires a gradient."""

    shared = ()
    present = (0,)

    def __init__(self, machine: Machine, tensor: OnGpu, count: int) -> None:
        self.machine, self.tensors, self.micro_batches = machine, [tensor], count

    def leaves(self, upload: Any) -> list[list[OnGpu]]:
        return [[self.machine.kernel("cut", x.device, x)] for x in self.tensors * self.micro_batches]

    def gradients(self, pieces: Any) -> list[OnGpu]:
        return [self.machine.kernel("join", self.tensors[0].device, *(leaf for piece in pieces for leaf in piece))]


class OneOutput(WeightedLoss):
    """Output that is joined from the results of the micro-batches."""

    def __init__(self, machine: Machine, device: torch.device, count: int) -> None:
        self.machine, self.device, self.count = machine, device, count

    def gather(self, results: Any) -> Any:
        return [self.machine.kernel("output", self.device, *results)], [True]

    def scatter_gradients(self, gradients: Any) -> Any:
        return [[self.machine.kernel("spread", self.device, *gradients)] for _ in range(self.count)]


class OneScale:
    """Loss seed of a schedule without an external loss, and the factor that rescales its gradients."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.machine, self.device = machine, device

    def seed(self) -> OnGpu:
        return self.machine.kernel("seed", self.device)

    def factor(self, gradient: OnGpu, seed: OnGpu) -> OnGpu:
        return self.machine.kernel("factor", self.device, gradient, seed)


class GpuSeed(LossSeed):
    """Loss seed that is produced by a kernel."""

    def __init__(self, scale: OneScale) -> None:
        self.value: Any = scale.seed()
        self._scale: Any = scale
        self._gradients = None


class GpuStep(PipeStep):
    """Step without random numbers, assembled from stand-ins."""

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)

    def run_until_rng_settled(self, forward: Any) -> Any:
        return forward(RngStreams({}, {}))


class GpuCutStep(CutStep):
    """Autograd node of a `GpuStep`."""

    def __init__(self, step: GpuStep, stages: Sequence[Layers], scale: OneScale) -> None:
        self.step: Any = step
        self.by_stage: Any = {stage.number: [stage.weight] for stage in stages}
        self._segments: Any = {stage.number: GpuSegment(stage, [stage.weight]) for stage in stages}
        self._observer, self._owners, self._agreed, self._kept = None, {}, ALONE, None
        self._seed = None if step.schedule.allows_external_loss else GpuSeed(scale)
        self.caller = CallerStreams(())


class Pipeline:
    """Stages on the given devices. Stages of one device share a module. A skip leads from the first to the last."""

    def __init__(
        self,
        machine: Machine,
        patch: pytest.MonkeyPatch,
        devices: Sequence[torch.device],
        executor: SerialExecutor,
        *,
        keep: str = "graph",
        strided: bool = False,
        sparse: bool = False,
        replaced: bool = False,
    ) -> None:
        patch.setattr(recompute, "generators_of", lambda _: [])
        self.machine, self.devices, self.keep = machine, devices, keep
        options = SimpleNamespace(strided=strided, sparse=sparse)
        modules = {device: nn.Module() for device in devices}
        for device, module in modules.items():
            module.register_buffer("count", machine.kernel("count", device))
        self.stages = [Layers(machine, i, device, modules[device], options) for i, device in enumerate(devices)]
        lock, last = StreamLock(), len(devices) - 1
        for stage in self.stages:
            stage.replay.serialize([m for d, m in modules.items() if devices.count(d) > 1], lock)
            stage.replaced = replaced and devices.count(stage.device) > 1
        routes = [Route("input", OUTSIDE, (0,)), *(Route(f"main {j}", j, (j + 1,)) for j in range(last))]
        routes.append(Route("output", last, (OUTSIDE,)))
        if last > 1:
            routes.append(Route("skip", 0, (last,)))
            self.stages[0].outputs = 2
        own_streams = executor.by_time or type(executor) is not SerialExecutor
        place = CudaStageDevice if own_streams else StageDevice
        self.plan = SimpleNamespace(
            places=tuple(place(device) for device in devices),
            executor=executor,
            entry_points=EntryPoints((EntryPoint(0, 0),), last + 1, last),
            stages=self.stages,
            wiring=Wiring(tuple(routes), len(devices)),
        )

    def forward(self, schedule: Schedule) -> Node:
        """Run the forward of a step, and return its node."""
        machine, first, last = self.machine, self.devices[0], self.devices[-1]
        scale: Any = OneScale(machine, last)
        step = GpuStep(
            plan=self.plan,
            schedule=schedule,
            mini_batch=OneInput(machine, machine.kernel("input", first), schedule.micro_batches),
            output=OneOutput(machine, last, schedule.micro_batches),
            keeps=[[self.keep] * schedule.micro_batches] * len(self.devices),
            ambient=ExecutionContext.capture(["cpu"]),
            name="",
        )
        return Node(machine, GpuCutStep(step, self.stages, scale))

    def train(self, schedule: Schedule, steps: int = 2) -> None:
        """Take steps with an optimizer. The output of the previous step is alive during the next one."""
        for _ in range(steps):
            node = self.forward(schedule)
            node.backward(self.machine.kernel("loss", self.devices[-1], node.output))
            for stage in self.stages:
                weight, count = stage.weight, stage.module.count
                self.machine.write("optimizer", weight, weight.gradient)
                weight.gradient = None
                count.read(self.machine.current_stream(count.device), "state_dict")
                del weight, count
        join_walk(self.plan.places)  # like the next step, before it reuses memory of the devices


def with_own_streams(machine: Machine, devices: Sequence[torch.device], stack: Any) -> None:
    """Make new streams current in this thread."""
    for device in dict.fromkeys(devices):
        stack.enter_context(machine.stream(Stream(device)))  # type: ignore[arg-type]
