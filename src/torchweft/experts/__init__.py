"""Remote experts: modules with their optimizers on other machines, which many trainers share.

expert.py            ExpertBackend, the public class      registry.py  kinds of experts by name
schema.py            nested and flat schemas of a call, and the dummy run
task.py              one request and its futures; the queue of requests, with quotas and delay of batches
task_pool.py         tasks of one kind wait here; one thread per device takes them
batch_executor.py    one batch: gathered, run, isolated from faults, applied to weights, sums and keys
side_effects.py      changes that a module makes when it runs, and undoing them
gradients.py         guards, and the step                 accumulation.py  the sums of open mini-batches
optimizer_state.py   the optimizer: made, saved, loaded   idempotency.py  keys of applied requests
graph_cache.py       graphs and inputs kept from forward to backward
checkpoint.py        state that survives the process      serialization.py  state dicts as safetensors files
errors.py            all errors and warnings
statistics.py        all numbers of a server              telemetry.py  spans
wire/, compression.py, protobuf.py                        tensors as bytes, after a checked header
discovery/, replication/, mixture/                        servers of each expert; one expert at several; the best k
server/, client/, status_page/                            over gRPC: Server, RemoteExpert; the status page
extras.py            packages needed in addition to torch, and how to install them
"""

import os
from typing import TYPE_CHECKING

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC reads it once, at import. With that support, each fork of a process with an open connection, such as those of a
# DataLoader's workers in each epoch, prints a line of gRPC on the user's terminal, and a fork of a server can abort.
# Without it, a forked process must not use gRPC: see `weft.experts.fork_guard`.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Otherwise gRPC prints a line on a client's stderr when a server ends with a call open, although that is no fault.

from torchweft.core.spec import Dim, TensorSpec
from torchweft.experts.accumulation import AccumulationOptions
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.gradients import Guards
from torchweft.experts.graph_cache import GraphBudget
from torchweft.experts.idempotency import IdempotencyOptions
from torchweft.experts.registry import ExpertFactory, FeedForward, expert_kinds, make_expert, register_expert
from torchweft.experts.task import PoolOptions
from torchweft.experts.task_pool import Runtime, TaskPool

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "ModuleBackend":
            # ImportError, because ``from ... import`` replaces the text of an AttributeError by its own.
            raise ImportError("hivemind's ModuleBackend is called ExpertBackend here: weft.ExpertBackend", name=name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AccumulationOptions",
    "Dim",
    "ExpertBackend",
    "ExpertFactory",
    "FeedForward",
    "GraphBudget",
    "Guards",
    "IdempotencyOptions",
    "PoolOptions",
    "Runtime",
    "TaskPool",
    "TensorSpec",
    "expert_kinds",
    "make_expert",
    "register_expert",
]
