"""RemoteExpert: a module with forward, backward and optimizer step on a server.

    layer = RemoteExpert("ffn.0", "10.0.0.7:7070")
    model = nn.Sequential(nn.Linear(8, 512), layer, nn.Linear(512, 2))
    loss(model(x)).backward()           # also trains the expert at its server

To PyTorch it is an ordinary layer. `torch.distributed.rpc` has remote modules too, but needs a fixed group of
processes that trust each other. The idea of one autograd function that joins two remote calls is hivemind's. A call is
one node of the graph:

    inputs, anchor ──> [ forward:  inputs ──────────────────> server ] ──> outputs ──> the user's loss
    their gradients <── [ backward: inputs, output gradients ─> server ] <── gradients of the outputs

The client keeps no graph: the server re-runs its module for the backward, or has kept the graph. Autograd omits a node
if no input requires a gradient, and the expert would not be trained. The *anchor* prevents this: a parameter with a
single zero, which always gets a zero gradient (hivemind's DUMMY).

    anchor requires a gradient              a node, whose backward trains the experts
    frozen, and all inputs require none     no node: the experts only answer
    frozen, but an input requires one       rejected: the backward for the input would step the servers

The anchor is not empty, because some optimizers and gradient norms fail for tensors without elements.
"""

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from torchweft.core.autograd import apply_as_node, graph_break, has_tangent
from torchweft.core.context import is_checkpointing, is_recomputing
from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, InPlaceError, UsageError
from torchweft.core.segment import version
from torchweft.core.validation import Validator, uid_fault
from torchweft.experts.address import address_fault
from torchweft.experts.client.calls import FixedResolver, RetryingCaller, Steps, run_all, run_steps
from torchweft.experts.client.connections import Connections, DirectoryResolver
from torchweft.experts.client.futures import ExpertFuture, submit
from torchweft.experts.client.layer import RecomputeCache, RemoteLayer
from torchweft.experts.client.retry import Retry
from torchweft.experts.client.status import fetch_state, set_hyperparameters
from torchweft.experts.client.stub import CallOptions, ExpertStub, IdempotencyKey, Signature
from torchweft.experts.client.transport import GrpcTransport, Transport
from torchweft.experts.compression import Policy
from torchweft.experts.discovery import Directory
from torchweft.experts.fork_guard import ContextManager, finalizer
from torchweft.experts.tls import ClientTls, credential_faults
from torchweft.experts.wire.service import Description

ONLY_ONCE = (
    "has its graph at its server, and returns first-order gradients only; compute such a penalty with local layers, "
    "from the expert's detached outputs"
)  # The reason why a gradient of a gradient does not exist through an expert
_LAST_DISCARD = 1.0  # longest wait of `close`, in seconds, until the server has dropped an open mini-batch
_LOCAL = ("_stub", "_cache", "_finalizer")  # valid in this process only, and made again in another
_SHARED = ("_where", "_credentials", "_retry", "_options")  # shared by copies
T = TypeVar("T")


@dataclass(eq=False)
class ExpertCall:
    """One call of one expert: its forward, and the backward that belongs to it. ``cached``: outputs of the forward."""

    stub: ExpertStub
    signature: Signature
    inputs: Sequence[Tensor]
    anchor: Tensor
    key: IdempotencyKey
    deadline: float
    cached: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self._outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._needs_gradient = [tensor.requires_grad for tensor in self.inputs]
        self.is_tracked = torch.is_grad_enabled() and (self.anchor.requires_grad or any(self._needs_gradient))
        if self.is_tracked:
            # Detached tensors hold no graph, but share the version counters, by which `backward` detects modifications.
            self.inputs = [tensor.detach() for tensor in self.inputs]
            self._versions = [version(tensor) for tensor in self.inputs]

    def forward(self) -> Steps[list[Tensor]]:
        outputs, self.cached = self.cached, None
        if outputs is None:
            outputs = yield from self.stub.forward(self.inputs, self.key, self.deadline)
        if self.is_tracked:
            self._outputs = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs

    def check_unchanged(self) -> None:
        names = zip(self.signature.inputs.names, self.inputs, self._versions, strict=True)
        if changed := [name for name, tensor, before in names if version(tensor) != before]:
            raise InPlaceError(
                f"{', '.join(changed)} of expert {self.signature.name!r} was written to after the call, but its "
                "backward needs it unchanged; pass a copy to the expert, or write into a copy"
            )

    def backward(self, gradients: Sequence[Tensor | None]) -> Steps[list[Tensor | None]]:
        """One gradient for each input, None for those that need none."""
        # A new key for the next backward of a retained graph: under the same key it would count as a retry.
        key, self.key = self.key, self.key.next_backward()
        output_gradients = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, self._outputs, strict=True)
        ]
        input_gradients = yield from self.stub.backward(self.inputs, output_gradients, key)
        needed = zip(input_gradients, self._needs_gradient, strict=True)
        return [gradient if is_needed else None for gradient, is_needed in needed]


class RemoteFunction:
    """A `weft.core.autograd.CutFunction` of calls that are under way at once. Their anchors come last."""

    # ``counts``: after `forward`, the number of flat outputs of each call, or its error if ``settle``. The outputs
    # themselves refer to the node of this function, and keeping them here would be a cycle.
    def __init__(self, calls: Sequence[ExpertCall], anchors: Sequence[Tensor], settle: bool = False) -> None:
        self.calls, self.settle = calls, settle
        self.counts: list[int | BaseException] = []
        self._anchors = anchors
        self._freed = False

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        results = run_calls([call.forward() for call in self.calls], self.calls, self.settle)
        self.counts = [result if isinstance(result, BaseException) else len(result) for result in results]
        answered = [call for call, count in zip(self.calls, self.counts, strict=True) if isinstance(count, int)]
        tracked = [is_tracked and call.is_tracked for call in answered for is_tracked in call.signature.tracked]
        return [output for outputs in results if not isinstance(outputs, BaseException) for output in outputs], tracked

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        if self._freed:
            raise BackwardTwiceError(BACKWARD_TWICE)
        steps: dict[ExpertCall, Steps[list[Tensor | None]]] = {}
        rest = list(gradients)
        for call, count in zip(self.calls, self.counts, strict=True):
            if isinstance(count, int):
                own, rest = rest[:count], rest[count:]
                # A call without gradients for its outputs has no backward, as in autograd, and its expert no step.
                if any(gradient is not None for gradient in own):
                    steps[call] = call.backward(own)
        for call in steps:  # before the first expert steps
            call.check_unchanged()
        results = cast("list[list[Tensor | None]]", run_calls([*steps.values()], [*steps], None))
        found = dict(zip(steps, results, strict=True))
        input_gradients = [found[call] if call in found else [None] * len(call.inputs) for call in self.calls]
        if not retain:
            self._freed = True
            for call in self.calls:
                call.inputs = []
        flat = [gradient for call_gradients in input_gradients for gradient in call_gradients]
        return [*flat, *map(torch.zeros_like, self._anchors)]

    @property
    def only_once(self) -> str:
        return f"expert {', '.join(dict.fromkeys(repr(call.signature.name) for call in self.calls))} {ONLY_ONCE}"


def run_calls(
    operations: Sequence[Steps[T]], calls: Sequence[ExpertCall], settle: bool | None
) -> list[T | BaseException]:
    """Run the operations of these calls at once. Errors name their call if there are several.

    ``settle``: return errors in place of results. None: wait for all as well, and raise the first error then.
    """
    runs = run_all(operations, settle=settle is not False)
    failed = [(number, run) for number, run in enumerate(runs) if run.error is not None]
    for number, run in failed:
        if run.error is not None and len(calls) > 1:
            run.error.add_note(f"in call {number} of {len(calls)}: expert {calls[number].stub.uid!r}")
    if failed and not settle:
        runs.clear()  # the error's traceback holds this frame, and must not hold the results of other calls
        failed[0][1].take()
    return [run.take() if run.error is None else run.error for run in runs]


def choose_anchor(anchor: Tensor, subject: str, trained: bool, inputs: Iterable[Tensor]) -> Tensor:
    """The anchor, detached if the call does not train the experts. ``subject`` begins the error."""
    if trained and anchor.requires_grad:
        return anchor
    if trained and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise UsageError(
            f"{subject} frozen here (the anchor does not require a gradient), but the backward for the inputs "
            "would step at the server; call it under no_grad, or unfreeze it"
        )
    return anchor.detach()


def reject_tangents(name: str, inputs: Sequence[Tensor]) -> None:
    # Forward-mode differentiation: the tangents would be lost without notice.
    if has_tangent(inputs):
        raise UsageError(
            f"an input of {name} has a tangent (forward-mode differentiation), which only its server could propagate; "
            "use backward, or call it with inputs without tangents"
        )


class RemoteExpert(RemoteLayer, ContextManager):
    """An expert of a server as a layer. Any number of threads can call it at once.

    Args:
        where: the server's address (``host:port``), for a separate connection until `close` or garbage collection; or
            a shared `Transport`; or `Connections` with a directory, which locates the expert at every call.
        timeout: seconds for one forward, backward or commit, including its retries.
        compression: of tensors on the wire (see `weft.experts.compression`).
        client: name of this caller in the server's quotas; by default one name per process.
        accumulate: gradients of backward add up at the server until `commit`, which is one optimizer step: for
            micro-batches, of a `weft.Pipe` or by hand. ``False``: every backward steps.
        keep_graph: ask the server to keep the graph of a forward for its backward. If the server does, backward does
            not send the inputs again.
        tls, token: see `GrpcTransport`; for an address only.

    Arguments and results are those of the server's module, with the same nesting, on the device of the first input.
    With gradients enabled, each backward is one call with one step of the server's optimizer, even if no input requires
    a gradient. A call with more rows than the server accepts is sent in parts, which together are one step. A
    `weft.Pipe` that recomputes does not send forward again.

    The local parameter ``anchor``, a single zero, makes autograd reach the expert. It is in `parameters`, not in
    `state_dict`. Freezing it forbids backward. A copy or a pickle is another client of the same expert. With a
    `Transport` or `Connections` the layer can be copied, but not pickled.

    Raises ``UsageError`` that lists all invalid arguments. A call raises ``SpecError`` for arguments that do not fit
    (before anything is sent), and the errors in `weft.experts.errors`.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows)
        >>> with weft.Server([expert]) as server, weft.RemoteExpert("ffn.0", server.address) as remote:
        ...     nn.Sequential(nn.Linear(3, 8), remote)(torch.randn(4, 3)).sum().backward()
        ...     remote.steps
        1
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
        options: dict[str, Any] = {"timeout": timeout, "client": client, "accumulate": accumulate}
        options |= {"keep_graph": keep_graph, "retry": retry, "compression": compression, "tls": tls, "token": token}
        with Validator("invalid remote expert") as check:
            check_remote_expert(check, uid, where, options)
        self.uid = uid
        self.make_anchor()
        self._where = where
        self._credentials = (tls, token)
        self._retry = retry or Retry()
        self._options = CallOptions(timeout, compression or Policy(), client, accumulate, keep_graph)
        self._connect()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return graph_break(self._forward, args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, inputs = self.begin_call(args, kwargs, time.monotonic() + self._options.timeout)
        if is_checkpointing():
            outputs = run_steps(call.forward())
            self.keep_for_recomputation(call, outputs)
        elif call.is_tracked:
            # The anchor comes last, so that the gradients of the inputs have the places of the inputs.
            outputs = list(apply_as_node(RemoteFunction([call], [call.anchor]), [*inputs, call.anchor]))
        else:
            outputs = run_steps(call.forward())
        return call.signature.outputs.pack(outputs)

    def submit(self, *args: Any, **kwargs: Any) -> ExpertFuture[Any]:
        """Call the expert without waiting, and without a gradient. Its result comes as a future.

        The tensors must not be modified before the future is done. Callbacks of the future must not wait. A future that
        is cancelled while the server works cannot stop the server. The first call waits for the expert's description.
        Raises ``SpecError`` for arguments that do not fit.
        """
        deadline = time.monotonic() + self._options.timeout
        return self._submit(self._stub.known_signature(deadline), args, kwargs, deadline)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """`submit` in asyncio: returns the result, without a gradient. Cancelling the task cancels the call."""
        deadline = time.monotonic() + self._options.timeout
        signature = self._stub.loaded or await submit(self._stub.signature(deadline))
        return await self._submit(signature, args, kwargs, deadline)

    def _submit(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float
    ) -> ExpertFuture[Any]:
        inputs = [tensor.detach() for tensor in signature.flatten_call(args, kwargs)]
        key = IdempotencyKey(evaluation=not self.training)

        def steps() -> Steps[Any]:
            return signature.outputs.pack((yield from self._stub.forward(inputs, key, deadline)))

        return submit(steps())

    def begin_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float
    ) -> tuple[ExpertCall, list[Tensor]]:
        """The call with these arguments, and its inputs. Its key is new, or that of the forward that it recomputes."""
        signature = self._stub.known_signature(deadline)
        inputs = signature.flatten_call(args, kwargs)
        reject_tangents(f"expert {self.uid!r}", inputs)
        key, cached = IdempotencyKey(evaluation=not self.training), None
        if is_recomputing():
            # With the key of the original forward, so that the server draws the same random numbers in backward.
            key, cached = self._cache.pop_match(inputs) or (key, None)
        if is_checkpointing():
            anchor = self.anchor
        else:
            anchor = choose_anchor(self.anchor, f"remote expert {self.uid!r} is", signature.trained, inputs)
        call = ExpertCall(self._stub, signature, inputs, anchor, key, deadline, cached)
        if call.is_tracked and cached is None and self._options.keep_graph and not is_checkpointing():
            key.request_graph()
        return call, inputs

    def keep_for_recomputation(self, call: ExpertCall, outputs: Sequence[Tensor]) -> None:
        # Clones, because the caller can modify the outputs in place before the recomputation reads these.
        self._cache.store(call.inputs, (call.key, [tensor.detach().clone() for tensor in outputs]))

    def load_signature(self, deadline: float) -> Steps[Signature]:
        return self._stub.signature(deadline)

    def describe(self) -> Description:
        """The server's current description of the expert: schemas, steps, durable steps."""
        return run_steps(self._stub.describe(self._options.timeout))

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the expert, according to the last answer, or None before the first."""
        return self._stub.progress.steps

    @property
    def durable_step(self) -> int | None:
        """The last step that survives a crash of the server, according to the last answer. None: unknown, or none."""
        return self._stub.progress.durable_step

    @property
    def steps_lost(self) -> int:
        """Steps that were lost by restarts of servers. Each loss is reported by a `StepsLostWarning`."""
        return self._stub.progress.steps_lost

    @property
    def timeout(self) -> float:
        return self._options.timeout

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for `commit`."""
        return self._options.accumulate

    def commit(self) -> bool:
        """Take one optimizer step with all gradients since the last commit. Returns False without gradients.

        Raises ``UsageError`` without ``accumulate``, and ``CommitError`` if gradients are missing, because a backward
        failed or the server was restarted: call `discard`, and run the mini-batch again.
        """
        if not self._options.accumulate:
            raise UsageError(f"expert {self.uid!r} steps at every backward: to commit, make it with accumulate=True")
        return run_steps(self.commit_steps())

    def commit_steps(self, *, prepares: bool = False) -> Steps[bool]:
        """The phases of a commit with other experts, see `weft.experts.client.commit`."""
        return self._stub.commit(prepares=prepares)

    def discard(self) -> None:
        """Drop the gradients since the last commit, without waiting for the server."""
        self._stub.discard()

    def set(self, *, group: int | None = None, **hyperparameters: Any) -> None:
        """Set hyperparameters of the expert's optimizer and schedule at its server, such as ``lr=1e-4``: all or none.

        They hold from the next batch on, for its replicas and after a restart, too. ``group``: the number of one group
        of parameters; None: all. A schedule continues from a new ``lr``. Needs the role ``ADMIN``.
        """
        set_hyperparameters(self._owner(), self.uid, hyperparameters, group, self._options.timeout)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Weights and buffers of the expert's module at its server, all of one step. Needs the role ``ADMIN``.

        In the `state_dict` of a model that contains this layer, the expert is not included: its server saves it. Local
        parameters of a subclass are: ``nn.Module.state_dict(remote)`` has them alone.
        """
        # PyTorch passes arguments when it collects the state of a model.
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return fetch_state(self._owner(), self.uid, self._options.timeout)

    def _owner(self) -> Transport:
        return self._stub.caller.resolver.select_transport(0, None)

    def close(self) -> None:
        """Discard an open mini-batch, close a separate connection, and fail calls in flight. Waits up to a second."""
        if self._options.accumulate:
            self._stub.discard(_LAST_DISCARD)
        self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        # Additions of subclasses are kept. Connections belong to this process.
        if not isinstance(self._where, str):
            text = f"remote expert {self.uid!r} uses connections of this process, which cannot be pickled"
            raise UsageError(f"{text}; make it from an address, or make it again in the other process")
        return {name: value for name, value in super().__getstate__().items() if name not in _LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteExpert":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = {name: value for name, value in super().__getstate__().items() if name not in _LOCAL}
        copied.__setstate__({name: v if name in _SHARED else deepcopy(v, memo) for name, v in state.items()})
        return copied

    def extra_repr(self) -> str:
        where = self._where if isinstance(self._where, str) else type(self._where).__name__
        return f"{self.uid!r}, {where!r}"

    def _connect(self) -> None:
        where, (tls, token) = self._where, self._credentials
        separate = GrpcTransport(where, tls=tls, token=token) if isinstance(where, str) else None
        if isinstance(where, Connections):
            resolver = DirectoryResolver(self.uid, where)
        else:
            resolver = FixedResolver(cast("Transport", separate or where))
        caller = RetryingCaller(resolver, self._retry)
        self._stub = ExpertStub(self.uid, caller, self._options)
        self._cache = RecomputeCache[tuple[IdempotencyKey, list[Tensor]]]()
        # Bound to the stub, not to this module: a graph with a pending backward holds the stub and needs it to work.
        self._finalizer = finalizer(self._stub, _close, caller, separate)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(RemoteExpert.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def check_remote_expert(check: Validator, uid: Any, where: Any, options: Mapping[str, Any]) -> None:
    check.add(*uid_fault(uid))
    if isinstance(where, str):
        check.add(*address_fault("where", where))
    elif isinstance(where, Directory):
        check.add("where is a directory, wanted Connections(directory), which several experts share")
    else:
        kinds = "the server's address (host:port), a Transport, or Connections to a directory"
        check.instance("where", where, (Connections, Transport), kinds)
    check_options(check, isinstance(where, str), options)


def check_options(check: Validator, has_address: bool, options: Mapping[str, Any]) -> None:
    values = {**_DEFAULTS, **options}
    check.seconds("timeout", values["timeout"])
    check.instance("retry", values["retry"], Retry, "a Retry, such as Retry(attempts=3)", optional=True)
    check.instance("compression", values["compression"], Policy, "a Policy, such as Policy('fp16')", optional=True)
    check.instance("client", values["client"], str, "a text: the name by which servers know this caller")
    check.boolean("accumulate", values["accumulate"])
    check.boolean("keep_graph", values["keep_graph"])
    check.add(*credential_faults(values["tls"], values["token"]))
    allowed = has_address or (values["tls"] is None and values["token"] is None)
    check.require(allowed, "tls= and token= are for an address; a transport or connections have their own")
    unknown = [name for name in options if name not in _DEFAULTS]
    check.add(*(f"there is no option {name!r}; help(weft.RemoteExpert) lists them" for name in unknown))


def _close(caller: RetryingCaller, transport: Transport | None) -> None:
    caller.closed.set()
    if transport is not None:
        transport.close()
