"""What is asked of one expert, as calls: info, forward, backward, commit, and what their answers tell beside tensors.

forward    repeatable        backward   with its key       commit   with the name of its mini-batch, which is its key
           └── all of them under one deadline and one rule of repetition, see `weft.experts.client.line` ──┘
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.core.turns import waiting
from weft.experts.client.accumulation import Accumulation
from weft.experts.client.arguments import option_faults
from weft.experts.client.fencing import client_name, fence, fenced
from weft.experts.client.key import Key
from weft.experts.client.line import Line
from weft.experts.client.progress import Progress
from weft.experts.client.signature import Signature
from weft.experts.compression import Policy
from weft.experts.errors import CommitError, InputsGoneError
from weft.experts.wire import Call, DeadlineError, Header, Kind, Received
from weft.experts.wire.service import Description, Receipt, read_description, read_receipt


@dataclass(frozen=True)
class CallOptions:
    """How a `RemoteExpert` calls; see its arguments."""

    timeout: float = 30.0
    compression: Policy = field(default_factory=Policy)
    client: str = ""
    accumulate: bool = False
    keep_graph: bool = False

    def __post_init__(self) -> None:
        faults = option_faults(self.timeout, self.compression, self.client, self.accumulate, self.keep_graph)
        if faults:
            raise UsageError(listed("a remote expert cannot be called with these options:", faults))


class Asker:
    """The calls of one expert. Thread-safe."""

    def __init__(self, uid: str, line: Line, options: CallOptions) -> None:
        self.uid = uid
        self.line = line
        self.options = options
        self.client = client_name(options.client)
        self.accumulation = Accumulation(uid)
        self.progress = Progress(uid, lambda: line.route.transport(0, None).address)
        self._lock = threading.Lock()
        self._signature: Signature | None = None

    def describe(self) -> Description:
        """What the server says of the expert now."""
        return self._described(self.options.timeout)

    def deadline(self) -> float:
        """Of a call that begins now, as a time of `time.monotonic`."""
        return time.monotonic() + self.options.timeout

    def signature(self, deadline: float) -> Signature:
        """What a call looks like; asked once. Raises ``DeadlineError`` if that is not known by ``deadline``."""
        found = self._signature
        if found is not None:
            return found
        with waiting():  # for the lock too: who has it wants the generators back only afterwards
            if not self._lock.acquire(timeout=self._left(deadline)):
                raise self._late()
            try:
                found = self._signature = self._signature or Signature(self._described(self._left(deadline)))
            finally:
                self._lock.release()
        return found

    def forward(self, inputs: Sequence[Tensor], key: Key, deadline: float) -> list[Tensor]:
        """The flat outputs. The key says whether the server is to keep the graph, and hears whether it did.

        A call of more rows than the server takes at a time is made in parts.
        """
        parts = self._split(inputs, self.signature(deadline).max_batch_size)
        if len(parts) == 1:
            return self._forward(inputs, key, deadline)
        found = [self._forward(part, own, deadline) for part, own in zip(parts, key.split(len(parts)), strict=True)]
        return [torch.cat(outputs) for outputs in zip(*found, strict=True)]

    def backward(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], key: Key) -> list[Tensor]:
        """One gradient per flat input. The expert steps, once for this key; or adds to the open mini-batch.

        Parts of a call add to one mini-batch, which is committed in the end: they are one step as well, or none.
        """
        deadline = self.deadline()
        signature = self.signature(deadline)
        parts = self._split([*inputs, *gradients], signature.max_batch_size)
        open_one = self.accumulation if self.options.accumulate else None
        if len(parts) == 1:
            return self._backward(inputs, gradients, key, open_one, deadline)
        own = Accumulation(self.uid) if signature.trained and open_one is None else None
        try:
            found = [
                self._backward(part[: len(inputs)], part[len(inputs) :], each, own or open_one, deadline)
                for part, each in zip(parts, key.split(len(parts)), strict=True)
            ]
            if own is not None:
                self._commit(own, deadline)
        except BaseException:
            if own is not None:
                self._discard(own)
            raise
        return [torch.cat(rows) for rows in zip(*found, strict=True)]

    def commit(self) -> bool:
        """One step with the gradients of the open mini-batch; False if there are none."""
        return self._commit(self.accumulation)

    @staticmethod
    def _split(tensors: Sequence[Tensor], rows: int) -> list[tuple[Tensor, ...]]:
        """The parts of a call, each of at most so many rows."""
        if not tensors or tensors[0].shape[0] <= rows:
            return [tuple(tensors)]
        count = -(-tensors[0].shape[0] // rows)
        return [tuple([tensor[part * rows : (part + 1) * rows] for tensor in tensors]) for part in range(count)]

    def _forward(self, inputs: Sequence[Tensor], key: Key, deadline: float) -> list[Tensor]:
        policy = self.options.compression
        header = Header(
            kind=Kind.FORWARD,
            call_id=0,
            uid=self.uid,
            client=self.client,
            reply=policy.choose("outputs", 1)[0],
        )
        call = Call(key.forward(header), inputs, policy.choose("inputs", len(inputs)))
        answer = self._answer(call, deadline)[0]
        key.heard(answer)
        return self.signature(deadline).results(answer, inputs[0].device)

    def _backward(
        self,
        inputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        key: Key,
        accumulation: Accumulation | None,
        deadline: float,
    ) -> list[Tensor]:
        """One call, whose gradients of parameters go to this mini-batch; None: they are a step."""
        policy = self.options.compression
        mini_batch = "" if accumulation is None else accumulation.name
        header = Header(
            kind=Kind.BACKWARD,
            call_id=0,
            uid=self.uid,
            client=self.client,
            mini_batch=mini_batch,
            reply=policy.choose("input_gradients", 1)[0],
            data=fence(self.line.route),
        )
        call, whole = key.backward(header, inputs, gradients, policy)
        try:
            answer, receipt = self._walked(call, whole, deadline)
        except BaseException as error:
            if accumulation is not None:
                accumulation.failed(mini_batch, error)
            raise
        if accumulation is not None:
            accumulation.added(mini_batch, receipt.incarnation)
        return self.signature(deadline).input_gradients(answer, inputs)

    def _commit(self, accumulation: Accumulation, deadline: float | None = None) -> bool:
        ready = accumulation.ready()
        if ready is None:
            return False
        name, incarnation = ready
        data = fence(self.line.route, incarnation)
        header = Header(
            kind=Kind.COMMIT, call_id=0, uid=self.uid, client=self.client, key=name, mini_batch=name, data=data
        )
        try:
            self._answer(Call(header), self.deadline() if deadline is None else deadline)
        except CommitError as error:
            accumulation.failed(name, error)
            raise
        accumulation.end(name)
        return True

    def discard(self, patience: float = 0.0) -> None:
        """Begin the next mini-batch. The server is told that this one is not wanted.

        Its answer is waited for at most for so many seconds of ``patience``, such as before the connection is closed.
        """
        self._discard(self.accumulation, patience)

    def _discard(self, accumulation: Accumulation, patience: float = 0.0) -> None:
        name = accumulation.give_up()
        if name is not None:
            header = Header(kind=Kind.DISCARD, call_id=0, uid=self.uid, client=self.client, mini_batch=name)
            told = self.line.tell(Call(header), self.options.timeout)
            if told is not None and patience:
                wait([told], min(patience, self.options.timeout))

    def _described(self, seconds: float) -> Description:
        call = Call(Header(kind=Kind.INFO, call_id=0, uid=self.uid, client=self.client))
        with waiting():
            found = read_description(self.line.ask(call, seconds, repeatable=True).header.data)
        self.progress.heard(found.steps, Receipt(found.durable, found.incarnation))
        return found

    def _left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        return left

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"a call of expert {self.uid!r} was not sent: what the expert takes is asked first, and that took all of "
            f"its {self.options.timeout:g} s"
        )

    def _answer(self, call: Call, deadline: float) -> tuple[Received, Receipt]:
        """The answer of who owns the expert, and what it says of it."""
        with waiting():
            answer = self.line.ask(call, self._left(deadline), repeatable=True, accept=self._accept)
        receipt = read_receipt(answer.header.data)
        self.progress.heard(answer.header.step, receipt)
        return answer, receipt

    def _walked(self, call: Call, whole: Call, deadline: float) -> tuple[Received, Receipt]:
        try:
            return self._answer(call, deadline)
        except InputsGoneError:
            return self._answer(whole, deadline)

    def _accept(self, answer: Received) -> None:
        fenced(self.uid, self.line.route, answer)
