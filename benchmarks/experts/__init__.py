"""Benchmarks of experts on a server, by name.

helper.py    helper processes, asked over pipes       peer.py      hivemind, in a separate venv
rounds.py    calls per second, in turns               local.py     the same work without a server
processes/   programs of the helpers, run by path because the peer's Python cannot import this package
"""

from collections.abc import Callable

from benchmarks.experts import many, mixture, restore, routing, survive, throughput
from benchmarks.table import Table

BENCHMARKS: dict[str, Callable[[bool], Table]] = {
    "throughput": throughput.run,
    "mixture": mixture.run,
    "routing": routing.run,
    "many": many.run,
    "restore": restore.run,
    "survive": survive.run,
}
