"""weft trains a PyTorch model in parts: cut across devices, across time, across machines.

    devices    Pipe, Schedule, skippable, stash, pop, DeferredBatchNorm
    time       Recurrent, LSTM, GRU, RNN, Stack, Bidirectional, recurrent_net, Window
    machines   ExpertBackend, TensorSpec, Runtime, Server, RemoteExpert, RemoteMixtureOfExperts, Connections
    all        Recorder, WeftError, and the other errors in `weft.errors`

All of it is loaded when it is first touched. What reaches other machines needs the extra ``experts``; without it,
touching such a name is a ModuleNotFoundError that says what to install. What is not here but public lives in the
packages `weft.pipeline`, `weft.recurrent`, `weft.experts`, `weft.report` and `weft.compat`.
"""

from typing import TYPE_CHECKING

from weft.core.lazy import attributes

if TYPE_CHECKING:
    from weft import compat, errors, experts, pipeline, recurrent, report
    from weft.core.ambient import is_checkpointing, is_recomputing
    from weft.core.errors import WeftError
    from weft.core.events import Recorder
    from weft.core.microbatch import NoChunk
    from weft.core.schedule import Schedule
    from weft.core.spec import TensorSpec
    from weft.experts.backend import ExpertBackend
    from weft.experts.client import Connections, GrpcTransport, RemoteExpert, create_remote_experts
    from weft.experts.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts
    from weft.experts.runtime import Runtime
    from weft.experts.server import Server
    from weft.pipeline.batchnorm import DeferredBatchNorm
    from weft.pipeline.partition import balance_by_parameters, balance_by_size, balance_by_time
    from weft.pipeline.pipe import Pipe
    from weft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables
    from weft.recurrent.functional import recurrent_net
    from weft.recurrent.layers import GRU, LSTM, RNN, Bidirectional, Stack
    from weft.recurrent.links import Window
    from weft.recurrent.network import Recurrent
else:
    __getattr__, __dir__ = attributes(
        __name__,
        {
            "weft.core.ambient": ("is_checkpointing", "is_recomputing"),
            "weft.core.errors": ("WeftError",),
            "weft.core.events": ("Recorder",),
            "weft.core.microbatch": ("NoChunk",),
            "weft.core.schedule": ("Schedule",),
            "weft.core.spec": ("TensorSpec",),
            "weft.experts.backend": ("ExpertBackend",),
            "weft.experts.client": ("Connections", "GrpcTransport", "RemoteExpert", "create_remote_experts"),
            "weft.experts.mixture": ("RemoteMixtureOfExperts", "RemoteSwitchMixtureOfExperts"),
            "weft.experts.runtime": ("Runtime",),
            "weft.experts.server": ("Server",),
            "weft.pipeline.batchnorm": ("DeferredBatchNorm",),
            "weft.pipeline.partition": ("balance_by_parameters", "balance_by_size", "balance_by_time"),
            "weft.pipeline.pipe": ("Pipe",),
            "weft.pipeline.skip": ("Namespace", "pop", "skippable", "stash", "verify_skippables"),
            "weft.recurrent.functional": ("recurrent_net",),
            "weft.recurrent.layers": ("GRU", "LSTM", "RNN", "Bidirectional", "Stack"),
            "weft.recurrent.links": ("Window",),
            "weft.recurrent.network": ("Recurrent",),
        },
        modules=("compat", "errors", "experts", "pipeline", "recurrent", "report"),
    )

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bidirectional",
    "Connections",
    "DeferredBatchNorm",
    "ExpertBackend",
    "GrpcTransport",
    "Namespace",
    "NoChunk",
    "Pipe",
    "Recorder",
    "Recurrent",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "Runtime",
    "Schedule",
    "Server",
    "Stack",
    "TensorSpec",
    "WeftError",
    "Window",
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "compat",
    "create_remote_experts",
    "errors",
    "experts",
    "is_checkpointing",
    "is_recomputing",
    "pipeline",
    "pop",
    "recurrent",
    "recurrent_net",
    "report",
    "skippable",
    "stash",
    "verify_skippables",
]
