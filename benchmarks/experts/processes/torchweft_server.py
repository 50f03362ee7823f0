"""A server of torchweft: ``python torchweft_server.py '{"experts": [["ffn.0", 512, 0, "float32"]], "keep": 0}'``.

Each expert has a name, a width, a seed of its weights and a dtype. ``keep`` is its budget for kept graphs, in bytes.
"""

import json
import sys
from functools import partial

import torch
from module import feed_forward
from words import answer_until_the_end, take_stdout_aside

from torchweft.experts import ExpertBackend, GraphBudget, TensorSpec
from torchweft.experts.server import Server, keep_freed_memory, use_large_pages


def backend(name: str, width: int, seed: int, dtype: str, keep: int) -> ExpertBackend:
    """Expert with Adam. The backend chooses the fused version."""
    kind: torch.dtype = getattr(torch, dtype)
    return ExpertBackend(
        name,
        feed_forward(width, seed).to(kind),
        partial(torch.optim.Adam, lr=1e-3),
        args_schema=(TensorSpec((None, width), kind),),
        keep_graphs=GraphBudget(keep) if keep else None,
    )


def main() -> None:
    """Serve until standard input ends."""
    keep_freed_memory()  # as `torchweft serve` does
    use_large_pages()
    take_stdout_aside()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    experts = [backend(*expert, keep=options["keep"]) for expert in options["experts"]]
    with Server(experts) as server:
        answer_until_the_end(
            {"address": server.address},
            lambda _: {"statistics": server.statistics().to_json()},
        )


if __name__ == "__main__":
    main()
