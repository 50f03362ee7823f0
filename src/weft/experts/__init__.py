"""Across machines: experts, modules with their optimizers, that many trainers share.

expert.py            ExpertBackend, what users see        registry.py  kinds of experts by name
schema.py            what a call of an expert looks like, nested and flat, and the dummy run
task.py              one request and its futures; the queue of requests
task_pool.py         options, quotas, delay of batches; where tasks of one kind wait
runtime.py           one thread per device
executor.py          one batch: gathered, run, isolated from faults, made to count
side_effects.py      what running a module changes, and undoing that
gradients.py         which are refused, and the sums of open mini-batches
optimizer_step.py    the optimizer: made, stepped, saved, loaded; idempotency.py  keys of applied requests
graph_cache.py       graphs and inputs kept from forward to backward
journal.py           the log of batches and its files    journal_replay.py  the replay from it
checkpoint.py        what survives the process            serialization.py  state dicts as safetensors files
telemetry.py         statistics and spans                 errors.py  what can go wrong
wire/, compression.py, protobuf.py                        tensors as bytes, behind a checked header
discovery/, replication/, mixture/                        who serves what; one expert at several servers; the best k
tensors.py           memory of tensors of any layout
server/, client/, status_page/                            over gRPC: Server, RemoteExpert; the status page
extras.py            what more than torch is needed, and how to install it
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC reads it once, when it is imported. With that support, each fork of a process with an open connection, such as
# those of a DataLoader's workers in each epoch, prints a line of gRPC's own on the user's terminal, and a fork of one
# with a server may abort. Without, a fork must leave gRPC alone: see `weft.experts.fork_guard`.

from weft.core.spec import TensorSpec
from weft.experts.expert import ExpertBackend
from weft.experts.gradients import AccumulationOptions, Guards
from weft.experts.graph_cache import GraphBudget
from weft.experts.idempotency import IdempotencyOptions
from weft.experts.journal import Entry, Journal, Member, journal_lines, read_journal
from weft.experts.journal_replay import replay
from weft.experts.registry import ExpertFactory, FeedForward, expert_kinds, make_expert, register_expert
from weft.experts.runtime import Runtime
from weft.experts.task_pool import PoolOptions, TaskPool

__all__ = [
    "AccumulationOptions",
    "Entry",
    "ExpertBackend",
    "ExpertFactory",
    "FeedForward",
    "GraphBudget",
    "Guards",
    "IdempotencyOptions",
    "Journal",
    "Member",
    "PoolOptions",
    "Runtime",
    "TaskPool",
    "TensorSpec",
    "expert_kinds",
    "journal_lines",
    "make_expert",
    "read_journal",
    "register_expert",
    "replay",
]
