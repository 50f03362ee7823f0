"""Checkpoints of experts: atomic, consistent, retained, resumed from by themselves.

store.py     save and load          content.py   a state dict <-> one safetensors file
disk.py      write, rename, sync    names.py     an expert's name as a safe folder name
"""

from weft.experts import extras as extras  # says what is not installed
from weft.experts.checkpoint.disk import Disk
from weft.experts.checkpoint.store import Checkpoint, CheckpointStore, FolderLock, Taken
from weft.experts.errors import CheckpointError, DamagedError, TornError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "DamagedError",
    "Disk",
    "FolderLock",
    "Taken",
    "TornError",
]
