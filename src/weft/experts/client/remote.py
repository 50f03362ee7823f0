"""RemoteExpert: a module whose forward, backward and optimizer step happen on a server.

    layer = RemoteExpert("ffn.0", "10.0.0.7:7070")
    model = nn.Sequential(nn.Linear(8, 512), layer, nn.Linear(512, 2))
    loss(model(x)).backward()           # also trains the expert, over there

For PyTorch it is an ordinary layer. The idea of one autograd function that joins two remote calls is hivemind's.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.ambient import is_checkpointing, is_recomputing
from weft.core.boundary import cross
from weft.core.errors import UsageError, listed
from weft.core.untraced import untraced
from weft.experts.client.anchor import Anchored
from weft.experts.client.arguments import remote_faults
from weft.experts.client.asking import Asker, CallOptions
from weft.experts.client.channel import ClientTls, GrpcTransport
from weft.experts.client.connections import Connections
from weft.experts.client.journey import Forward, RemoteJourney, forbid_tangents
from weft.experts.client.key import Key
from weft.experts.client.line import Line
from weft.experts.client.remembered import Remembered
from weft.experts.client.retry import Retry
from weft.experts.client.route import DirectoryRoute, FixedRoute
from weft.experts.client.signature import Signature
from weft.experts.client.transport import Transport
from weft.experts.compression import Policy
from weft.experts.fork_guard import finalizer
from weft.experts.wire.service import Description

_LAST_WORD = 1.0  # seconds that `close` waits until the server has heard that a mini-batch is discarded
_HERE = ("_asker", "_remembered", "_finalizer")  # belongs to this process, and is made anew in another
_SHARED = ("_where", "_keys", "_retry", "_options")  # which a copy takes as they are


class RemoteExpert(Anchored):
    """An expert behind a server, as a layer. Any number of threads may call it at once.

    Args:
        uid: the expert's name.
        where: the server's address (``host:port``), then this expert has a connection of its own, until `close` or
            until it is collected; or a `Transport` that several share; or `Connections` with a directory, which then
            says where the expert is at every call.
        timeout: seconds for one forward, backward or commit, with all its repetitions.
        retry: which calls are sent again, and when; see `Retry`.
        compression: how tensors travel; see `weft.experts.compression.Policy`. ``outputs`` and ``input_gradients``
            take one choice each.
        client: what the server knows this caller by, for quotas; a name of this process by default.
        accumulate: gradients of backward add up at the server until `commit`, which is one optimizer step. For
            mini-batches that are cut into micro-batches (in a `weft.Pipe`, or by hand): otherwise every micro-batch
            is a step. ``False``: every backward steps.
        keep_graph: ask the server to keep the graph of a forward for its backward, where it allows that. Then backward
            does not send the inputs again either.
        tls, token: see `GrpcTransport`; for an address only.

    A call takes and returns what the server's module does, nested likewise; outputs come to the device of the first
    tensor of the inputs. Under `torch.no_grad` only forward happens. With gradients on, each backward is one call,
    and the server's optimizer steps, also where no input wants a gradient. A call of more rows than the server takes at
    a time is sent in parts, whose gradients are one step all the same. In a `weft.Pipe` that recomputes, forward
    is not asked again.

    Its parameters live at the server. Here there is a single zero, ``anchor``, through which autograd finds the expert.
    It is in `parameters`, not in `state_dict`; its gradient is zero, and its value means nothing. Freezing it forbids
    backward.

    A copy or a pickle of it is one more client of the same expert, and the same layer in all else: with an address it
    makes a connection of its own; with a `Transport` or `Connections` it can be copied, but not pickled.

    Raises ``UsageError`` that lists all arguments that make no sense; at the first call or `describe`,
    ``UnknownExpertError``, ``ForbiddenError``, ``UnreachableError``; at every call ``SpecError`` for arguments that do
    not fit (before anything is sent), ``DeadlineError``, ``LostError``, and what the expert answers; see
    `weft.experts.errors`.
    """

    def __init__(
        self,
        uid: str,
        where: "str | Transport | Connections",
        *,
        timeout: float = 30.0,
        retry: Retry | None = None,
        compression: Policy | None = None,
        client: str = "",
        accumulate: bool = False,
        keep_graph: bool = False,
        tls: ClientTls | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__()
        calls = {"timeout": timeout, "client": client, "accumulate": accumulate, "keep_graph": keep_graph}
        faults = remote_faults(uid, where, retry=retry, compression=compression, tls=tls, token=token, **calls)
        if faults:
            raise UsageError(listed("a remote expert cannot be made like this:", faults))
        self.uid = uid
        self.make_anchor()
        self._where = where
        self._keys = (tls, token)
        self._retry = retry or Retry()
        self._options = CallOptions(timeout, compression or Policy(), client, accumulate, keep_graph)
        self._connect()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The expert's outputs; see the class."""
        return untraced(self._forward, args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deadline = self._asker.deadline()
        signature = self._asker.signature(deadline)
        inputs = signature.flat(args, kwargs)
        forbid_tangents(f"expert {self.uid!r}", inputs)
        ask = partial(self._asker.forward, deadline=deadline)
        key = Key(evaluation=not self.training)
        if is_recomputing() or is_checkpointing():
            outputs = self._replayed(signature, inputs, ask, key)
        elif torch.is_grad_enabled():
            key.keep = self._options.keep_graph
            outputs = self._crossed(signature, inputs, ask, key)
        else:
            outputs = ask(inputs, key)
        return signature.nested(outputs)

    def describe(self) -> Description:
        """What the server says of the expert now: schemas, steps, which of them are durable."""
        return self._asker.describe()

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the expert, as of the last answer; None before the first."""
        return self._asker.progress.steps

    @property
    def durable_step(self) -> int | None:
        """The last step that a crash of the server does not lose, as of the last answer; None: not known, or none."""
        return self._asker.progress.durable_step

    @property
    def steps_lost(self) -> int:
        """Steps that servers of the expert came back without; each time there is a `StepsLostWarning`."""
        return self._asker.progress.steps_lost

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for `commit`."""
        return self._options.accumulate

    def commit(self) -> bool:
        """One optimizer step with all gradients since the last commit; False if there were none.

        Raises ``UsageError`` without ``accumulate``; ``CommitError`` if a part of the gradients is missing, because a
        backward failed or the server was started again: call `discard`, and run the mini-batch again.
        """
        if not self._options.accumulate:
            raise UsageError(
                f"expert {self.uid!r} steps at every backward, so there is nothing to commit; make it with accumulate"
            )
        return self._asker.commit()

    def discard(self) -> None:
        """Forget the gradients since the last commit. The server is told, but not waited for; one that does not hear
        of it drops them after a while."""
        self._asker.discard()

    def close(self) -> None:
        """Call it no more: an open mini-batch is discarded, own connections are closed, and who waits gets an error.

        Waits for at most a second until the server has heard of the discard. May be called twice.
        """
        if self._options.accumulate:
            self._asker.discard(_LAST_WORD)
        self._finalizer()

    def __enter__(self) -> "RemoteExpert":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._where, str):
            raise UsageError(
                f"remote expert {self.uid!r} uses connections of this process, which cannot be pickled; make it from "
                "an address, or make it anew where it is needed"
            )
        return self._state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteExpert":
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = self._state()
        made.__setstate__({name: each if name in _SHARED else deepcopy(each, memo) for name, each in state.items()})
        return made

    def extra_repr(self) -> str:
        """For `print`."""
        where = self._where if isinstance(self._where, str) else type(self._where).__name__
        return f"{self.uid!r}, {where!r}"

    def _state(self) -> dict[str, Any]:
        """What makes this layer what it is, whatever a subclass or a user has added, and nothing of this process."""
        return {name: value for name, value in super().__getstate__().items() if name not in _HERE}

    def _connect(self) -> None:
        where, (tls, token) = self._where, self._keys
        own = GrpcTransport(where, tls=tls, token=token) if isinstance(where, str) else None
        if isinstance(where, Connections):
            line = Line(DirectoryRoute(self.uid, where), self._retry)
        else:
            line = Line(FixedRoute(cast("Transport", own or where)), self._retry)
        self._asker = Asker(self.uid, line, self._options)
        self._remembered = Remembered()
        # Not this module's end but its asker's: a graph that is still to be walked back holds it too.
        self._finalizer = finalizer(self._asker, _close, line, own)

    def _crossed(self, signature: Signature, inputs: list[Tensor], ask: Forward, key: Key) -> list[Tensor]:
        """The outputs, as one node of autograd."""
        reached = [*inputs, self.anchor_for(f"remote expert {self.uid!r} is", signature.trained, inputs)]
        if not any(tensor.requires_grad for tensor in reached):
            key.keep = False
            return ask(inputs, key)
        journey = RemoteJourney(signature, inputs, self.anchor, ask, self._asker.backward, key)
        return list(cross(journey, reached))

    def _replayed(self, signature: Signature, inputs: list[Tensor], ask: Forward, key: Key) -> list[Tensor]:
        """In a stage that is run twice: the first time ask, the second time remember."""
        if is_recomputing():
            known = self._remembered.take(inputs)
            if known is None:
                key.keep = self._options.keep_graph
            else:
                (outputs, key), ask = known, _giving(known[0])
            return self._crossed(signature, inputs, ask, key) if torch.is_grad_enabled() else ask(inputs, key)
        outputs = ask(inputs, key)
        self._remembered.put(inputs, outputs, key)
        return outputs


def _giving(known: list[Tensor]) -> Forward:
    def forward(inputs: Sequence[Tensor], key: Key) -> list[Tensor]:
        return known

    return forward


def _close(line: Line, transport: Transport | None) -> None:
    line.closed.set()
    if transport is not None:
        transport.close()
