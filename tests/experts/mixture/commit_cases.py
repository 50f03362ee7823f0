"""Real experts, each on its own restartable server, behind transports that lose chosen calls."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.experts.mixture.mixture_cases import FOREVER, WIDTH, two_layers
from torchweft.experts import ExpertBackend, TensorSpec
from torchweft.experts.client import Connections, LocalTransport, Retry
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import LostError
from torchweft.experts.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Header, Kind, Received, write_fault

X = TensorSpec((None, WIDTH), torch.float64)
COUNT = 4
UIDS = [f"ffn.{number}" for number in range(COUNT)]
ALL = dict.fromkeys(UIDS, True)
PATIENCE = 20.0
SWIFT = Retry(first=0.001)
sgd = partial(torch.optim.SGD, lr=0.1)
Fate = str | BaseException
"""Outcome of a call: "request" or "reply" is lost, "silence" (never answered), or this error as the answer."""
Reply = Callable[[Call], None]


class Experts:
    """Context manager for a grid of four experts. ``here`` has local copies of their modules.

    ``fates`` maps (kind, uid) to the outcomes of the next calls. ``options`` are passed to the backends.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.here = nn.ModuleDict({uid.replace(".", "_"): two_layers() for uid in UIDS})
        self.fates: dict[tuple[Kind, str], list[Fate]] = {}
        self.headers: list[Header] = []
        self.backends: dict[str, ExpertBackend] = {}
        self.servers: dict[str, Server] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Experts":
        self.directory = LocalDirectory()
        self._stack.callback(self.directory.close)
        for uid in UIDS:
            self._serve(uid, copy.deepcopy(self.module_here(uid)))
        self.leases = {uid: self.directory.declare(uid, uid, FOREVER) for uid in UIDS}
        self.connections = self._stack.enter_context(Connections(self.directory, open_transport=self._transport_to))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def module_here(self, uid: str) -> nn.Module:
        return self.here.get_submodule(uid.replace(".", "_"))

    def restart(self, *uids: str) -> None:
        """Restart servers as from a checkpoint: with their weights, but without open mini-batches."""
        for uid in uids:
            self.servers[uid].shutdown()
            self._serve(uid, self.backends[uid].module)

    def steps(self) -> dict[str, int]:
        return {uid: backend.steps for uid, backend in self.backends.items() if backend.steps}

    def called(self, kind: Kind) -> list[str]:
        return sorted(header.uid for header in self.headers if header.kind is kind)

    def lose(self, kind: Kind, uid: str, *fates: Fate) -> None:
        self.fates.setdefault((kind, uid), []).extend(fates)

    def mixture(self, switch: bool = False, **options: Any) -> RemoteMixtureOfExperts:
        """Mixture of two experts per sample that tolerates one failure."""
        plain: dict[str, Any] = {"in_features": WIDTH, "grid_size": [COUNT], "uid_prefix": "ffn", "k_best": 2}
        plain |= {"connections": self.connections, "accumulate": True, "retry": SWIFT, "dtype": torch.float64}
        plain |= {"forward_timeout": PATIENCE, "backward_timeout": PATIENCE}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            if switch:
                return RemoteSwitchMixtureOfExperts(**{**plain, "jitter_eps": 0.0, **options})
            return RemoteMixtureOfExperts(**{**plain, **options})

    def strict(self, **options: Any) -> RemoteMixtureOfExperts:
        return self.mixture(backward_k_min=2, k_min=2, **options)

    def _serve(self, uid: str, module: nn.Module) -> None:
        self.backends[uid] = ExpertBackend(uid, module, sgd, args_schema=(X,), **self._options)
        self.servers[uid] = self._stack.enter_context(Server([self.backends[uid]]))

    def _transport_to(self, address: str) -> LocalTransport:
        return LocalTransport(partial(self._handle, address), name=address)

    def _handle(self, address: str, call: Received, reply: Reply) -> None:
        header = call.header
        self.headers.append(header)
        fates = self.fates.get((header.kind, header.uid))
        fate = fates.pop(0) if fates else ""
        if fate == "silence":
            return
        if fate and fate != "reply":
            reply(_error(header, fate if isinstance(fate, BaseException) else LostError("the request was dropped")))
            return

        def answer(result: Call) -> None:
            reply(_error(header, LostError("the reply was dropped")) if fate == "reply" else result)

        self.servers[address].handler()(call, answer)


def _error(header: Header, error: BaseException) -> Call:
    return Call(Header(kind=Kind.ERROR, call_id=header.call_id, data=write_fault(error)))


class LocalMixture(nn.Module):
    """The same mixture in plain autograd, with a copy of the router and the local experts."""

    def __init__(self, experts: Experts, mixture: RemoteMixtureOfExperts) -> None:
        super().__init__()
        self.proj, self.experts = copy.deepcopy(mixture.proj), experts.here
        self._switch = isinstance(mixture, RemoteSwitchMixtureOfExperts)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.proj(x)
        best, chosen = scores.topk(2, dim=1)
        weights = scores.softmax(1).gather(1, chosen) if self._switch else best.softmax(1)
        outputs = torch.stack([expert(x) for expert in self.experts.values()], 1)
        return (weights[..., None] * outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH))).sum(1)


def assert_same_weights(experts: Experts) -> None:
    """Assert that remote and local experts have the same weights."""
    for uid, backend in experts.backends.items():
        pairs = zip(backend.module.parameters(), experts.module_here(uid).parameters(), strict=True)
        for remote, local in pairs:
            torch.testing.assert_close(remote, local, rtol=0, atol=1e-10, msg=lambda text, uid=uid: f"{uid}: {text}")


def step_here(experts: Experts, model: nn.Module, *batches: Tensor) -> None:
    """Take one step of the local experts on all these batches together."""
    optimizers = [sgd(module.parameters()) for module in experts.here.children()]
    for batch in batches:
        model(batch).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def run(mixture: RemoteMixtureOfExperts, x: Tensor) -> None:
    y = mixture(x)
    (y[0] if isinstance(y, tuple) else y).square().sum().backward()


def only(mixture: RemoteMixtureOfExperts, *numbers: int) -> RemoteMixtureOfExperts:
    """Make the router choose these experts for every input."""
    with torch.no_grad():
        mixture.proj.weight.zero_()
        mixture.proj.bias.copy_(torch.tensor([float(n in numbers) for n in range(len(UIDS))]))
    return mixture


def assert_commit_steps(experts: Experts, mixture: RemoteMixtureOfExperts, model: nn.Module, *batches: Tensor) -> None:
    """Assert that all experts commit, with the same weights as after a local step on these batches together."""
    assert mixture.commit() == ALL
    step_here(experts, model, *batches)
    assert_same_weights(experts)
