"""Client stub of one expert: the calls of description, forward, backward, commit and discard, under one deadline.

    forward    key ──> the server keeps graph and inputs if requested and within its budget, and reports it
    backward   key ──> kept: only the gradients are sent; if the server has evicted the inputs, the whole call
    again      key+1   another backward of the same forward: a separate step, with the same random numbers
    in parts   key/2   third part of a call with more rows than the server accepts at a time
    commit     the name of the mini-batch is its key

A call that steps has a fence: the fencing token of the owner in the directory, which a replaced owner rejects. A commit
also has the incarnation of the server that holds the sum. Answers of a replaced owner are rejected. The signature
checks a call before it is sent, and an answer before it is used.
"""

import os
import secrets
import socket
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from torchweft.core.errors import SpecError, WeftError, join_faults
from torchweft.core.pytree import difference, flatten, structure_paths
from torchweft.experts import errors
from torchweft.experts.client.calls import FixedResolver, RemoteCall, RetryingCaller, Steps, run_steps
from torchweft.experts.compression import Policy
from torchweft.experts.discovery.fencing import number_of, replaced
from torchweft.experts.schema import FlatSchema, NestedSchema, call_schema, output_schema
from torchweft.experts.task import REPEATED
from torchweft.experts.wire import Call, Header, Kind, Received
from torchweft.experts.wire.service import Description, StepReceipt, read_description, read_receipt

Use = Callable[[list[Tensor]], Any]
_PAST_INCARNATIONS = 16  # number of past incarnations whose delayed answers are recognised


@dataclass(frozen=True)
class CallOptions:
    """See `RemoteExpert`."""

    timeout: float = 30.0
    compression: Policy = field(default_factory=Policy)
    client: str = ""
    accumulate: bool = False
    keep_graph: bool = False


class ExpertStub:
    """The calls of one expert, as `Steps`. Thread-safe."""

    def __init__(
        self, uid: str, caller: RetryingCaller, options: CallOptions, requests: "RequestBuilder | None" = None
    ) -> None:
        self.uid, self.caller, self.options = uid, caller, options
        self.requests = requests or RequestBuilder(options.client, options.compression)
        self.mini_batch = PendingCommit(uid)
        self.progress = ExpertProgress(uid, caller.resolver)
        self._lock = threading.Lock()
        self.loaded: Signature | None = None

    def describe(self, seconds: float) -> Steps[Description]:
        call = RemoteCall(self.requests.info(self.uid), self.caller, time.monotonic() + seconds)
        yield [call]
        description = read_description(call.value.header.data)
        self.progress.update(description.steps, StepReceipt(description.durable, description.incarnation))
        return description

    def signature(self, deadline: float) -> Steps["Signature"]:
        # Without a lock: two first calls at once both request the same description, and neither waits for the other.
        if self.loaded is None:
            self.loaded = Signature((yield from self.describe(self._remaining_seconds(deadline))))
        return self.loaded

    def known_signature(self, deadline: float) -> "Signature":
        """The signature. Waits for its description at the first call."""
        return self.loaded or run_steps(self.signature(deadline))

    def forward(self, inputs: Sequence[Tensor], key: "IdempotencyKey", deadline: float) -> Steps[list[Tensor]]:
        """The flat outputs. Sends parts if there are more rows than the server accepts at a time."""
        signature = self.loaded or (yield from self.signature(deadline))
        self._remaining_seconds(deadline)
        if not inputs or inputs[0].shape[0] <= signature.max_batch_size:
            call = self.forward_call(inputs, key, signature, deadline)
            yield (call,)
            return call.value
        parts = _split_rows(inputs, signature.max_batch_size)
        keys = key.for_parts(len(parts))
        calls = [self.forward_call(*part, signature, deadline) for part in zip(parts, keys, strict=True)]
        yield calls
        return [torch.cat(rows) for rows in zip(*(call.value for call in calls), strict=True)]

    def backward(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], key: "IdempotencyKey"
    ) -> Steps[list[Tensor]]:
        """One gradient per flat input. The expert steps once for this key, or adds to the mini-batch."""
        deadline = time.monotonic() + self.options.timeout
        signature = yield from self.signature(deadline)
        parts = _split_rows([*inputs, *gradients], signature.max_batch_size)
        mini_batch, temporary = self.mini_batch if self.options.accumulate else None, None
        if len(parts) > 1 and signature.trained and mini_batch is None:
            # Parts that each step would change the weights between them. They accumulate in a mini-batch of this call
            # instead, and its commit is the one step.
            mini_batch = temporary = PendingCommit(self.uid)
        keys = key.for_parts(len(parts)) if len(parts) > 1 else [key]
        name, add = ("", None) if mini_batch is None else (mini_batch.name, mini_batch.record_gradient)
        try:
            calls: list[RemoteCall] = []
            for part, part_key in zip(parts, keys, strict=True):
                arguments = part[: len(inputs)], part[len(inputs) :], part_key, signature, deadline
                calls.append(self.backward_call(*arguments, name, add))
                # One after another, so that the order of the terms of their sum is fixed, and with it its rounding.
                yield calls[-1:]
            if temporary is not None:
                yield from self.commit(temporary, deadline)
        except BaseException as error:
            if mini_batch is not None:
                mini_batch.record_failure(error)
            if temporary is not None:
                self.discard(mini_batch=temporary)
            raise
        if len(calls) == 1:
            return calls[0].value
        return [torch.cat(rows) for rows in zip(*(call.value for call in calls), strict=True)]

    def commit(
        self, mini_batch: "PendingCommit | None" = None, deadline: float | None = None, *, prepares: bool = False
    ) -> Steps[bool]:
        """A step with the sum of a mini-batch. ``prepares``: the server only checks the sum, and keeps it for that."""
        mini_batch = mini_batch or self.mini_batch
        incarnation = mini_batch.commit_incarnation()
        if incarnation is None:
            return False
        token = self.caller.resolver.owner_token()
        request = self.requests.commit(self.uid, mini_batch.name, incarnation, token, prepares=prepares)
        deadline = time.monotonic() + self.options.timeout if deadline is None else deadline
        try:
            yield [RemoteCall(request, self.caller, deadline, self.progress.accept)]
        except (errors.CommitError, errors.GradientError) as error:
            # The server does not hold the sum any more. Only after a commit can its name be used again.
            if prepares or isinstance(error, errors.CommitError):
                mini_batch.record_failure(error)
            raise
        if not prepares:
            self._begin_next(mini_batch)
        return True

    def discard(self, timeout: float = 0.0, mini_batch: "PendingCommit | None" = None) -> None:
        """Begin the next mini-batch. Asks the server to drop this one, and waits ``timeout`` seconds for its answer."""
        mini_batch = mini_batch or self.mini_batch
        self._begin_next(mini_batch)
        if mini_batch.has_begun:
            sent = self.caller.send(self.requests.discard(self.uid, mini_batch.name), self.options.timeout)
            if sent is not None and timeout:
                wait([sent], min(timeout, self.options.timeout))

    def _begin_next(self, mini_batch: "PendingCommit") -> None:
        # A backward that is still running holds the old object, so that its gradient cannot reach the next mini-batch.
        with self._lock:
            if self.mini_batch is mini_batch:
                self.mini_batch = PendingCommit(self.uid)

    def forward_call(
        self,
        inputs: Sequence[Tensor],
        key: "IdempotencyKey",
        signature: "Signature",
        deadline: float,
        use: Use | None = None,
        device: torch.device | None = None,
    ) -> RemoteCall:
        """One forward. Its value is the result of ``use`` for the flat outputs on ``device``, or the outputs."""

        def accept(answer: Received) -> Any:
            self.progress.accept(answer)
            key.note_kept(answer.header.keep)
            outputs = signature.read_outputs(answer, device or inputs[0].device)
            return outputs if use is None else use(outputs)

        return RemoteCall(self.requests.forward(self.uid, inputs, key), self.caller, deadline, accept)

    def backward_call(
        self,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        key: "IdempotencyKey",
        signature: "Signature",
        deadline: float,
        mini_batch: str = "",
        add: Callable[[int], object] | None = None,
        use: Use | None = None,
    ) -> RemoteCall:
        """One backward. ``add`` is called with the server's incarnation when the server has added the gradient."""

        def accept(answer: Received) -> Any:
            self.progress.accept(answer)
            if add is not None:  # first: the server has added the gradient, even if the answer is rejected here
                add(read_receipt(answer.header.data).incarnation)
            input_gradients = signature.read_input_gradients(answer, inputs)
            return input_gradients if use is None else use(input_gradients)

        token = self.caller.resolver.owner_token()
        call, complete_call = self.requests.backward(self.uid, inputs, gradients, key, mini_batch, token)
        return RemoteCall(call, self.caller, deadline, accept, complete_call if call is not complete_call else None)

    def _remaining_seconds(self, deadline: float) -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise errors.DeadlineError(
                f"a call of expert {self.uid!r} was not sent: its description is requested first, which took all of "
                f"the {self.options.timeout:g} s"
            )
        return seconds


def _split_rows(tensors: Sequence[Tensor], rows: int) -> list[Sequence[Tensor]]:
    if not tensors or tensors[0].shape[0] <= rows:
        return [tensors]
    count = -(-tensors[0].shape[0] // rows)
    return [[tensor[part * rows : (part + 1) * rows] for tensor in tensors] for part in range(count)]


@dataclass(eq=False, slots=True)
class IdempotencyKey:
    """Key of a forward and its backward. By it, a server recognises retries and draws the same numbers for both."""

    # ``keep``: asks the server to keep graph and inputs. ``kept``: the server has reported that it holds the inputs.
    keep: bool = False
    evaluation: bool = False
    text: str = field(default_factory=partial(secrets.token_hex, 16))  # not from the user's generators
    kept: bool = False
    _parts: "list[IdempotencyKey]" = field(default_factory=list["IdempotencyKey"])

    def request_graph(self) -> None:
        self.keep = True

    def note_kept(self, kept: bool) -> None:
        self.kept = kept

    def next_backward(self) -> "IdempotencyKey":
        first, _, number = self.text.partition(REPEATED)
        return IdempotencyKey(evaluation=self.evaluation, text=f"{first}{REPEATED}{int(number or 0) + 1}")

    def for_parts(self, count: int) -> "list[IdempotencyKey]":
        # Stored, because forward and backward must use the same keys.
        if len(self._parts) != count:
            first, repeated, number = self.text.partition(REPEATED)
            texts = [f"{first}/{part}{repeated}{number}" for part in range(count)]
            self._parts = [IdempotencyKey(self.keep, self.evaluation, text) for text in texts]
        return self._parts


class RequestBuilder:
    """Builds calls of any expert, under the client's name. ``token``: the fencing token of the owner."""

    def __init__(self, client: str, compression: Policy) -> None:
        self.client = client or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._header = partial(Header, client=self.client)
        self._choose = lru_cache(16)(compression.choose)

    def info(self, uid: str) -> Call:
        return Call(self._header(Kind.INFO, uid=uid))

    def forward(self, uid: str, inputs: Sequence[Tensor], key: IdempotencyKey) -> Call:
        reply, mode = self._choose("outputs", 1)[0], key.evaluation
        header = self._header(Kind.FORWARD, uid=uid, key=key.text, keep=key.keep, evaluation=mode, reply=reply)
        return Call(header, inputs, self._choose("inputs", len(inputs)))

    def backward(
        self,
        uid: str,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        key: IdempotencyKey,
        mini_batch: str,
        token: int,
    ) -> tuple[Call, Call]:
        """Return the call to send first, and the complete one if the inputs are gone."""
        header = self._header(
            Kind.BACKWARD,
            uid=uid,
            key=key.text,
            evaluation=key.evaluation,
            mini_batch=mini_batch,
            reply=self._choose("input_gradients", 1)[0],
            data=StepReceipt(None, 0, token).to_bytes(),
        )
        compressions = self._choose("output_gradients", len(gradients))
        complete = Call(header, [*inputs, *gradients], [*self._choose("inputs", len(inputs)), *compressions])
        return (Call(header._replace(keep=True), gradients, compressions) if key.kept else complete), complete

    def commit(self, uid: str, mini_batch: str, incarnation: int, token: int, *, prepares: bool = False) -> Call:
        kind, key = (Kind.PREPARE, "") if prepares else (Kind.COMMIT, mini_batch)
        data = StepReceipt(None, incarnation, token).to_bytes()
        return Call(self._header(kind, uid=uid, key=key, mini_batch=mini_batch, data=data))

    def discard(self, uid: str, mini_batch: str) -> Call:
        return Call(self._header(Kind.DISCARD, uid=uid, mini_batch=mini_batch))


class PendingCommit:
    """One mini-batch with gradients that wait at a server for a commit. Thread-safe."""

    def __init__(self, uid: str) -> None:
        self.name = uuid.uuid4().hex
        self._uid = uid
        self._lock = threading.Lock()
        self._incarnations: set[int] = set()
        self._failure: str | None = None

    def record_gradient(self, incarnation: int) -> None:
        with self._lock:
            self._incarnations.add(incarnation)

    def record_failure(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or f"{type(error).__name__}: {error}"

    @property
    def has_begun(self) -> bool:
        # Also after a failure: the server can have added the gradient before the answer was lost.
        return bool(self._incarnations) or self._failure is not None

    @property
    def fault(self) -> str | None:
        # A restarted server has lost the gradients that it held, so two incarnations mean that some are missing.
        return "its server was restarted in the middle of it" if len(self._incarnations) > 1 else self._failure

    def commit_incarnation(self) -> int | None:
        """The incarnation at which to commit, or None without gradients. Raises ``CommitError``."""
        with self._lock:
            if fault := self.fault:
                text = f"a mini-batch of expert {self._uid!r} is incomplete: {fault}. Call discard() and run it again"
                raise errors.CommitError(text)
            return next(iter(self._incarnations), None)


class ExpertProgress:
    """Optimizer steps of one expert, and which of them are durable, according to its answers. Thread-safe.

    steps 41, incarnation 7 ── answers can overtake each other ───────> the larger number
    steps 35, incarnation 8 ── the server was restarted ──────────────> the new number; fewer: a `StepsLostWarning`
    steps 42, incarnation 7 ── a delayed answer before the restart ───> ignored
    """

    def __init__(self, uid: str, resolver: FixedResolver) -> None:
        self.steps: int | None = None
        self.receipt: StepReceipt | None = None
        self.steps_lost = 0
        self._uid, self._resolver = uid, resolver
        self._past: deque[int] = deque(maxlen=_PAST_INCARNATIONS)
        self._lock = threading.Lock()

    @property
    def durable_step(self) -> int | None:
        receipt = self.receipt
        return None if receipt is None else receipt.durable

    def accept(self, answer: Received) -> None:
        """Note the progress in an answer. Raises ``NotOwnerError`` for an answer of a replaced owner."""
        receipt, known = read_receipt(answer.header.data), self._resolver.owner_token()
        if known and replaced(receipt.token, known):
            raise errors.NotOwnerError(
                f"expert {self._uid!r} was answered by a server with fencing token {number_of(receipt.token)}, but its "
                f"owner has {number_of(known)}: the step does not count, and the call must be sent to the owner"
            )
        self.update(answer.header.step, receipt)

    def update(self, steps: int, receipt: StepReceipt) -> None:
        """Note an answer. Warns with `StepsLostWarning` if the expert has lost steps."""
        with self._lock:
            # A delayed answer from before a restart. Its steps may be lost, and would hide that loss.
            if receipt.incarnation in self._past:
                return
            before = self.steps or 0
            if self.receipt is None or self.receipt.incarnation == receipt.incarnation:
                self.steps, lost = max(before, steps), 0
            else:
                self._past.append(self.receipt.incarnation)
                self.steps, lost = steps, max(0, before - steps)
                self.steps_lost += lost
            self.receipt = receipt
        if lost:  # outside of the lock: a filter can turn the warning into an error, or call this again
            warnings.warn(errors.StepsLostWarning(self._uid, before, steps, self._address()), stacklevel=2)

    def _address(self) -> str:
        try:
            return self._resolver.select_transport(0, None).address
        except WeftError:  # the directory lists no server any more
            return "an unknown address"


class Signature:
    """Arguments and results of one expert. Values can be nested in other containers with the same names."""

    def __init__(self, description: Description) -> None:
        self.name, self.trained = description.name, description.trained
        self.max_batch_size = description.max_batch_size
        self.inputs: NestedSchema = call_schema(description.name, description.args, description.kwargs)
        self.outputs: NestedSchema = output_schema(description.name, description.outputs)
        self.tracked = [spec.dtype.is_floating_point or spec.dtype.is_complex for spec in self.outputs.specs]
        self._columns = FlatSchema(self.inputs.columns())
        self._answers = FlatSchema(self.outputs.columns())
        self._paths = structure_paths(self.inputs.structure, "call")
        self._is_plain = self._paths == [f"call[0][{place}]" for place in range(len(self.inputs.specs))]

    def flatten_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in order, cast to the schema under autocast. Raises one ``SpecError``."""
        where = f"expert {self.name!r}"
        tensors = self._select_tensors(args, kwargs, where)
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            tensors = [
                x.to(spec.dtype)
                if isinstance(x, Tensor) and x.is_floating_point() and spec.dtype.is_floating_point
                else x
                for x, spec in zip(tensors, self.inputs.specs, strict=True)
            ]
        self._columns.check(tensors, where)
        return tensors

    def _select_tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> list[Any]:
        # The common case: positional tensors only. Flattening is a large part of the client's time per call.
        is_plain = self._is_plain and not kwargs and len(args) == len(self.inputs.specs)
        if is_plain and all(type(x) is Tensor for x in args):
            return list(args)
        ordered = {name: kwargs[name] for name in self.inputs.tree[1] if name in kwargs}
        leaves, structure = flatten((tuple(args), {**ordered, **kwargs}))
        if structure != self.inputs.structure and structure_paths(structure, "call") != self._paths:
            fault = difference(self.inputs.structure, structure, "the call (args, kwargs)")
            raise SpecError(f"{where} was called with other arguments: {fault}")
        faults = [
            f"{self._paths[place]} is {leaves[place]!r}, wanted {constant!r}"
            for place, _, constant in self.inputs.constants
            if type(leaves[place]) is not type(constant) or leaves[place] != constant
        ]
        if faults:
            raise SpecError(join_faults(f"{where} accepts only these constants:", faults))
        return [leaves[place] for place in self.inputs.places]

    def read_outputs(self, answer: Received, device: torch.device, columns: FlatSchema | None = None) -> list[Tensor]:
        tensors = answer.tensors()
        try:
            (columns or self._answers).check(tensors, f"the answer of expert {self.name!r}")
        except SpecError as error:
            raise errors.MalformedError(str(error), reason="answer") from None
        return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]

    def read_input_gradients(self, answer: Received, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One gradient per flat input, with its shape, dtype and device. Raises as `read_outputs`."""
        gradients = self.read_outputs(answer, torch.device("cpu"), self._columns)
        if any(gradient.shape != tensor.shape for gradient, tensor in zip(gradients, inputs, strict=True)):
            shapes, wanted = ([tuple(tensor.shape) for tensor in tensors] for tensors in (gradients, inputs))
            text = f"expert {self.name!r} returned gradients of shapes {shapes}, wanted {wanted}"
            raise errors.MalformedError(text, reason="shape")
        return [g.to(device=x.device, dtype=x.dtype) for g, x in zip(gradients, inputs, strict=True)]
