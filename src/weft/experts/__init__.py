"""Across machines: experts, modules with their optimizers, that many trainers share.

backend.py      ExpertBackend, what users see   registry.py, layers.py  kinds of experts by name
arguments.py, checks.py, words.py               what is wrong with what users give
pool.py         tasks of many clients           runtime.py   one thread per device
task.py, lanes.py, limits.py, schema.py         what waits, how much, and what it must look like
linger.py                                       whether a batch waits a moment for others
engine.py, draft.py, batch.py                   one expert's work on a batch: joining tasks, dealing results
runner.py, effects.py                           the module as a segment, and undoing what it changes
isolation.py, guards.py                         one client's fault stays that client's
idempotency.py, sums.py, kept.py                keys, mini-batches, graphs that wait for a backward
stepping.py, gradients.py                       one optimizer step, and whose memory it may write to
journal.py, entry.py, logfile.py, replay.py     the log, its lines and file, and running it again
state.py, loading.py                            what a state is made of, and going on from one
wire/, compression.py                           tensors as bytes, behind a checked header
checkpoint/                                     what survives the process
directory/                                      who serves what, with leases
replica/                                        one expert at several servers: one steps, the others follow
server/, client/, service/                      over gRPC: Server, RemoteExpert, and what both know
panel/, telemetry.py                            what people and their tools see of it
mixture/                                        the best k of many experts for each row
optimizers.py, counts.py, errors.py             fused steps, statistics, what can go wrong
extras.py                                       what more than torch is needed, and how to install it
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC reads it once, when it is imported. With that support, each fork of a process with an open connection, such as
# those of a DataLoader's workers in each epoch, prints a line of gRPC's own on the user's terminal, and a fork of one
# with a server may abort. Without, a fork must leave gRPC alone: see `weft.experts.fork_guard`.

from weft.core.spec import TensorSpec
from weft.experts.accumulation import SumsOptions
from weft.experts.batching import PoolOptions
from weft.experts.expert import ExpertBackend
from weft.experts.gradient_guards import Guards
from weft.experts.graph_cache import GraphBudget
from weft.experts.idempotency import IdempotencyOptions
from weft.experts.journal import Entry, Journal, Member, journal_lines, read_journal
from weft.experts.registry import Blueprint, FeedForward, TransformerLayer, expert_kinds, make_expert, register_expert
from weft.experts.replay import replay
from weft.experts.runtime import Runtime
from weft.experts.task_pool import TaskPool

__all__ = [
    "Blueprint",
    "Entry",
    "ExpertBackend",
    "FeedForward",
    "GraphBudget",
    "Guards",
    "IdempotencyOptions",
    "Journal",
    "Member",
    "PoolOptions",
    "Runtime",
    "SumsOptions",
    "TaskPool",
    "TensorSpec",
    "TransformerLayer",
    "expert_kinds",
    "journal_lines",
    "make_expert",
    "read_journal",
    "register_expert",
    "replay",
]
