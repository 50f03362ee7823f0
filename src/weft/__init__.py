"""weft trains a PyTorch model in parts, which are cut across devices, across time or across machines.

    devices    Pipe, Schedule, skippable, stash, pop, DeferredBatchNorm, build_on_meta, clip_grad_norm_, checkpoint
    time       Recurrent, LSTM, GRU, RNN, Stack, Bidirectional, recurrent_net, Window
    machines   ExpertBackend, TensorSpec, Runtime, Server, RemoteExpert, RemoteMixtureOfExperts, Connections
    all        Recorder, WeftError, and the other errors in `weft.errors`

Names are loaded on first access. Those for other machines need the extra ``experts``. Without it, access to such a name
raises a ModuleNotFoundError that names the package to install. Further public names are in the packages
`weft.pipeline`, `weft.recurrent`, `weft.experts`, `weft.report` and `weft.compat`.

Examples in docstrings begin with ``import torch, weft`` and ``from torch import nn``.
"""

from typing import TYPE_CHECKING

from weft.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from weft import checkpoint, compat, errors, experts, pipeline, recurrent, report
    from weft.core.context import is_checkpointing, is_recomputing
    from weft.core.errors import WeftError
    from weft.core.spec import TensorSpec
    from weft.experts import ExpertBackend, Runtime
    from weft.experts.client import Connections, GrpcTransport, RemoteExpert, create_remote_experts
    from weft.experts.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
    from weft.experts.server import Server
    from weft.pipeline import DeferredBatchNorm, Pipe, balance_by_parameters, balance_by_size, balance_by_time
    from weft.pipeline.gradients import clip_grad_norm_
    from weft.pipeline.microbatch import NoChunk
    from weft.pipeline.schedule import Schedule
    from weft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables
    from weft.pipeline.tracing import Recorder
    from weft.pipeline.weights import build_on_meta
    from weft.recurrent import GRU, LSTM, RNN, Bidirectional, Recurrent, Stack, Window, recurrent_net
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "weft.core.context": ("is_checkpointing", "is_recomputing"),
            "weft.core.errors": ("WeftError",),
            "weft.core.spec": ("TensorSpec",),
            "weft.experts": ("ExpertBackend", "Runtime"),
            "weft.experts.client": ("Connections", "GrpcTransport", "RemoteExpert", "create_remote_experts"),
            "weft.experts.mixture": ("RemoteMixtureOfExperts", "RemoteSwitchMixtureOfExperts"),
            "weft.experts.server": ("Server",),
            "weft.pipeline": (
                *("DeferredBatchNorm", "Pipe", "balance_by_parameters", "balance_by_size", "balance_by_time"),
            ),
            "weft.pipeline.gradients": ("clip_grad_norm_",),
            "weft.pipeline.microbatch": ("NoChunk",),
            "weft.pipeline.schedule": ("Schedule",),
            "weft.pipeline.skip": ("Namespace", "pop", "skippable", "stash", "verify_skippables"),
            "weft.pipeline.weights": ("build_on_meta",),
            # Its class is in weft.pipeline.tracing. Importing weft.report lets notebooks draw it.
            "weft.report": ("Recorder",),
            "weft.recurrent": (
                *("GRU", "LSTM", "RNN", "Bidirectional", "Recurrent", "Stack", "Window", "recurrent_net"),
            ),
        },
        modules=("checkpoint", "compat", "errors", "experts", "pipeline", "recurrent", "report"),
    )

__all__ = [
    "GRU", "LSTM", "RNN", "Bidirectional", "Connections", "DeferredBatchNorm", "ExpertBackend", "GrpcTransport",
    "Namespace", "NoChunk", "Pipe", "Recorder", "Recurrent", "RemoteExpert", "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts", "Runtime", "Schedule", "Server", "Stack", "TensorSpec", "WeftError", "Window",
    "balance_by_parameters", "balance_by_size", "balance_by_time", "build_on_meta", "checkpoint", "clip_grad_norm_",
    "compat", "create_remote_experts", "errors", "experts", "is_checkpointing", "is_recomputing", "pipeline", "pop",
    "recurrent", "recurrent_net", "report", "skippable", "stash", "verify_skippables",
]  # fmt: skip
