"""Steps as CUDA graphs: after two equal steps, the walks of a step are recorded once and then replayed.

    steps 1, 2     ordinary walks, of one form (`step_form`)
    step 3         forward:   copy the mini-batch in -> record the walk, replay it -> join the outputs
                   backward:  copy the gradients in  -> record the walk, replay it -> copy the gradients out
    steps 4 ...    the same, without recording

Both graphs share one memory. Work that varies from step to step stays outside of them: cutting the mini-batch, weights
of losses, the assumed loss gradient, joining, `.grad`. A schedule that begins backward early has one graph for all.

Within a recording, the modules have aliases of their parameters. The engine makes a gradient wait for the stream on
which its parameter was first used, which is a stream of the caller, and a capture cannot contain that one.

A backward that does not fit the recorded one runs the forward of its step again, in the ordinary way: with a retained
graph, or gradients of other outputs. A step that is still waiting for its backward keeps the recording to itself.
"""

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.autograd import CutFunction, silence_unused_hooks
from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, ModuleChangedError, UsageError
from torchweft.core.pytree import flatten
from torchweft.core.recording import CudaRecorder, GraphRecorder
from torchweft.core.rng import RandomUse, RngStreams
from torchweft.core.segment import Gradients, versions
from torchweft.core.torch_internals import foreach_copy
from torchweft.pipeline.loss import LossStage
from torchweft.pipeline.microbatch import storage_id
from torchweft.pipeline.stage import ModuleScan, Stage
from torchweft.pipeline.step import CutStep, ForwardWalk
from torchweft.pipeline.step_form import changed_attribute, form_of, marks_of, modules_of, obstacle_to, passing_obstacle

MakeRecorder = Callable[[], GraphRecorder]
Missing = tuple[bool, ...]  # which of some gradients are None
_EQUAL_STEPS = 2
_HIDDEN = "a layer computes with parameters that are not attributes of its modules"
_REMEDY = "use executor='auto', which then takes another way, or 'serial'"
_RECORDINGS, _FORMS = 4, 16  # kept at most; each recording has memory for a whole step


class RecordingError(Exception):
    """A step cannot be recorded. The message is the reason."""


def recorder_kind(devices: Sequence[torch.device]) -> MakeRecorder | None:
    """Make recorders of work on these devices. None if some have no CUDA graphs."""
    return (lambda: CudaRecorder(devices)) if all(device.type == "cuda" for device in devices) else None


class FixedTensors:
    """Tensors with fixed memory, which a recording reads. They have the layout of the tensors that are given first."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        self._form = [_layout_of(x) for x in given]
        once = [None if x is None else _distinct(x) for x in given]
        self._memory = [None if x is None else x.new_empty_strided(x.shape, x.stride()) for x in once]
        # `data` has a version of its own. A `load` must not look like a write of a layer to an input.
        self.tensors = [
            None if x is None or memory is None else memory.data.as_strided(x.shape, x.stride(), 0)
            for x, memory in zip(given, self._memory, strict=True)
        ]

    def load(self, given: Sequence[Tensor | None]) -> bool:
        """Take the numbers of these tensors. False if they have another layout."""
        if [_layout_of(x) for x in given] != self._form:
            return False
        present = [_distinct(x) for x in given if x is not None]
        if present:
            foreach_copy([memory for memory in self._memory if memory is not None], present)
        return True


def _layout_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _distinct(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, once each: without the axes along which it is expanded."""
    once = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.detach().as_strided(once, tensor.stride(), tensor.storage_offset())


class RecordedWeights:
    """The parameters of some modules, and aliases of them: leaves of their own, with the same memory."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._modules = [module for _, module in modules_of(stages)]
        self.originals = {id(p): p for module in self._modules for p in module._parameters.values() if p is not None}
        self._aliases = {key: nn.Parameter(p.data, p.requires_grad) for key, p in self.originals.items()}

    def aliases_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [self._aliases.get(id(parameter), parameter) for parameter in parameters]

    def record(self, recorder: GraphRecorder, work: Callable[[], None]) -> Callable[[], None]:
        """Record work of the modules on the aliases. Raises RecordingError."""
        tables = [module._parameters for module in self._modules]
        before = [dict(table) for table in tables]
        for table in tables:
            table.update({key: None if p is None else self._aliases[id(p)] for key, p in table.items()})
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "stage .* computes with trainable tensors", UserWarning)
                replay = recorder.record(work)
        except UserWarning as error:
            raise RecordingError(_HIDDEN) from error
        except RuntimeError as error:
            raise RecordingError(_cause(error)) from error
        finally:
            for table, own in zip(tables, before, strict=True):
                table.update(own)
        if any(alias.data_ptr() != self.originals[key].data_ptr() for key, alias in self._aliases.items()):
            raise RecordingError("a layer moves its weights to other memory, as nn.LSTM does")
        return replay

    @contextmanager
    def with_buffers_kept(self) -> Generator[None]:
        """At the end, the buffers have the numbers of the beginning."""
        buffers = {id(b): b for module in self._modules for b in module._buffers.values() if b is not None}
        before = [buffer.clone() for buffer in buffers.values()]
        try:
            yield
        finally:
            for buffer, own in zip(buffers.values(), before, strict=True):
                buffer.data.copy_(own)  # a graph that saved the buffer must not notice


class StepRecording:
    """The recorded walks of steps of one form. `expected` says, for gradients of the outputs that are None or not,
    which gradients of the step are None."""

    def __init__(self, recorder: GraphRecorder, stages: Sequence[Stage], expected: Mapping[Missing, Missing]) -> None:
        self._recorder, self._expected = recorder, expected
        self.weights = RecordedWeights(stages)
        self.walked = ForwardWalk({}, None, [])
        self._forward: tuple[FixedTensors, Callable[[], None]] | None = None
        self._backward: tuple[FixedTensors, Callable[[], None]] | None = None
        self._memory: set[int] = set()
        self._cut: CutStep | None = None  # the step that is recorded, until its backward is
        self._gradients: Sequence[Tensor | None] = ()
        self._user: weakref.ref[RecordedStep] | None = None
        self._claiming = threading.Lock()

    def claim(self, step: "RecordedStep") -> bool:
        """Reserve the static tensors for one step. False while another step still needs them for its backward."""
        with self._claiming:
            user = None if self._user is None else self._user()
            if user is not None and not user.done:
                return False
            self._user = weakref.ref(step)
            return True

    def forward(self, cut: CutStep, rng: RngStreams, seeds: Sequence[Gradients] | None) -> ForwardWalk:
        """Walk forward with the numbers of this step. Raises RecordingError in the first one."""
        batch = cut.step.mini_batch
        given: list[Tensor | None] = [*(batch.uploaded(cut.upload) if any(cut.step.plan.places) else batch.given)]
        flat = given + _flat(seeds or ())
        if self._forward is None:
            static = FixedTensors(flat)
            static.load(flat)
            inputs, early = static.tensors[: len(given)], static.tensors[len(given) :]
            replay = self._record_forward(cut, rng, inputs, None if seeds is None else _nested(early, seeds))
            self._forward = static, replay
        static, replay = self._forward
        static.load(flat)
        replay()
        return self.walked._replace(state=None)

    def _record_forward(
        self, cut: CutStep, rng: RngStreams, inputs: Sequence[Any], seeds: Sequence[Gradients] | None
    ) -> Callable[[], None]:
        plan = cut.step.plan
        static = replace(cut.step, mini_batch=cut.step.mini_batch.with_tensors(inputs))
        parameters = {stage: self.weights.aliases_of(owned) for stage, owned in cut.by_stage.items()}
        # With a search of the graphs: they must end at the aliases.
        functions = plan.searched if cut.step.tracked and plan.searched else plan.functions
        recorded = self._cut = CutStep(static, functions, parameters, None, {}, None)

        def work() -> None:
            self.walked = recorded.walk_forward(rng, seeds)

        replay = self.weights.record(self._recorder, work)
        if seeds is not None:
            self._check(self.walked.gradients, self._expected.values())
        leaves = [x for message in self.walked.left.values() for x in flatten(message.value)[0]]
        self._memory = {storage_id(x) for x in (*leaves, *inputs) if isinstance(x, Tensor)}
        return replay

    def backward(self, seeds: Sequence[Gradients], missing: Missing) -> Sequence[Tensor | None] | None:
        """The gradients of the step, in static tensors. None if the recorded walk does not fit. Raises RecordingError
        in the first one."""
        flat = _flat(seeds)
        if self._backward is None:
            if missing not in self._expected:
                return None
            static = FixedTensors(flat)
            static.load(flat)
            self._backward = static, self._record_backward(_nested(static.tensors, seeds), missing)
        static, replay = self._backward
        if not static.load(flat):
            return None
        replay()
        return self._gradients

    def _record_backward(self, seeds: Sequence[Gradients], missing: Missing) -> Callable[[], None]:
        cut, state = self._cut, self.walked.state
        assert cut is not None and state is not None  # a recording that failed is dropped
        # Only the graphs are needed from now on.
        self._cut, self.walked = None, self.walked._replace(state=None)

        def work() -> None:
            self._gradients = cut.walk_backward(state, seeds, retain=False)

        replay = self.weights.record(self._recorder, work)
        self._check(self._gradients, [self._expected[missing]])
        return replay

    def _check(self, gradients: Sequence[Tensor | None], expected: Any) -> None:
        if _missing(gradients) not in expected:
            raise RecordingError(_HIDDEN)
        if any(x is not None and x.layout is not torch.strided for x in gradients):
            raise RecordingError("gradients are sparse, so their size depends on the mini-batch")

    def copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, with copies of those that the next replay overwrites."""
        return [x.clone() if storage_id(x) in self._memory else x for x in tensors]


def _missing(gradients: Sequence[Tensor | None]) -> Missing:
    return tuple([x is None for x in gradients])


def _flat(gradients: Sequence[Gradients]) -> list[Tensor | None]:
    return [x for of_result in gradients for x in of_result]


def _nested(flat: Sequence[Tensor | None], like: Sequence[Gradients]) -> list[Gradients]:
    rest = iter(flat)
    return [[next(rest) for _ in of_result] for of_result in like]


def _cause(error: BaseException) -> str:
    """The first error of a chain in one line, after the layer in which it was raised."""
    notes: list[str] = [*getattr(error, "__notes__", ())]
    while error.__context__ is not None:
        error = error.__context__
        notes += getattr(error, "__notes__", ())
    where = next((note.removeprefix("torchweft: ") for note in notes if "in layer" in note), "a walk")
    line = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
    return f"{where} does what a CUDA graph cannot hold, such as reading a number on the host ({line})"


class RecordedStep:
    """The node of autograd of a step that is replayed. `cut` is the same step in the ordinary way."""

    def __init__(
        self,
        cut: CutStep,
        recording: StepRecording,
        seeds: Sequence[Gradients] | None,
        counts: dict[str, int],
        reject: Callable[[str], None],
    ) -> None:
        self._cut, self._recording, self._seeds, self._counts, self._reject = cut, recording, seeds, counts, reject
        self._replayed = self.done = False
        self._versions: list[int] = []

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        step = self._cut.step
        self._cut.enter()
        tensors, tracked = step.output.gather(step.run_until_rng_settled(self._walk))
        if self._replayed:
            tensors = self._recording.copied(tensors)
            self._versions = versions(self._recording.weights.originals.values())
            self.done = not step.tracked
            self._counts["replayed"] += self.done or self._seeds is not None
        return tensors, tracked

    def _walk(self, rng: RngStreams) -> list[Any]:
        walked = None
        if rng.quiet:
            try:
                walked = self._recording.forward(self._cut, rng, self._seeds)
            except RecordingError as error:
                self._reject(str(error))
        else:  # the second call, because a layer that drew nothing before has drawn now
            self._reject("")
        self._replayed = walked is not None
        self.done = not self._replayed
        return self._cut.keep(walked or self._cut.walk_forward(rng, self._seeds))

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`. Raises BackwardTwiceError or ModuleChangedError."""
        cut = self._cut
        if not self._replayed:
            return cut.backward(gradients, retain=retain)
        if self._seeds is not None:
            result = cut.backward(gradients, retain=retain)
            self.done |= not retain
            # With a factor of one, these are the static tensors themselves.
            static = all(x is y for x, y in zip(result, self._recording.walked.gradients, strict=True))
            return self._in_place(_copies(result) if static else result)
        if self.done:
            raise BackwardTwiceError(BACKWARD_TWICE)
        if versions(self._recording.weights.originals.values()) != self._versions:
            raise ModuleChangedError(
                "a parameter was written to (by an optimizer's step, say) between the forward of a step and its "
                "backward, which a CUDA graph reads again; change it after backward, or set pipe.executor to 'serial'"
            )
        with cut.caller.restored():
            result = None if retain else self._replay_backward(gradients)
        self.done = True
        self._counts["ordinary" if result is None else "replayed"] += 1
        if result is None:
            self._replayed = False
            with self._recording.weights.with_buffers_kept():
                cut.forward()
            return cut.backward(gradients, retain=retain)
        silence_unused_hooks([x for x, gradient in zip(cut.tensors, result, strict=True) if gradient is None])
        return self._in_place(result)

    def _replay_backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        seeds = self._cut.step.output.scatter_gradients(gradients)
        try:
            static = self._recording.backward(seeds, _missing(gradients))
        except RecordingError as error:
            return self._reject(str(error))
        return None if static is None else _copies(static)

    def _in_place(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients on the devices of their tensors. An input can have been on the CPU."""
        return [None if g is None else g.to(x.device) for x, g in zip(self._cut.tensors, gradients, strict=True)]


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    copies = [None if x is None else torch.empty_like(x) for x in tensors]
    if present := [x for x in tensors if x is not None]:
        foreach_copy([x for x in copies if x is not None], present)
    return copies


@dataclass(eq=False)
class _Form:
    """Steps of one form: how many ordinary ones ended well, and the gradients that they had."""

    form: tuple[Any, ...]
    steps: int = 0
    expected: dict[Missing, Missing] = field(default_factory=dict[Missing, Missing])
    recording: StepRecording | None = None
    failure: str = ""  # of a recording


class ObservedStep:
    """An ordinary step, watched for the recording of later ones: it must end well, and leave its layers unchanged."""

    def __init__(self, cut: CutStep, stages: Sequence[Stage], form: _Form, changes: Counter[str]) -> None:
        self._cut, self._stages, self._form, self._changes = cut, stages, form, changes

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        before = marks_of(self._stages)
        result = self._cut.forward()
        self._change = changed_attribute(self._stages, before)
        if not self._cut.step.tracked:
            self._note((), ())
        return result

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> Sequence[Tensor | None]:
        """See `CutFunction.backward`."""
        result = self._cut.backward(gradients, retain=retain)
        self._note(_missing(gradients), _missing(result))
        return result

    def _note(self, missing: Missing, result: Missing) -> None:
        if self._change:
            self._changes[self._change] += 1
        else:
            self._changes.clear()
            self._form.steps += 1
            self._form.expected[missing] = result


class RecordedSteps:
    """The recordings of one pipe. `strict`: an obstacle is an error, unless a step was replayed before."""

    def __init__(
        self, stages: Sequence[Stage], loss: LossStage | None, uses: Sequence[RandomUse], *, strict: bool
    ) -> None:
        self._stages, self._loss, self._uses, self._strict = stages, loss, uses, strict
        self.make = recorder_kind([stage.device for stage in stages])
        self._forms: list[_Form] = []  # the one of the last step comes last
        self._changes: Counter[str] = Counter()  # of layers by themselves, in the ordinary steps since one without any
        self.counts = {"replayed": 0, "ordinary": 0}  # steps
        self._reason = ""  # why the last ordinary step was not replayed

    def choose(self, cut: CutStep, scans: Mapping[int, ModuleScan], *, observed: bool) -> tuple[CutFunction, bool]:
        """The way to run this step, and whether steps like it can be replayed. Raises UsageError if it is strict."""
        if reason := passing_obstacle(observed):
            return self._ordinary(cut, reason), True
        stages = [*self._stages, *([self._loss] if self._loss is not None and len(self._stages) in scans else [])]
        seeds = cut.seeds()
        key = *form_of(cut.step, stages), _missing(_flat(seeds or ()))
        form = next((known for known in self._forms if known.form == key), None) or _Form(key)
        self._forms = [*[known for known in self._forms if known is not form], form][-_FORMS:]
        if form.recording is None:
            reason = form.failure or obstacle_to(cut.step, stages, scans, self._uses)
            for change, times in self._changes.items():
                # Not at once, because layers fill caches in their first step.
                reason = reason or (f"{change} in every call" if times > _EQUAL_STEPS else "")
            if self.make is None or reason:
                reason = reason if self.make else "a stage is not on a CUDA device"
                self._refuse(reason)
                return self._ordinary(cut, reason), False
            if form.steps < _EQUAL_STEPS:
                steps = f"{form.steps} of {_EQUAL_STEPS} equal steps were seen"
                return ObservedStep(self._ordinary(cut, steps), stages, form, self._changes), True
            form.recording = StepRecording(self.make(), stages, form.expected)
            for old in [known for known in self._forms if known.recording is not None][:-_RECORDINGS]:
                old.recording = None
        step = RecordedStep(cut, form.recording, seeds, self.counts, lambda reason: self._reject(form, reason))
        if not form.recording.claim(step):
            return self._ordinary(cut, "an earlier step still waits for its backward"), True
        return step, True

    def statistics(self) -> dict[str, Any]:
        return {"cuda_graph": {**self.counts, "reason": self._reason}} if any(self.counts.values()) else {}

    def _ordinary(self, cut: CutStep, reason: str) -> CutStep:
        self.counts["ordinary"] += 1
        self._reason = reason
        return cut

    def _reject(self, form: _Form, reason: str) -> None:
        form.recording, form.failure, self._reason = None, reason, reason
        if reason:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        if self._strict and not self.counts["replayed"]:
            raise UsageError(f"executor='cuda_graph' cannot record the steps of this pipe: {reason}; {_REMEDY}")
