"""The line of the user's code that is running, and the state of Python's random numbers, for recordings."""

import random
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Also the wrappers that beartype makes.
_LIBRARIES = (*(str(Path(file).parent) for file in (torch.__file__, __file__)), "<@beartype")


def call_site() -> str:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f"{_relative(frame.f_code.co_filename)}:{frame.f_lineno}"


@lru_cache(1024)
def _relative(file: str) -> str:
    """A file, relative to the folder from which Python imports it."""
    roots = [root for root in (*sys.path, str(Path.cwd())) if root and Path(file).is_relative_to(root)]
    return str(Path(file).relative_to(max(roots, key=len))) if roots else file


def python_random_state() -> Any:
    """The states of Python's and NumPy's generators. Two results are equal if no number was drawn in between."""
    # Without an import: a model that uses NumPy has imported it.
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), state and (state[1].tobytes(), state[2])
