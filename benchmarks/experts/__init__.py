"""Benchmarks of experts on a server, by name.

helper.py    processes of our own, asked by words     peer.py      hivemind, in a venv of its own
rounds.py    calls per second, by turns               local.py     the same work without a server
processes/   programs of those processes: by path, because the peer's Python does not know this package
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
