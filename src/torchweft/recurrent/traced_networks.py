"""Networks by the handle under which a compiled graph finds them.

A graph can hold numbers, but not a module. This table maps its number to the network, as long as that lives. It is a
separate module, because `recurrent.py` registers a network and `custom_op.py`, imported only under tracing, finds it.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchweft.core.errors import UsageError


@runtime_checkable
class TraceableNetwork(Protocol):
    """The parts of a `Recurrent` that a graph uses."""

    cell: Callable[..., Any]
    memory: Any

    # Run as outside of a graph; `plans` replace the network's own.
    def run_plainly(
        self, inputs: Any, state: Any = None, *, plans: Any = None, **rows: Any
    ) -> tuple[Any, Any, Any]: ...

    def parameters(self) -> Iterator[Any]: ...
    def buffers(self) -> Iterator[Tensor]: ...
    def named_parameters(self) -> Iterator[tuple[str, Any]]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


_handles = itertools.count(1)
_networks: "weakref.WeakValueDictionary[int, TraceableNetwork]" = weakref.WeakValueDictionary()
GONE = (
    "a compiled graph runs a recurrent network that does not exist here: it was deleted, or the graph was loaded in "
    "another process; keep the module, or compile it again in the process that runs it"
)


def register_network(network: TraceableNetwork) -> int:
    handle = next(_handles)
    _networks[handle] = network
    return handle


def find_network(handle: int) -> TraceableNetwork:
    """The network of a handle. Raises UsageError if it was deleted."""
    network = _networks.get(handle)
    if network is None:
        raise UsageError(GONE)
    return network
