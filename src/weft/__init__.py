"""weft trains a PyTorch model in parts: cut across devices, across time, across machines."""

from weft.core.errors import WeftError
from weft.core.events import Recorder
from weft.core.microbatch import NoChunk
from weft.core.schedule import Schedule
from weft.pipeline.pipe import Pipe
from weft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = [
    "Namespace",
    "NoChunk",
    "Pipe",
    "Recorder",
    "Schedule",
    "WeftError",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
