"""A server of hivemind with the same expert, in the peer's own Python.

Settings are its own: 8 processes that take requests, batches of up to 4096 rows. One intra-op thread, as everywhere.
"""

import json
import sys
from functools import partial

from words import answer_until_the_end, take_stdout_aside


def main() -> None:
    """Serve until standard input ends."""
    take_stdout_aside()
    import torch  # noqa: PLC0415  (after what it may print has its way)
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
    asked = json.loads(sys.argv[1])
    server = Server.create(
        expert_uids=[asked["uid"]],
        expert_cls="torchweft_ffn",
        hidden_dim=asked["width"],
        optim_cls=partial(torch.optim.Adam, lr=1e-3),
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_auto_relay=False,
        use_relay=False,
        start=True,
    )
    try:
        answer_until_the_end({"address": [str(each) for each in server.dht.get_visible_maddrs()]}, lambda _: {})
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()
