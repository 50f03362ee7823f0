"""A mixture with its experts on a server, compared with the same mixture with local experts.

    here   router ── rows by expert ──> 4 ffn, one after the other ──> weighted sum
    there  router ── rows by expert ──> one call each, gRPC, loopback ──> weighted mean     (the server is one process)

Backward runs the forward again on the server; with kept graphs it does not. Both are measured, and the better one is
judged.

Equality is tested in float64 over two steps: outputs and gradients of the second show that the experts took the same
step. Calls are counted by the connection.
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
HERE, THERE, KEPT = "local", "remote", "kept graphs"
KEEP = 256_000_000
REQUIRED_SHARE, REQUIRED_APART, REQUIRED_CALLS = 0.7, 1e-6, 2.0
_PREFIX = {torch.float32: "ffn", torch.float64: "exact"}


class LocalMixture(nn.Module):
    """The same mixture, as one writes it without a server. ``proj`` is copied."""

    def __init__(self, proj: nn.Linear, width: int) -> None:
        super().__init__()
        self.proj = copy.deepcopy(proj)
        self.experts = nn.ModuleList(feed_forward(width, each) for each in range(EXPERTS)).to(proj.weight.dtype)
        self.optimizers = [adam(each) for each in self.experts]

    def forward(self, x: Tensor) -> Tensor:
        """samples x width to the same."""
        scores, chosen = self.proj(x).topk(K, dim=1)
        weights, y = scores.softmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, choices = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weights[rows, choices, None])
        return y

    def step(self) -> None:
        """The work that a server does by itself."""
        for each in self.optimizers:
            each.step()
            each.zero_grad()


def run(quick: bool) -> Table:
    """Shares of the local speed, distance of the gradients, calls per expert."""
    width, batch = (32, 16) if quick else (512, 256)
    given = [[f"{prefix}.{n}", width, n, str(kind)[6:]] for kind, prefix in _PREFIX.items() for n in range(EXPERTS)]
    with ExitStack() as stack:
        server = stack.enter_context(
            Helper("torchweft_server", {"experts": given, "keep": KEEP}, python=sys.executable)
        )
        address = server.hear()["address"]
        directory = LocalDirectory()
        stack.callback(directory.close)
        directory.declare([name for name, *_ in given], address, 3600.0)
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
        exact_here = LocalMixture(exact.proj, width)
        apart, calls = _compared(exact, exact_here, batch, lambda: connections.statistics()[address].calls)
        remote, kept = (mixture(torch.float32, keep_graph=keep) for keep in (False, True))
        local = LocalMixture(remote.proj, width)
        forward = _race({HERE: _forward(local, batch), THERE: _forward(remote, batch)}, server, quick)
        works = {HERE: _training(local, batch, local.step), THERE: _training(remote, batch)}
        training = _race({**works, KEPT: _training(kept, batch)}, server, quick)
    better = max((THERE, KEPT), key=lambda name: training.ratio(HERE, name))
    rows = [
        _share("forward", forward, THERE),
        _share("forward, backward, step", training, THERE, judged=better == THERE),
        _share("forward, backward, step, graphs kept", training, KEPT, judged=better == KEPT),
        {"figure": "outputs and gradients, apart", "seen": f"{apart:.1e}", **at_most(apart, REQUIRED_APART)},
        {"figure": "calls per expert and step", "seen": f"{calls:g}", **at_most(calls, REQUIRED_CALLS)},
    ]
    title = f"{EXPERTS} experts ffn{width}, k = {K}, batch {batch}: the server's share of the local speed"
    return Table(title, rows, ["  with backward and step, the better one is judged: graphs kept, or not"])


def _compared(
    remote: RemoteMixtureOfExperts, local: LocalMixture, batch: int, counted: Callable[[], int]
) -> tuple[float, float]:
    """The largest difference within two steps, of the largest value of its tensor; and calls per expert of a step."""
    found, calls = 0.0, 0
    for _ in range(2):
        x, seed = (torch.randn(batch, remote.in_features, dtype=torch.float64) for _ in range(2))
        ours, theirs = _results(remote, x, seed, counted), _results(local, x, seed, counted)
        local.step()
        calls = ours[1]
        for one, other in zip(ours[0], theirs[0], strict=True):
            found = max(found, float((one - other).abs().max() / other.abs().max()))
    return found, calls / EXPERTS


def _results(layer: nn.Module, x: Tensor, seed: Tensor, counted: Callable[[], int]) -> tuple[Sequence[Tensor], int]:
    """Outputs, gradients of the inputs and of the router; and the calls that they took."""
    x = x.clone().requires_grad_()
    layer(x[:1].detach())  # the layout is asked for once
    layer.zero_grad()
    before = counted()
    y: Tensor = layer(x)
    y.backward(seed)
    proj = layer.get_submodule("proj")
    gradients = [each.grad for each in proj.parameters() if each.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *gradients], counted() - before


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
        for each in (x, *proj):
            each.grad = None
        layer(x).backward(seed)
        if step is not None:
            step()

    return work


def _race(works: Mapping[str, Work], server: Helper, quick: bool) -> Race:
    progress("racing")
    rounds, sample = (1, 0.0) if quick else (5, 1.0)
    return race(works, rounds=rounds, sample=sample, helpers=server.processes)


def _share(name: str, found: Race, of: str, *, judged: bool = True) -> Row:
    share = found.ratio(HERE, of)
    times = {"local ms": f"{found.median(HERE) * 1e3:.1f}", "remote ms": f"{found.median(of) * 1e3:.1f}"}
    return {
        "figure": f"{name}, share",
        "seen": f"{share:.2f}",
        **(at_least(share, REQUIRED_SHARE) if judged else {}),
        **times,
        "rounds": found.note(),
    }
