"""torchweft trains a PyTorch model in parts, which are cut across devices, across time or across machines.

    devices    Pipe, Schedule, skippable, stash, pop, DeferredBatchNorm, build_on_meta, clip_grad_norm_, checkpoint
    time       Recurrent, LSTM, GRU, RNN, Stack, Bidirectional, recurrent_net, Window
    machines   ExpertBackend, TensorSpec, Runtime, Server, RemoteExpert, RemoteMixtureOfExperts, Connections
    all        Recorder, WeftError, and the other errors in `weft.errors`

Names are loaded on first access. Those for other machines need the extra ``experts``. Without it, access to such a name
raises a ModuleNotFoundError that names the package to install. Further public names are in the packages
`weft.pipeline`, `weft.recurrent`, `weft.experts`, `weft.report` and `weft.compat`.

Examples in docstrings begin with ``import torch, torchweft`` and ``from torch import nn``.
"""

from typing import TYPE_CHECKING

from torchweft.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from torchweft import checkpoint, compat, errors, experts, pipeline, recurrent, report
    from torchweft.core.context import is_checkpointing, is_recomputing
    from torchweft.core.errors import WeftError
    from torchweft.core.spec import TensorSpec
    from torchweft.core.version import __version__ as __version__
    from torchweft.experts import ExpertBackend, Runtime
    from torchweft.experts.client import Connections, GrpcTransport, RemoteExpert, create_remote_experts, gather
    from torchweft.experts.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
    from torchweft.experts.server import Server
    from torchweft.pipeline import DeferredBatchNorm, Pipe, balance_by_parameters, balance_by_size, balance_by_time
    from torchweft.pipeline.gradients import clip_grad_norm_
    from torchweft.pipeline.microbatch import NoChunk
    from torchweft.pipeline.schedule import Schedule
    from torchweft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables
    from torchweft.pipeline.tracing import Recorder
    from torchweft.pipeline.weights import build_on_meta
    from torchweft.recurrent import GRU, LSTM, RNN, Bidirectional, Recurrent, Stack, Window, recurrent_net
else:
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "torchweft.core.context": ("is_checkpointing", "is_recomputing"),
            "torchweft.core.errors": ("WeftError",),
            "torchweft.core.spec": ("TensorSpec",),
            "torchweft.core.version": ("__version__",),
            "torchweft.experts": ("ExpertBackend", "Runtime"),
            "torchweft.experts.client": (
                *("Connections", "GrpcTransport", "RemoteExpert", "create_remote_experts", "gather"),
            ),
            "torchweft.experts.mixture": ("RemoteMixtureOfExperts", "RemoteSwitchMixtureOfExperts"),
            "torchweft.experts.server": ("Server",),
            "torchweft.pipeline": (
                *("DeferredBatchNorm", "Pipe", "balance_by_parameters", "balance_by_size", "balance_by_time"),
            ),
            "torchweft.pipeline.gradients": ("clip_grad_norm_",),
            "torchweft.pipeline.microbatch": ("NoChunk",),
            "torchweft.pipeline.schedule": ("Schedule",),
            "torchweft.pipeline.skip": ("Namespace", "pop", "skippable", "stash", "verify_skippables"),
            "torchweft.pipeline.weights": ("build_on_meta",),
            # Its class is in weft.pipeline.tracing. Importing weft.report lets notebooks draw it.
            "torchweft.report": ("Recorder",),
            "torchweft.recurrent": (
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
    "compat", "create_remote_experts", "errors", "experts", "gather", "is_checkpointing", "is_recomputing", "pipeline",
    "pop", "recurrent", "recurrent_net", "report", "skippable", "stash", "verify_skippables",
]  # fmt: skip
