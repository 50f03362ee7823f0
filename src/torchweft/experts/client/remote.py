"""RemoteExpert: a module with forward, backward and optimizer step on a server.

    layer = RemoteExpert("ffn.0", "10.0.0.7:7070")
    model = nn.Sequential(nn.Linear(8, 512), layer, nn.Linear(512, 2))
    loss(model(x)).backward()           # also trains the expert at its server

To PyTorch it is an ordinary layer. `torch.distributed.rpc` has remote modules too, but needs a fixed group of
processes that trust each other. The idea of one autograd function that joins two remote calls is hivemind's.
"""

import inspect
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, cast

from torch import Tensor

from torchweft.core.autograd import apply_as_node, graph_break
from torchweft.core.context import is_checkpointing, is_recomputing
from torchweft.core.errors import UsageError, WeftError, escape
from torchweft.core.validation import Validator, uid_fault
from torchweft.experts.address import address_fault
from torchweft.experts.client.calls import FixedResolver, RetryingCaller, Steps, run_all, run_steps
from torchweft.experts.client.connections import Connections, DirectoryResolver, fixed_faults
from torchweft.experts.client.futures import ExpertFuture, submit
from torchweft.experts.client.remote_function import (
    ExpertCall,
    RecomputeCache,
    RemoteFunction,
    RemoteLayer,
    reject_tangents,
)
from torchweft.experts.client.retry import Retry
from torchweft.experts.client.status import fetch_state, set_hyperparameters
from torchweft.experts.client.stub import CallOptions, ExpertStub, IdempotencyKey, Signature
from torchweft.experts.client.transport import GrpcTransport, Transport
from torchweft.experts.compression import Policy
from torchweft.experts.discovery import Directory
from torchweft.experts.fork_guard import Closing, finalizer
from torchweft.experts.tls import ClientTls, credential_faults
from torchweft.experts.wire.service import Description

_LISTED = 10  # most names in a message
_LAST_DISCARD = 1.0  # longest wait of `close`, in seconds, until the server has dropped an open mini-batch
_LOCAL = ("_stub", "_cache", "_finalizer")  # valid in this process only, and made again in another
_SHARED = ("_where", "_credentials", "_retry", "_options")  # shared by copies


class RemoteExpert(RemoteLayer, Closing):
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
            anchor = self.anchor_for(f"remote expert {self.uid!r} is", signature.trained, inputs)
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


Entry = tuple[RemoteExpert, tuple[Any, ...], dict[str, Any]]  # an expert with the arguments of one call


def call_experts(entries: Sequence[Entry], settle: bool = False) -> list[Any]:
    """Call experts, all at once, as one autograd node. ``settle``: an error takes the place of its result."""
    now = time.monotonic()
    if len(entries) > 1:
        # All descriptions at once. Errors come again from the calls below, which name their call.
        new = dict.fromkeys(remote for remote, _, _ in entries)
        run_all([remote.load_signature(now + remote.timeout) for remote in new], settle=True)
    calls, leaves = list[ExpertCall](), list[Tensor]()
    for number, (remote, args, kwargs) in enumerate(entries):
        try:
            call, inputs = remote.begin_call(args, kwargs, now + remote.timeout)
            calls.append(call)
            leaves += inputs
        except WeftError as error:
            if len(entries) > 1:
                error.add_note(f"in call {number} of {len(entries)}: expert {remote.uid!r}")
            raise
    # Each anchor once. They come last, so that the gradients of the inputs have the places of the inputs.
    anchors = list(dict.fromkeys(call.anchor for call in calls))
    function = RemoteFunction(calls, anchors, settle)
    if not is_checkpointing() and any(call.is_tracked for call in calls):
        flat = iter(apply_as_node(function, [*leaves, *anchors]))
    else:
        flat = iter(function.forward()[0])
    results = [[next(flat) for _ in range(count)] if isinstance(count, int) else count for count in function.counts]
    for (remote, _, _), call, outputs in zip(entries, calls, results, strict=True):
        if is_checkpointing() and isinstance(outputs, list):
            remote.keep_for_recomputation(call, outputs)
    packed = zip(calls, results, strict=True)
    return [call.signature.outputs.pack(y) if isinstance(y, list) else y for call, y in packed]


def gather(calls: Iterable[Any], *, return_exceptions: bool = False) -> list[Any]:
    """Call experts, all at once, and return their results in order. Works with autograd, and inside a stage of a Pipe.

    All forwards are under way at once, and so are all backwards: different experts, or one expert many times.

    Args:
        calls: for each call a tuple of the expert and its arguments, or ``partial(expert, *args, **kwargs)``.
        return_exceptions: as in `asyncio.gather`: a failed call has its error in place of a result. Otherwise the first
            error is raised, with a note that names its call, and the other calls are cancelled.

    A backward waits for all calls, and raises the first error then: the other experts have stepped.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     with weft.RemoteExpert("ffn.0", server.address) as remote:
        ...         [y.shape for y in weft.gather([(remote, torch.randn(1, 8)) for _ in range(3)])]
        [torch.Size([1, 8]), torch.Size([1, 8]), torch.Size([1, 8])]
    """
    entries: list[Entry] = []
    with Validator("invalid calls of weft.gather") as check:
        for number, call in enumerate(calls):
            if isinstance(call, partial):
                bound = cast("partial[Any]", call)
                remote, args, kwargs = bound.func, bound.args, bound.keywords
            else:
                parts = cast("tuple[Any, ...]", call) if isinstance(call, tuple) else (call,)
                (remote, *rest), kwargs = parts or (None,), dict[str, Any]()
                args = tuple(rest)
            if isinstance(remote, RemoteExpert):
                entries.append((remote, args, kwargs))
            else:  # built here only, because the text of a tensor takes milliseconds
                check.add(f"call {number} is {call!r}, wanted (expert, *arguments) or partial(expert, *arguments)")
        check.boolean("return_exceptions", return_exceptions)
    return graph_break(call_experts, entries, return_exceptions) if entries else []


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


def create_remote_experts(
    uids: Sequence[str], directory: Directory | Connections | Mapping[str, str], **options: Any
) -> list[RemoteExpert | None]:
    """Create one `RemoteExpert` per uid, in order. None stands for those that the directory does not list now.

    Warns if it lists none of them.

    ``Connections`` stay open. For a directory, or addresses by uid, connections are made, which close when the last of
    the experts is garbage-collected. ``options``: those of `RemoteExpert` except ``tls`` and ``token``.

    Raises ``DirectoryUnavailableError`` if the directory does not answer, ``UsageError`` that lists all invalid
    arguments.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     (remote,) = weft.create_remote_experts(["ffn.0"], {"ffn.0": server.address})
        ...     remote(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """
    with Validator("invalid remote experts") as check:
        names: list[Any] = []
        if isinstance(uids, str) or not isinstance(cast("Any", uids), Iterable):
            check.add(f"uids is {uids!r}, wanted a list of names")
        else:
            names = list(uids)
            check.add(*(fault for uid in names for fault in uid_fault(uid)))
        if isinstance(directory, Mapping):
            check.add(*fixed_faults(cast("Mapping[Any, Any]", directory)))
        else:
            kinds = "a directory, Connections to one, or addresses by uid; a single address is for RemoteExpert"
            check.instance("directory", directory, (Directory, Connections), kinds)
        check_options(check, False, options)
    connections = directory if isinstance(directory, Connections) else Connections(directory)
    known = connections.snapshot()
    if names and not any(uid in known for uid in names):
        wanted, listed = (", ".join(map(escape, uids[:_LISTED])) for uids in (names, known.uids))
        text = f"none of the experts {wanted} is listed in the directory, which lists {listed or 'no expert at all'}"
        warnings.warn(f"{text}; check their names, or start a server of them", stacklevel=2)
    return [RemoteExpert(uid, connections, **options) if uid in known else None for uid in names]
