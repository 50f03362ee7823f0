"""Protocol of helpers: questions and answers are lines of JSON on standard input and output.

Libraries can print to stdout. The original stdout is therefore reserved for answers, and prints go to stderr.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def answer_until_the_end(first: Answer, handle: Callable[[Answer], Answer]) -> None:
    """Send ``first``, then answer questions until standard input ends."""
    _send(first)
    for line in sys.stdin:
        _send(handle(json.loads(line)))


def take_stdout_aside() -> None:
    """Reserve stdout for answers. Must be called before importing modules that print."""
    global _stdout  # noqa: PLW0603  (one per process)
    _stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


def _send(answer: Answer) -> None:
    print(json.dumps(answer), file=_stdout, flush=True)


_stdout = sys.stdout
