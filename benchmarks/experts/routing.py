"""Time to choose the best experts of a large grid for a batch, without any call to a server.

router's scores ── of every live expert ── the best k ── rows sorted by expert, ready to be sent
"""

import torch

from benchmarks.harness import progress, race
from benchmarks.table import Row, Table, at_most
from torchweft.experts.client import Connections, Transport
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.mixture import RemoteMixtureOfExperts
from torchweft.experts.mixture.routing import Dispatch, choose_experts

WIDTH, K = 512, 4
REQUIRED_MS = 3.0


def run(quick: bool) -> Table:
    """Milliseconds for one batch, and the number of connections."""
    sides, batch = ((4, 4), 16) if quick else ((32, 32), 256)
    opened: list[str] = []

    def forbid(address: str) -> Transport:
        opened.append(address)
        raise RuntimeError("routing opened a connection")

    directory = LocalDirectory()
    names = [f"ffn.{row}.{column}" for row in range(sides[0]) for column in range(sides[1])]
    directory.declare(names, "127.0.0.1:1", 3600.0)
    progress(f"{batch} samples over {len(names)} experts")
    with Connections(directory, open_transport=forbid) as connections:
        mixture = RemoteMixtureOfExperts(
            in_features=WIDTH, grid_size=sides, uid_prefix="ffn", connections=connections, k_best=K
        )
        x = torch.randn(batch, WIDTH)

        def work() -> Dispatch:
            live = mixture._client.live_experts()
            scores = mixture._router_scores(x)
            return Dispatch(choose_experts(scores, live.places, sides, K))

        result = race({"routing": work}, rounds=1 if quick else 9, sample=0.0 if quick else 0.5)
        live_count = len(mixture._client.live_experts())
    directory.close()
    if live_count != len(names):
        raise RuntimeError(f"the mixture knows {live_count} of {len(names)} experts")
    cost = result.median("routing") * 1e3
    rows: list[Row] = [
        {"figure": "ms", "measured": f"{cost:.2f}", **at_most(cost, REQUIRED_MS), "rounds": result.note()},
        {"figure": "connections made", "measured": f"{len(opened)}", **at_most(len(opened), 0)},
    ]
    return Table(f"routing {batch} samples over {len(names)} experts, k = {K}, one thread", rows)
