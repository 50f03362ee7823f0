"""Server of hivemind with the same expert, run by the peer's Python.

It has hivemind's default settings: 8 processes that accept requests, and batches of up to 4096 rows. As in all
benchmarks there is one intra-op thread.
"""

import json
import sys
from functools import partial

from words import answer_until_the_end, take_stdout_aside


def main() -> None:
    """Serve until standard input ends."""
    take_stdout_aside()
    import torch  # noqa: PLC0415  (must follow the redirection of stdout)
    from hivemind.moe import Server  # noqa: PLC0415
    from hivemind.moe.server.layers import register_expert_class  # noqa: PLC0415
    from module import feed_forward  # noqa: PLC0415
    from torch import Tensor, nn  # noqa: PLC0415

    def sample(batch: int, width: int) -> Tensor:
        return torch.empty(batch, width)

    @register_expert_class("torchweft_ffn", sample)
    class Expert(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = feed_forward(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    server = Server.create(
        expert_uids=[options["uid"]],
        expert_cls="torchweft_ffn",
        hidden_dim=options["width"],
        optim_cls=partial(torch.optim.Adam, lr=1e-3),
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_auto_relay=False,
        use_relay=False,
        start=True,
    )
    try:
        answer_until_the_end({"address": [str(address) for address in server.dht.get_visible_maddrs()]}, lambda _: {})
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()
