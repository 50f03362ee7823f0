"""One process asks, the other answers: a line of JSON each, over standard input and output.

A library may print what it likes: the way for answers is taken aside first, and what is printed goes to stderr.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def answer_until_the_end(first: Answer, handle: Callable[[Answer], Answer]) -> None:
    """Tell ``first``, then answer each question until the asker has gone."""
    _tell(first)
    for line in sys.stdin:
        _tell(handle(json.loads(line)))


def take_stdout_aside() -> None:
    """To be called before anything is imported that prints."""
    global _way  # noqa: PLW0603  (a process has one)
    _way = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


def _tell(answer: Answer) -> None:
    print(json.dumps(answer), file=_way, flush=True)


_way = sys.stdout
