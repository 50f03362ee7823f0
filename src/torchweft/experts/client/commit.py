"""Commit of several experts: one optimizer step of all, or of none.

    prepare   every expert checks its sum, the fence and the incarnation, and keeps the sum    all at once
    commit    every expert steps                                                               all at once

An expert that cannot step says so in the first phase, when no other has stepped. Both phases can be repeated: the name
of a mini-batch is the key of its step. Without a second expert there is one phase.

    after "prepare"       a server ends           its sum is gone: the others step, and `commit` raises for it
    between the phases    this process ends       no expert steps, and the sums are dropped after a while
    within "commit"       this process ends       experts that have the message step, the others drop their sums
    after "commit"        a server ends           it continues from its checkpoint, see `RemoteExpert.durable_step`
"""

from collections.abc import Iterable, Sequence

from torch import nn

from torchweft.experts.client.calls import Steps, run_all
from torchweft.experts.client.remote import RemoteExpert
from torchweft.experts.client.remote_function import RemoteLayer

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
    """Run a phase of all experts. ``state``: what is known if one fails. None: some of the others have stepped."""
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
