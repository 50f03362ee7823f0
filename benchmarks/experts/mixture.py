"""A mixture with its experts on a server, compared with the same mixture with local experts.

    local   router ── rows by expert ──> 4 ffn, one after the other ──> weighted sum
    remote  router ── rows by expert ──> one call each, gRPC, loopback ──> weighted mean    (the server is one process)

The server repeats the forward in a backward, unless graphs are kept. Both are measured, and the better one is judged.

Outputs and gradients are compared in float64 over two steps. Those of the second depend on the first step of the
experts. The connection counts the calls.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from benchmarks.experts.helper import Helper
from benchmarks.experts.local import adam
from benchmarks.experts.processes.module import feed_forward
from benchmarks.harness import Race, Work, progress, race
from benchmarks.table import Row, Table, at_least, at_most
from torchweft.experts.client import Connections
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.mixture import RemoteMixtureOfExperts

EXPERTS, K = 4, 2
LOCAL, REMOTE, KEPT = "local", "remote", "kept graphs"
KEEP = 256_000_000
REQUIRED_SHARE, REQUIRED_ERROR, REQUIRED_CALLS = 0.7, 1e-6, 2.0
_PREFIX = {torch.float32: "ffn", torch.float64: "exact"}


class LocalMixture(nn.Module):
    """The same mixture with local experts. ``proj`` is copied."""

    def __init__(self, proj: nn.Linear, width: int) -> None:
        super().__init__()
        self.proj = copy.deepcopy(proj)
        self.experts = nn.ModuleList(feed_forward(width, seed) for seed in range(EXPERTS)).to(proj.weight.dtype)
        self.optimizers = [adam(expert) for expert in self.experts]

    def forward(self, x: Tensor) -> Tensor:
        """Map samples x width to samples x width."""
        scores, chosen = self.proj(x).topk(K, dim=1)
        weights, y = scores.softmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, choices = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weights[rows, choices, None])
        return y

    def step(self) -> None:
        """Step every optimizer, as a server does after a backward."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def run(quick: bool) -> Table:
    """Shares of the local speed, differences of gradients, and calls per expert."""
    width, batch = (32, 16) if quick else (512, 256)
    configs = [[f"{prefix}.{n}", width, n, str(kind)[6:]] for kind, prefix in _PREFIX.items() for n in range(EXPERTS)]
    with ExitStack() as stack:
        server = stack.enter_context(
            Helper("torchweft_server", {"experts": configs, "keep": KEEP}, python=sys.executable)
        )
        address = server.hear()["address"]
        directory = LocalDirectory()
        stack.callback(directory.close)
        directory.declare([name for name, *_ in configs], address, 3600.0)
        connections = stack.enter_context(Connections(directory))

        def mixture(kind: torch.dtype, *, keep_graph: bool = False) -> RemoteMixtureOfExperts:
            torch.manual_seed(0)
            return RemoteMixtureOfExperts(
                in_features=width,
                grid_size=[EXPERTS],
                uid_prefix=_PREFIX[kind],
                connections=connections,
                k_best=K,
                k_min=K,
                dtype=kind,
                keep_graph=keep_graph,
            )

        progress("two steps in float64")
        exact = mixture(torch.float64)
        exact_local = LocalMixture(exact.proj, width)
        error, calls = _compare(exact, exact_local, batch, lambda: connections.statistics()[address].calls)
        remote, kept = (mixture(torch.float32, keep_graph=keep) for keep in (False, True))
        local = LocalMixture(remote.proj, width)
        forward = _race({LOCAL: _forward(local, batch), REMOTE: _forward(remote, batch)}, server, quick)
        works = {LOCAL: _training(local, batch, local.step), REMOTE: _training(remote, batch)}
        training = _race({**works, KEPT: _training(kept, batch)}, server, quick)
    better = max((REMOTE, KEPT), key=lambda name: training.ratio(LOCAL, name))
    rows = [
        _share("forward", forward, REMOTE),
        _share("forward, backward, step", training, REMOTE, judged=better == REMOTE),
        _share("forward, backward, step, graphs kept", training, KEPT, judged=better == KEPT),
        {"figure": "difference of outputs and gradients", "measured": f"{error:.1e}", **at_most(error, REQUIRED_ERROR)},
        {"figure": "calls per expert and step", "measured": f"{calls:g}", **at_most(calls, REQUIRED_CALLS)},
    ]
    title = f"{EXPERTS} experts ffn{width}, k = {K}, batch {batch}: the server's share of the local speed"
    return Table(title, rows, ["  with backward and step, the better one of kept graphs and none is judged"])


def _compare(
    remote: RemoteMixtureOfExperts, local: LocalMixture, batch: int, count_calls: Callable[[], int]
) -> tuple[float, float]:
    """Largest relative difference in two steps, and calls per expert in the second."""
    largest, calls = 0.0, 0
    for _ in range(2):
        x, seed = (torch.randn(batch, remote.in_features, dtype=torch.float64) for _ in range(2))
        ours, theirs = _results(remote, x, seed, count_calls), _results(local, x, seed, count_calls)
        local.step()
        calls = ours[1]
        for one, other in zip(ours[0], theirs[0], strict=True):
            largest = max(largest, float((one - other).abs().max() / other.abs().max()))
    return largest, calls / EXPERTS


def _results(layer: nn.Module, x: Tensor, seed: Tensor, count_calls: Callable[[], int]) -> tuple[Sequence[Tensor], int]:
    """Outputs, gradients of the inputs and of the router, and the number of calls."""
    x = x.clone().requires_grad_()
    layer(x[:1].detach())  # fetches the layout, which is not counted
    layer.zero_grad()
    before = count_calls()
    y: Tensor = layer(x)
    y.backward(seed)
    proj = layer.get_submodule("proj")
    gradients = [parameter.grad for parameter in proj.parameters() if parameter.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *gradients], count_calls() - before


def _forward(layer: nn.Module, batch: int) -> Callable[[], object]:
    x = torch.randn(batch, layer.get_submodule("proj").weight.shape[1])

    def work() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return work


def _training(layer: nn.Module, batch: int, step: Callable[[], None] | None = None) -> Callable[[], object]:
    width = layer.get_submodule("proj").weight.shape[1]
    x, seed = torch.randn(batch, width, requires_grad=True), torch.randn(batch, width)
    proj = list(layer.get_submodule("proj").parameters())

    def work() -> None:
        for leaf in (x, *proj):
            leaf.grad = None
        layer(x).backward(seed)
        if step is not None:
            step()

    return work


def _race(works: Mapping[str, Work], server: Helper, quick: bool) -> Race:
    progress("race")
    rounds, sample = (1, 0.0) if quick else (5, 1.0)
    return race(works, rounds=rounds, sample=sample, helpers=server.processes)


def _share(name: str, result: Race, candidate: str, *, judged: bool = True) -> Row:
    share = result.ratio(LOCAL, candidate)
    times = {"local ms": f"{result.median(LOCAL) * 1e3:.1f}", "remote ms": f"{result.median(candidate) * 1e3:.1f}"}
    return {
        "figure": f"{name}, share",
        "measured": f"{share:.2f}",
        **(at_least(share, REQUIRED_SHARE) if judged else {}),
        **times,
        "rounds": result.note(),
    }
