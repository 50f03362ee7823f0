"""What cannot be compiled, such as threads and connections, amid a model that `torch.compile` compiles: a break there.

compiled graph ──> untraced(function, ...) runs as it is ──> compiled graph
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Result = TypeVar("Result")


def untraced(function: Callable[..., Result], *args: Any) -> Result:
    """``function(*args)``, which Dynamo does not look into."""
    if torch.compiler.is_dynamo_compiling():
        function = cast("Callable[..., Result]", torch.compiler.disable(function))
    return function(*args)
