"""Operations of administrators on experts that are served, at run time.

    set        hyperparameters of optimizer and schedule ──> between two batches ──> saved
    export     the module's weights between two batches  ──> safetensors, in parts
    rollback   a kept checkpoint ──> the living expert   ──> saved as the newest
    load       an expert of the file that the configuration names ──> served
    unload     accepted work is finished ──> saved ──> not served any more

A client names experts and numbers, never code. One operation runs at a time, because each can wait for a module.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchweft.core.errors import UsageError, escape
from torchweft.core.validation import Validator
from torchweft.experts.errors import ExpertError, MalformedError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.replication import ReplicationManager
from torchweft.experts.serialization import serialize
from torchweft.experts.server.dispatcher import RequestDispatcher
from torchweft.experts.server.hosted_expert import HostedExpert
from torchweft.experts.wire.service import Operation

_LOG = logging.getLogger("torchweft.experts.server")
# Makes the expert of a name. Raises ``UsageError`` for an unknown one.
Loadable = Callable[[str], ExpertBackend]
Outcome = tuple[dict[str, Any], memoryview]


class Operations:
    """``add`` and ``remove``: of the server. ``remove`` takes a name and seconds."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        replication: ReplicationManager,
        loadable: Loadable | None,
        add: Callable[[ExpertBackend], object],
        remove: Callable[[str, float], bool],
    ) -> None:
        self._dispatcher, self._replication = dispatcher, replication
        self._loadable, self._add, self._remove = loadable, add, remove
        self._running = threading.Lock()

    def run(self, operation: Operation, client: str, seconds: float) -> Outcome:
        """Carry out an operation within ``seconds``. Returns its results and, of an export, a file."""
        kinds = {
            "set": self._set,
            "export": self._export,
            "rollback": self._rollback,
            "load": self._load,
            "unload": self._unload,
        }
        if operation.name not in kinds:
            known = ", ".join(kinds)
            raise MalformedError(f"there is no operation {operation.name!r}, known are {known}", reason="operation")
        end = time.monotonic() + seconds
        if not self._running.acquire(timeout=seconds):
            raise ExpertError(f"another operation has taken {seconds:g} s and goes on; nothing was changed")
        try:
            results, data = kinds[operation.name](operation, max(0.0, end - time.monotonic()))
        finally:
            self._running.release()
        words = "%s of expert %r for %s: %s"
        _LOG.info(words, operation.name, operation.uid, escape(client), escape(str({**operation.arguments, **results})))
        return results, data

    def _set(self, operation: Operation, seconds: float) -> Outcome:
        values, group = _read_arguments(operation, values=dict, group=(int, type(None)))
        hosted = self._dispatcher.find(operation.uid)
        hosted.set_hyperparameters(values, group, seconds)
        return _progress(hosted)

    def _export(self, operation: Operation, seconds: float) -> Outcome:
        _read_arguments(operation)
        steps, module = self._dispatcher.find(operation.uid).copy_module(seconds)
        # Each tensor by itself, so that every reader of safetensors finds all names of tied weights.
        state = {name: x.clone() if isinstance(x, Tensor) else x for name, x in module.items()}
        return {"steps": steps}, serialize(state)

    def _rollback(self, operation: Operation, seconds: float) -> Outcome:
        (step,) = _read_arguments(operation, step=int)
        hosted = self._dispatcher.find(operation.uid)
        hosted.roll_back(step, self._replication.claim_again, seconds)
        return _progress(hosted)

    def _load(self, operation: Operation, seconds: float) -> Outcome:
        _read_arguments(operation)
        if self._loadable is None:
            raise UsageError("this server loads no experts at run time: its configuration has no loadable=")
        self._dispatcher.check_new(operation.uid)
        self._add(self._loadable(operation.uid))
        return _progress(self._dispatcher.find(operation.uid))

    def _unload(self, operation: Operation, seconds: float) -> Outcome:
        _read_arguments(operation)
        hosted = self._dispatcher.find(operation.uid)
        if not self._remove(operation.uid, seconds):
            raise ExpertError(f"expert {operation.uid!r} is not served any more, but a call still runs in its module")
        return _progress(hosted)


def _progress(hosted: HostedExpert) -> Outcome:
    return {"steps": hosted.backend.steps, "durable": hosted.durable}, memoryview(b"")


def _read_arguments(operation: Operation, **kinds: Any) -> list[Any]:
    """The arguments in the order of ``kinds``, their types. A bool is not an int."""
    given = operation.arguments
    with Validator(f"invalid arguments of the operation {operation.name!r}", MalformedError) as check:
        check.add(
            *(f"there is {name!r}, known are {', '.join(kinds) or 'none'}" for name in given if name not in kinds)
        )
        for name, kind in kinds.items():
            value = given.get(name)
            fits = isinstance(value, kind) and not isinstance(value, bool)
            check.require(fits, f"{name} is {value!r}")
    return [given.get(name) for name in kinds]
