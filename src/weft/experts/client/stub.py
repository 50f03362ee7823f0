"""Client stub of one expert: description, forward, backward, commit and discard, each under one deadline.

    forward    key ──> the server keeps graph and inputs, if it is asked to and has a budget for them, and says so
    backward   key ──> kept: only the gradients are sent; and where the inputs are gone meanwhile, the whole call
    again      key+1   another backward of the same forward: a step of its own, with the same random numbers
    in parts   key/2   of the third part of a call that has more rows than the server takes at a time
    commit     the name of the mini-batch is its key

A call that steps bears a fence: the fencing token of the owner that the directory names (a replaced owner refuses), and
for a commit the incarnation of the server that holds the sum. An answer of a replaced owner is not used. The signature
checks a call before anything is sent, and an answer before it is used.
"""

import os
import secrets
import socket
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import SpecError, WeftError, listed
from weft.core.pytree import difference, flatten, structure_paths
from weft.experts.client.retry import FixedResolver, RetryingCaller
from weft.experts.compression import Policy
from weft.experts.discovery.fencing import number_of, replaced
from weft.experts.errors import (
    CommitError,
    DeadlineError,
    InputsGoneError,
    MalformedError,
    NotOwnerError,
    StepsLostWarning,
)
from weft.experts.schema import FlatSchema, NestedSchema, call_schema, output_schema
from weft.experts.task import REPEATED
from weft.experts.wire import Call, Header, Kind, Received
from weft.experts.wire.service import Description, Receipt, read_description, read_receipt

_PAST_INCARNATIONS = 16  # whose late answers are recognised


@dataclass(frozen=True)
class CallOptions:
    """See `RemoteExpert`."""

    timeout: float = 30.0
    compression: Policy = field(default_factory=Policy)
    client: str = ""
    accumulate: bool = False
    keep_graph: bool = False


class ExpertStub:
    """The calls of one expert. Thread-safe."""

    def __init__(self, uid: str, caller: RetryingCaller, options: CallOptions) -> None:
        self.uid = uid
        self.caller = caller
        self.options = options
        self.requests = RequestBuilder(options.client, options.compression)
        self.mini_batch = PendingCommit(uid)
        self.progress = ExpertProgress(uid, caller.resolver)
        self._lock = threading.Lock()
        self._signature: Signature | None = None

    def describe(self, timeout: float | None = None) -> Description:
        """The server's current description of the expert."""
        seconds = self.options.timeout if timeout is None else timeout
        found = read_description(self.caller.call(self.requests.info(self.uid), seconds).header.data)
        self.progress.update(found.steps, Receipt(found.durable, found.incarnation))
        return found

    def signature(self, deadline: float) -> "Signature":
        """The expert's signature, requested by whoever calls first. Raises ``DeadlineError`` if time is over before."""
        if self._signature is None:
            self._signature = Signature(self.describe(self._left(deadline)))
        return self._signature

    def forward(self, inputs: Sequence[Tensor], key: "IdempotencyKey", deadline: float) -> list[Tensor]:
        """The flat outputs; in parts, where there are more rows than the server takes at a time."""
        signature = self.signature(deadline)
        parts = _split(inputs, signature.max_batch_size)
        keys = key.split(len(parts)) if len(parts) > 1 else [key]
        found: list[list[Tensor]] = []
        for part, own in zip(parts, keys, strict=True):
            answer = self._answer(self.requests.forward(self.uid, part, own), deadline)
            own.kept = answer.header.keep
            found.append(signature.results(answer, part[0].device))
        return found[0] if len(parts) == 1 else [torch.cat(outputs) for outputs in zip(*found, strict=True)]

    def backward(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], key: "IdempotencyKey") -> list[Tensor]:
        """One gradient per flat input. The expert steps, once for this key; or adds to the mini-batch."""
        deadline = time.monotonic() + self.options.timeout
        signature = self.signature(deadline)
        parts = _split([*inputs, *gradients], signature.max_batch_size)
        mini_batch = self.mini_batch if self.options.accumulate else None
        if len(parts) == 1:
            return self._backward(inputs, gradients, key, mini_batch, deadline)
        own = PendingCommit(self.uid) if signature.trained and mini_batch is None else None
        try:
            found = [
                self._backward(part[: len(inputs)], part[len(inputs) :], each, own or mini_batch, deadline)
                for part, each in zip(parts, key.split(len(parts)), strict=True)
            ]
            if own is not None:
                self.commit(own, deadline)
        except BaseException:
            if own is not None:
                self.discard(mini_batch=own)
            raise
        return [torch.cat(rows) for rows in zip(*found, strict=True)]

    def commit(self, mini_batch: "PendingCommit | None" = None, deadline: float | None = None) -> bool:
        """One step with the gradients of the open mini-batch; False if there are none."""
        mini_batch = mini_batch or self.mini_batch
        incarnation = mini_batch.ready()
        if incarnation is None:
            return False
        call = self.requests.commit(self.uid, mini_batch.name, incarnation, self.caller.resolver.token())
        try:
            self._answer(call, time.monotonic() + self.options.timeout if deadline is None else deadline)
        except CommitError as error:
            mini_batch.failed(error)
            raise
        self._renew(mini_batch)
        return True

    def discard(self, timeout: float = 0.0, mini_batch: "PendingCommit | None" = None) -> None:
        """Begin the next mini-batch; tell the server to drop this one, and wait so long for its answer."""
        mini_batch = mini_batch or self.mini_batch
        self._renew(mini_batch)
        if mini_batch.begun:
            sent = self.caller.send(self.requests.discard(self.uid, mini_batch.name), self.options.timeout)
            if sent is not None and timeout:
                wait([sent], min(timeout, self.options.timeout))

    def _renew(self, mini_batch: "PendingCommit") -> None:
        """Begin the next, after this one; what still comes of this one does not touch the next."""
        with self._lock:
            if self.mini_batch is mini_batch:
                self.mini_batch = PendingCommit(self.uid)

    def _backward(
        self,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        key: "IdempotencyKey",
        mini_batch: "PendingCommit | None",
        deadline: float,
    ) -> list[Tensor]:
        """One call, whose gradients of parameters are added to this mini-batch; None: they are a step."""
        name = "" if mini_batch is None else mini_batch.name
        token = self.caller.resolver.token()
        call, whole = self.requests.backward(self.uid, inputs, gradients, key, name, token)
        try:
            try:
                answer = self._answer(call, deadline)
            except InputsGoneError:
                answer = self._answer(whole, deadline)
        except BaseException as error:
            if mini_batch is not None:
                mini_batch.failed(error)
            raise
        if mini_batch is not None:
            mini_batch.added(read_receipt(answer.header.data).incarnation)
        return self.signature(deadline).input_gradients(answer, inputs)

    def _answer(self, call: Call, deadline: float) -> Received:
        return self.caller.call(call, self._left(deadline), self.progress.accept)

    def _left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(
                f"a call of expert {self.uid!r} was not sent: its description is requested first, which took all of "
                f"the {self.options.timeout:g} s"
            )
        return left


def _split(tensors: Sequence[Tensor], rows: int) -> list[Sequence[Tensor]]:
    """The parts of a call, each of at most so many rows."""
    if not tensors or tensors[0].shape[0] <= rows:
        return [tensors]
    count = -(-tensors[0].shape[0] // rows)
    return [[tensor[part * rows : (part + 1) * rows] for tensor in tensors] for part in range(count)]


@dataclass(eq=False, slots=True)
class IdempotencyKey:
    """Key of a forward and its backward: by it a server knows a repetition, and draws the same random numbers for both.

    ``text`` is sent. ``keep``: the server is asked to keep graph and inputs; ``kept``: it has said that it holds the
    inputs. ``evaluation``: the module runs as after ``eval()``, in forward and backward.
    """

    keep: bool = False
    evaluation: bool = False
    text: str = field(default_factory=partial(secrets.token_hex, 16))  # not of the user's generators
    kept: bool = False
    _parts: "list[IdempotencyKey]" = field(default_factory=list["IdempotencyKey"])

    def again(self) -> "IdempotencyKey":
        """The key of one more backward of the same forward."""
        first, _, number = self.text.partition(REPEATED)
        return IdempotencyKey(evaluation=self.evaluation, text=f"{first}{REPEATED}{int(number or 0) + 1}")

    def split(self, count: int) -> "list[IdempotencyKey]":
        """The keys of so many parts of a call, the same ones for its forward and its backward."""
        if len(self._parts) != count:
            first, repeated, number = self.text.partition(REPEATED)
            texts = [f"{first}/{part}{repeated}{number}" for part in range(count)]
            self._parts = [IdempotencyKey(self.keep, self.evaluation, text) for text in texts]
        return self._parts


class RequestBuilder:
    """Calls of any expert, under the client's name. ``token``: the fencing token of the owner."""

    def __init__(self, client: str, compression: Policy) -> None:
        self.client = client or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._header = partial(Header, client=self.client)
        self._choose = lru_cache(16)(compression.choose)

    def info(self, uid: str) -> Call:
        """Request the description of an expert."""
        return Call(self._header(Kind.INFO, uid=uid))

    def forward(self, uid: str, inputs: Sequence[Tensor], key: IdempotencyKey) -> Call:
        """Request flat outputs."""
        reply = self._choose("outputs", 1)[0]
        header = self._header(
            Kind.FORWARD, uid=uid, key=key.text, keep=key.keep, evaluation=key.evaluation, reply=reply
        )
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
        """Request input gradients: the call to send first, and the whole one, for a server without the inputs."""
        header = self._header(
            Kind.BACKWARD,
            uid=uid,
            key=key.text,
            evaluation=key.evaluation,
            mini_batch=mini_batch,
            reply=self._choose("input_gradients", 1)[0],
            data=Receipt(None, 0, token).to_bytes(),
        )
        ways = self._choose("output_gradients", len(gradients))
        whole = Call(header, [*inputs, *gradients], [*self._choose("inputs", len(inputs)), *ways])
        return (Call(header._replace(keep=True), gradients, ways), whole) if key.kept else (whole, whole)

    def commit(self, uid: str, mini_batch: str, incarnation: int, token: int) -> Call:
        """Request one step with the sum of a mini-batch, which a server has if it is still of this incarnation."""
        data = Receipt(None, incarnation, token).to_bytes()
        return Call(self._header(Kind.COMMIT, uid=uid, key=mini_batch, mini_batch=mini_batch, data=data))

    def discard(self, uid: str, mini_batch: str) -> Call:
        """Request that a mini-batch is dropped."""
        return Call(self._header(Kind.DISCARD, uid=uid, mini_batch=mini_batch))


class PendingCommit:
    """One mini-batch, whose gradients wait at a server for its commit. Thread-safe."""

    def __init__(self, uid: str) -> None:
        self.name = uuid.uuid4().hex
        self._uid = uid
        self._lock = threading.Lock()
        self._incarnations: set[int] = set()
        self._failure: str | None = None

    def added(self, incarnation: int) -> None:
        """A gradient was added at this incarnation of the server."""
        with self._lock:
            self._incarnations.add(incarnation)

    def failed(self, error: BaseException) -> None:
        """A gradient was not added."""
        with self._lock:
            self._failure = self._failure or f"{type(error).__name__}: {error}"

    @property
    def begun(self) -> bool:
        """Whether a server may have something of it."""
        return bool(self._incarnations) or self._failure is not None

    @property
    def fault(self) -> str | None:
        """Why gradients are missing; None if none are."""
        return "its server was restarted in the middle of it" if len(self._incarnations) > 1 else self._failure

    def ready(self) -> int | None:
        """The incarnation at which to commit; None if nothing was added. Raises ``CommitError``."""
        with self._lock:
            if why := self.fault:
                text = f"a mini-batch of expert {self._uid!r} is not whole: {why}. Call discard() and run it again"
                raise CommitError(text)
            return next(iter(self._incarnations), None)


class ExpertProgress:
    """Optimizer steps of one expert, and which of them are durable, as of its last answer. Thread-safe.

    steps 41, incarnation 7 ── answers may overtake each other ──> the larger number
    steps 35, incarnation 8 ── the server was restarted ─────────> what it says now; fewer: a `StepsLostWarning`
    steps 42, incarnation 7 ── a late answer of the one before ──> ignored
    """

    def __init__(self, uid: str, resolver: FixedResolver) -> None:
        self.steps: int | None = None
        self.receipt: Receipt | None = None
        self.steps_lost = 0
        self._uid, self._resolver = uid, resolver
        self._past: deque[int] = deque(maxlen=_PAST_INCARNATIONS)
        self._lock = threading.Lock()

    @property
    def durable_step(self) -> int | None:
        """The last step that a crash of the server does not lose; None: unknown, or none."""
        receipt = self.receipt
        return None if receipt is None else receipt.durable

    def accept(self, answer: Received) -> None:
        """Take the progress from an answer. Raises ``NotOwnerError`` for that of an owner which was replaced."""
        receipt, known = read_receipt(answer.header.data), self._resolver.token()
        if known and replaced(receipt.token, known):
            raise NotOwnerError(
                f"expert {self._uid!r} was answered by a server with fencing token {number_of(receipt.token)}, but its "
                f"owner has {number_of(known)}: its step does not count, and the call has to be sent to the owner"
            )
        self.update(answer.header.step, receipt)

    def update(self, steps: int, receipt: Receipt) -> None:
        """Note an answer. Warns with `StepsLostWarning` if the expert has gone back."""
        with self._lock:
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
        if lost:
            warnings.warn(StepsLostWarning(self._uid, before, steps, self._address()), stacklevel=2)

    def _address(self) -> str:
        try:
            return self._resolver.transport(0, None).address
        except WeftError:  # the directory has no server any more
            return "an unknown address"


class Signature:
    """What one expert takes and returns. Values may be nested in other containers of the same names."""

    def __init__(self, description: Description) -> None:
        self.name = description.name
        self.trained = description.trained
        self.max_batch_size = description.max_batch_size
        self.inputs: NestedSchema = call_schema(description.name, description.args, description.kwargs)
        self.outputs: NestedSchema = output_schema(description.name, description.outputs)
        self.tracked = [spec.dtype.is_floating_point or spec.dtype.is_complex for spec in self.outputs.specs]
        self._columns = FlatSchema(self.inputs.columns())
        self._answers = FlatSchema(self.outputs.columns())
        self._paths = structure_paths(self.inputs.structure, "call")
        self._plain = self._paths == [f"call[0][{place}]" for place in range(len(self.inputs.specs))]

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in order; under autocast cast to the schema. Raises one ``SpecError``."""
        where = f"expert {self.name!r}"
        tensors = self._tensors(args, kwargs, where)
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            tensors = [
                x.to(spec.dtype)
                if isinstance(x, Tensor) and x.is_floating_point() and spec.dtype.is_floating_point
                else x
                for x, spec in zip(tensors, self.inputs.specs, strict=True)
            ]
        self._columns.check(tensors, where)
        return tensors

    def _tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> list[Any]:
        """The leaves where tensors are wanted. Raises ``SpecError`` if the call is nested otherwise."""
        if self._plain and not kwargs and len(args) == len(self.inputs.specs) and all(type(x) is Tensor for x in args):
            return list(args)  # the common case, and on the path of every call
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
            raise SpecError(listed(f"{where} takes only these constants:", faults))
        return [leaves[place] for place in self.inputs.places]

    def results(self, answer: Received, device: torch.device, columns: FlatSchema | None = None) -> list[Tensor]:
        """The flat outputs. Raises ``MalformedError`` if they are not what the expert said it returns."""
        tensors = answer.tensors()
        try:
            (columns or self._answers).check(tensors, f"the answer of expert {self.name!r}")
        except SpecError as error:
            raise MalformedError(str(error), reason="answer") from None
        return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]

    def input_gradients(self, answer: Received, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One gradient per flat input, like it in shape, dtype and device. Raises as `results`."""
        found = self.results(answer, torch.device("cpu"), self._columns)
        if any(gradient.shape != tensor.shape for gradient, tensor in zip(found, inputs, strict=True)):
            raise MalformedError(f"expert {self.name!r} returned gradients of other shapes", reason="shape")
        return [g.to(device=x.device, dtype=x.dtype) for g, x in zip(found, inputs, strict=True)]
