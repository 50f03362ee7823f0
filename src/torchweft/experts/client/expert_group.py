"""Several experts at once: many calls as one autograd node, and one optimizer step of all or of none.

A commit of several experts has two phases:

    prepare   every expert checks its sum, the fence and the incarnation, and keeps the sum    all at once
    commit    every expert steps                                                               all at once

An expert that cannot step says so in the first phase, when no other has stepped. Both phases can be repeated: the name
of a mini-batch is the key of its step. Without a second expert there is one phase.

    after "prepare"       a server ends           its sum is gone: the others step, and `commit` raises for it
    between the phases    this process ends       no expert steps, and the sums are dropped after a while
    within "commit"       this process ends       experts that have the message step, the others drop their sums
    after "commit"        a server ends           it continues from its checkpoint, see `RemoteExpert.durable_step`
"""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from torchweft.core.autograd import apply_as_node, graph_break
from torchweft.core.context import is_checkpointing
from torchweft.core.errors import WeftError, escape
from torchweft.core.validation import Validator, uid_fault
from torchweft.experts.client.calls import Steps, run_all
from torchweft.experts.client.connections import Connections, fixed_faults
from torchweft.experts.client.layer import RemoteLayer
from torchweft.experts.client.remote import ExpertCall, RemoteExpert, RemoteFunction, check_options
from torchweft.experts.discovery import Directory

_LISTED = 10  # most names in a message
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


Modules = nn.Module | Iterable[nn.Module]


def commit(module: Modules) -> dict[str, bool]:
    """Commit every accumulating remote expert and mixture inside a module or a list. Returns by uid whether it stepped.

    All step or none does: if one cannot step, its error is raised before any has stepped. `discard` then begins a new
    mini-batch. If a server fails in between, its error names the experts that have stepped. Call this again, which
    steps none twice, or `discard`. Call it together with the step of the local optimizer.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows)
        >>> with weft.Server([expert]) as server, weft.RemoteExpert("ffn.0", server.address, accumulate=True) as remote:
        ...     remote(torch.randn(2, 8)).sum().backward()
        ...     weft.experts.client.commit(remote)
        {'ffn.0': True}
    """
    layers = _accumulating_layers(module)
    experts = [layer for layer in layers if isinstance(layer, RemoteExpert)]
    if len(layers) > 1:
        for layer in layers:
            if not isinstance(layer, RemoteExpert):
                layer.prepare_commit()
        _run_phase(experts, [expert.commit_steps(prepares=True) for expert in experts], "no expert has stepped")
    results: dict[str, bool] = {}
    stepped = _run_phase(experts, [expert.commit_steps() for expert in experts])
    for layer in layers:
        own = {layer.uid: stepped[layer]} if isinstance(layer, RemoteExpert) else layer.apply_commit()
        for uid, has_stepped in own.items():
            results[uid] = has_stepped or results.get(uid, False)
    return results


def discard(module: Modules) -> None:
    """Drop the gradients since the last commit, of every accumulating remote expert and mixture inside ``module``.

    For a failed mini-batch, before it is run again or skipped. Until then, every `commit` fails.

    Example:
        >>> from torchweft.experts.client import discard
        >>> discard(nn.Sequential(nn.Linear(8, 8)))  # has no remote experts, so nothing is dropped
    """
    for layer in _accumulating_layers(module):
        layer.discard()


def _run_phase(
    experts: Sequence[RemoteExpert], steps: Sequence[Steps[bool]], state: str | None = None
) -> dict[RemoteExpert, bool]:
    """Run a phase of all experts. ``state`` describes the others if one fails. None: some of them have stepped."""
    runs = run_all(steps, settle=state is None)
    failed = [(expert, run) for expert, run in zip(experts, runs, strict=True) if run.error is not None]
    if failed:
        expert, run = failed[0]
        others = [one.uid for one, other in zip(experts, runs, strict=True) if other.value]
        if state is None:
            state = f"experts that have stepped: {', '.join(others) or 'none'}; commit() again steps none of them twice"
        if run.error is not None and len(experts) > 1:
            run.error.add_note(f"in a commit of {len(experts)} experts, from expert {expert.uid!r}; {state}")
        run.take()
    return {expert: bool(run.value) for expert, run in zip(experts, runs, strict=True)}


def _accumulating_layers(module: Modules) -> list[RemoteLayer]:
    modules = [module] if isinstance(module, nn.Module) else list(module)
    layers = [layer for one in modules for layer in one.modules()]
    return list(dict.fromkeys(layer for layer in layers if isinstance(layer, RemoteLayer) and layer.accumulates))


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
