"""weft trains a PyTorch model in parts: cut across devices, across time, across machines.

This page is the list of contents. What is not here but public lives in `weft.pipeline` (partition, batch norm,
schedules), `weft.core` (what the capabilities share) and `weft.compat` (the interfaces of older libraries).
"""

from weft.core.ambient import is_checkpointing, is_recomputing
from weft.core.errors import WeftError
from weft.core.events import Recorder
from weft.core.microbatch import NoChunk
from weft.core.schedule import Schedule
from weft.pipeline.batchnorm import DeferredBatchNorm
from weft.pipeline.pipe import Pipe
from weft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = [
    "DeferredBatchNorm",
    "Namespace",
    "NoChunk",
    "Pipe",
    "Recorder",
    "Schedule",
    "WeftError",
    "is_checkpointing",
    "is_recomputing",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
