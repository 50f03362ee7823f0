"""Time to find the best experts of a large grid, for a batch. All of it is local.

router's scores ── of every living expert ── the best k ── rows sorted by expert: ready to be sent
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
    """Milliseconds for one batch, and how many connections were made."""
    sides, batch = ((4, 4), 16) if quick else ((32, 32), 256)
    opened: list[str] = []

    def refuse(address: str) -> Transport:
        opened.append(address)
        raise RuntimeError("routing asked a server")

    directory = LocalDirectory()
    names = [f"ffn.{row}.{column}" for row in range(sides[0]) for column in range(sides[1])]
    directory.declare(names, "127.0.0.1:1", 3600.0)
    progress(f"{batch} samples over {len(names)} experts")
    with Connections(directory, open_transport=refuse) as connections:
        mixture = RemoteMixtureOfExperts(
            in_features=WIDTH, grid_size=sides, uid_prefix="ffn", connections=connections, k_best=K
        )
        x = torch.randn(batch, WIDTH)

        def work() -> Dispatch:
            crowd = mixture._client.live_experts()
            scores = mixture._router_scores(x)
            return Dispatch(choose_experts(scores, crowd.places, sides, K))

        found = race({"routing": work}, rounds=1 if quick else 9, sample=0.0 if quick else 0.5)
        living = len(mixture._client.live_experts())
    directory.close()
    if living != len(names):
        raise RuntimeError(f"the mixture knows {living} of {len(names)} experts")
    seen = found.median("routing") * 1e3
    rows: list[Row] = [
        {"figure": "ms", "seen": f"{seen:.2f}", **at_most(seen, REQUIRED_MS), "rounds": found.note()},
        {"figure": "connections made", "seen": f"{len(opened)}", **at_most(len(opened), 0)},
    ]
    return Table(f"routing {batch} samples over {len(names)} experts, k = {K}, one thread", rows)
