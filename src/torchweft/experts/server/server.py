"""Server: experts at an address. One process for any number of them.

    network thread ── frames ──> RequestDispatcher ── tasks ──> pools ──> one Runtime thread per device
                                                                    |
    lease thread ── directory                    checkpoint thread ─┴─ CheckpointStore

    start   restore from checkpoints ── runtimes ── listen ── be listed in the directory
    end     leave the directory ── refuse new work ── finish what was accepted ── save ── answer ── close

This class only decides the order of these steps. `BackgroundTasks` ends all threads, `DeviceRuntimes` and `ServerLease`
own the state of two of them. No thread outlives the ``with`` block.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from torchweft.core.errors import UsageError, WeftError, escape
from torchweft.core.validation import MAX_SECONDS, Validator
from torchweft.experts.address import is_loopback, parse_address
from torchweft.experts.checkpoint import CheckpointStore, FolderCheckpointStore
from torchweft.experts.discovery import Directory
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.fork_guard import ForkGuard
from torchweft.experts.replication import ReplicaOptions, ReplicationManager
from torchweft.experts.server.auth import OPEN, Access, Audit, Caller
from torchweft.experts.server.background import LEAST_SECONDS, BackgroundTasks, DeviceRuntimes, ServerLease
from torchweft.experts.server.dispatcher import Reply, RequestDispatcher
from torchweft.experts.server.grpc_server import GrpcHandlers, GrpcServer
from torchweft.experts.server.hosted_expert import HostedExpert
from torchweft.experts.server.operations import Loadable, Operations
from torchweft.experts.server.options import ServerOptions, listen_faults
from torchweft.experts.statistics import CheckpointStatistics, ServerStatistics
from torchweft.experts.status_page.http import PanelOptions, StatusServer
from torchweft.experts.telemetry import ServerSpans, SpanObserver
from torchweft.experts.tls import ServerTls
from torchweft.experts.wire import Received

_LOG = logging.getLogger("torchweft.experts.server")
Result = TypeVar("Result")
_CLOSE_SECONDS = 1.0  # for answers to leave, and for threads to end, after the work is done
_LONGEST_PAUSE = 0.2  # seconds between the saves of two experts


class _RunState:
    def __init__(self) -> None:
        self.running = self.ended = False
        self.started_at: float | None = None
        self.guard = ForkGuard()

    def prepare(self) -> None:
        if self.running or self.ended:
            raise UsageError("a server is started once; make a new one")
        self.guard = ForkGuard()  # the process that starts it is the one that can end it

    def begin(self) -> None:
        self.running, self.started_at = True, time.monotonic()

    def end(self) -> None:
        self.running, self.ended, self.started_at = False, True, None


class _ServerType(type):
    def __getattr__(cls, name: str) -> Any:
        hint = ""
        if name == "create":
            hint = (
                "; in place of hivemind's Server.create, write Server([ExpertBackend(...), ...]) or `torchweft serve`"
            )
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}{hint}", name=name, obj=cls)


class Server(metaclass=_ServerType):
    """Serves experts over gRPC. A context manager; or call `start` and `shutdown`.

    Args:
        experts: the first experts. None: they come later, by `add`.
        address: host and port to listen at. Port 0 takes a free one, see `address` afterwards.
        advertise: the address that the directory lists. By default ``address``, if others can call that.
        access: roles of clients, see `Access`. By default every client that can connect can do everything.
        tls: certificates. Without them nothing is encrypted.
        directory: where the experts are listed.
        checkpoints: a folder or a `CheckpointStore`, where experts are saved, and restored from at the start.
        replicas: the experts that other servers of the directory have, too. One server owns each and steps it.
        panel: host and port of a status page with metrics. Beyond loopback it takes `PanelOptions` with a token.
        observer: receives spans of calls, queues, batches and steps, see `weft.experts.telemetry`.
        loadable: makes an expert by its name, for ``torchweft load``. By default no expert is loaded at run time.

    Raises ``UsageError`` for anything but experts, two of one name, schemas that cannot be sent, and replicas without
    a directory. It also rejects addresses that are invalid, or that clients could not call if the directory lists them.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     print(server.address)
        127.0.0.1:...
    """

    def __init__(
        self,
        experts: Iterable[ExpertBackend] | None = None,
        *,
        address: str = "127.0.0.1:0",
        advertise: str | None = None,
        access: Access | None = None,
        tls: ServerTls | None = None,
        directory: Directory | None = None,
        checkpoints: CheckpointStore | str | Path | None = None,
        options: ServerOptions | None = None,
        replicas: ReplicaOptions | None = None,
        panel: PanelOptions | str | None = None,
        observer: SpanObserver | None = None,
        loadable: Loadable | None = None,
    ) -> None:
        self.options = options or ServerOptions()
        with Validator("invalid arguments of a server") as check:
            backends = _list_backends(check, experts)
            check.add(*listen_faults(address, advertise, directory is not None))
            if not isinstance(checkpoints, str | Path):
                wanted = "a folder, or a CheckpointStore such as FolderCheckpointStore(folder)"
                check.instance("checkpoints", checkpoints, CheckpointStore, wanted, optional=True)
        store = FolderCheckpointStore(checkpoints) if isinstance(checkpoints, str | Path) else checkpoints
        self._advertise, self._store = advertise, store
        self.audit = Audit()
        allowed = access, self.audit, self.options.longest_seconds
        self._dispatcher = RequestDispatcher(*allowed, spans=None if observer is None else ServerSpans(observer))
        self._background = BackgroundTasks()
        self._background.on_close(self._dispatcher.close)
        self._runtimes = DeviceRuntimes(self._background)
        self._lease = ServerLease(directory, self.options.lease_seconds, self._background)
        self._replication = ReplicationManager(replicas, directory, self.options.limits)
        operations = Operations(self._dispatcher, self._replication, loadable, self.add, self.remove)
        streams = self._replication.leader_streams
        handlers = GrpcHandlers(self._dispatcher, self.options, self.status, streams, operations)
        self._grpc_server = GrpcServer(address, tls, self.options, handlers)
        self._panel = None if panel is None else StatusServer(panel, self.status)
        self._lock = threading.RLock()  # of every change: start, add, remove, drain and shutdown
        self._state = _RunState()
        self._hand_over_error: Exception | None = None  # of `drain`, for `shutdown` to raise
        for backend in backends:
            self._dispatcher.add(self._host_expert(backend))

    @property
    def address(self) -> str:
        if not self._grpc_server.port:
            raise UsageError("the server has no address before it is started; use it in a with block, or call start()")
        return self._grpc_server.address

    @property
    def panel_url(self) -> str | None:
        """Address of the status page, valid after the start. None without a panel."""
        return None if self._panel is None else self._panel.url

    @property
    def lost(self) -> str | None:
        """The reason why experts cannot run before the process is started again, such as a failed GPU, or None."""
        return self._runtimes.lost

    @property
    def experts(self) -> list[str]:
        return sorted(self._dispatcher.experts())

    def start(self) -> None:
        """Restore, listen, and be listed. After an error nothing runs."""
        with self._lock:
            self._state.prepare()
            try:
                self._start_all()
            except BaseException:
                with suppress(WeftError):  # the error of the start is the one to raise
                    self.shutdown()  # saves the steps of clients that connected already
                raise

    def add(self, backend: ExpertBackend) -> None:
        """Serve one more expert, restored from its checkpoint if there is one. Raises as constructor and `start`."""
        with self._lock:
            self._check_change()
            with Validator("invalid arguments of a server") as check:
                check.instance("backend", backend, ExpertBackend, _WANTED)
            self._dispatcher.check_new(backend.name)
            hosted = self._host_expert(backend)
            if self._state.running:
                hosted.restore()
                self._runtimes.add(backend)
            self._dispatcher.add(hosted)
        # Without the lock: this can wait for a lease to end, and a shutdown must not wait for it.
        try:
            self._lease.announce()
        except UsageError:
            self.remove(backend.name)
            raise

    def remove(self, uid: str, timeout: float = 30.0) -> bool:
        """Stop serving an expert: finish its accepted work, then save it. Returns whether all was finished in time."""
        with self._lock:
            self._check_change()
            hosted = self._dispatcher.remove(uid)
            finished = not self._state.running or self._runtimes.remove(hosted.backend, timeout)
        self._lease.announce()
        try:
            hosted.save()
        finally:
            hosted.close()
        return finished

    def checkpoint(self) -> int:
        """Save every expert that has stepped since its last save. Returns how many. Raises the last error of saving."""
        return self._save_all()

    def _save_all(self, max_wait: float = MAX_SECONDS, *, pause: bool = False) -> int:
        saved, failure = 0, None
        for hosted in self._dispatcher.experts().values():
            start = time.monotonic()
            try:
                saved += hosted.save(max_wait)
            except Exception as error:  # the other experts must be saved all the same
                failure = error
            # So that calls get half of the time, even on a slow disk.
            if pause:
                time.sleep(min(_LONGEST_PAUSE, time.monotonic() - start))
        if failure is not None:
            raise failure
        return saved

    def drain(self, why: str = "it is shutting down") -> bool:
        """Leave the directory, refuse new work, and finish accepted work. Returns whether that ended in time."""
        with self._lock:
            if not self._state.running:
                return True
            self._dispatcher.refuse_new_work(why)
            # Replicas stay listed until their followers have the last state, which they fetch from this address.
            if not self._replication.retire():
                _attempt("leaving the directory", self._lease.withdraw)
            _attempt("telling clients that it ends", self._grpc_server.announce_end)
            # `lost` is read before the runtimes end, because ending them resets it.
            deadline, lost = time.monotonic() + self.options.drain_seconds, self.lost
            ended = _attempt("finishing what was accepted", lambda: self._runtimes.finish(deadline))
            finished = bool(ended) and lost is None
            hand_over = partial(self._replication.hand_over, deadline - time.monotonic())
            if finished:
                try:
                    hand_over(MAX_SECONDS)
                except Exception as error:
                    self._hand_over_error = error
            else:  # a module still holds its expert, which the return value reports
                _attempt("saving", lambda: hand_over(LEAST_SECONDS))
            _attempt("leaving the directory", self._lease.withdraw)
            return finished

    def shutdown(self) -> bool:
        """`drain`, save, let the answers leave, and end all threads. Can be called twice.

        Returns False if a module still runs or a GPU failed. An expert with a running module keeps its last checkpoint.
        Raises the errors of saving after all remaining steps. Does nothing in a fork of the server's process.
        """
        if not self._state.guard.here:
            return True
        with self._lock:
            finished = self.drain()
            try:
                if "checkpoints" in self._background.periodic:
                    self._background.stop_periodic("checkpoints", _CLOSE_SECONDS)
                    if finished:
                        self.checkpoint()
                    else:  # save the experts that no module holds
                        _attempt("saving", lambda: self._save_all(LEAST_SECONDS))
                failure, self._hand_over_error = self._hand_over_error, None
                if failure is not None:
                    raise failure
            finally:
                self._state.end()
                self._background.close(_CLOSE_SECONDS if finished else _CLOSE_SECONDS / 2)
            return finished

    def handler(self, client: str = "") -> Callable[[Received, Reply], object]:
        """A function for calls from within this process, as if ``client`` sent them; see `LocalTransport`."""
        caller = Caller(client, "this process")
        return lambda call, reply: self._dispatcher.dispatch(call, caller, reply)

    def statistics(self) -> ServerStatistics:
        """Counters since the start, and the present load. Never waits for a module, a disk or a network."""
        dispatcher, hosted = self._dispatcher, self._dispatcher.experts()
        answered, errors = dispatcher.counts()
        listed, directory, lease = self._lease.statistics()
        failures = self._background.failures()
        failures |= {f"runtime {name}": why for name, why in self._runtimes.failures().items()}
        failures |= {f"restore of {uid}": one.failure for uid, one in hosted.items() if one.failure is not None}
        failures |= {f"weights of {uid}": fault for uid, one in hosted.items() if (fault := one.backend.fault)}
        started_at = self._state.started_at
        return ServerStatistics(
            address=self._grpc_server.address,
            seconds=0.0 if started_at is None else time.monotonic() - started_at,
            draining=dispatcher.draining,
            incarnation=dispatcher.incarnation,
            **self._grpc_server.handlers.counts(),
            answered=answered,
            errors=errors,
            refusals=dispatcher.audit.counts(),
            failures=failures,
            listed=listed,
            experts={uid: one.backend.statistics(wait=False) for uid, one in hosted.items()},
            keeping={uid: CheckpointStatistics(one.durable, one.restored, one.notes) for uid, one in hosted.items()},
            runtimes=self._runtimes.statistics(),
            directory=directory,
            lease=lease,
            replicas=self._replication.statistics(),
        )

    def status(self) -> dict[str, Any]:
        return {**self.statistics().to_json(), "audit": [vars(refusal) for refusal in self.audit.last()]}

    def __enter__(self) -> "Server":
        self.start()
        return self

    def own(self, close: Callable[[], None]) -> None:
        self._background.own(close)

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _check_change(self) -> None:
        # A change of the list declares a new lease, under which this server would own its replicas no longer.
        if self._state.running and self._replication.leader_streams is not None:
            raise UsageError(
                "a server with replicas= keeps its experts while it runs, because it owns them under one lease: "
                "shut it down, or start another server for others"
            )

    def _host_expert(self, backend: ExpertBackend) -> HostedExpert:
        until = self._replication.until if self._replication.covers(backend.name) else None
        hosted = HostedExpert(backend, self._store, self._dispatcher.incarnation, until, self.options)
        if hosted.replica is not None:
            self._replication.add(hosted.replica)
        return hosted

    def _start_all(self) -> None:
        self._warn_if_open()
        # Before listening, so that no client can step weights that a checkpoint then replaces.
        with Validator("the server cannot start") as check:
            for hosted in self._dispatcher.experts().values():
                check.call(hosted.restore)
        for hosted in self._dispatcher.experts().values():
            self._runtimes.add(hosted.backend)
        if self._panel is not None:
            panel = self._panel
            self._background.on_close(lambda: panel.stop(_CLOSE_SECONDS))  # early here, so late at the end: it shows it
        self._background.on_close(lambda: self._grpc_server.stop(self._background.seconds_left()))
        self._grpc_server.start()
        self._state.begin()
        if self._store is not None:
            seconds = self.options.checkpoint_seconds
            self._background.start_periodic("checkpoints", seconds, seconds, partial(self._save_all, pause=True))
        # After listening, because clients call a listed address at once.
        self._lease.start(lambda: self.experts, self._advertise or self.address, self._replication.covers)
        if self._lease.heartbeat is not None:
            self._background.on_close(self._replication.stop)
            self._replication.start(self._lease.heartbeat, self.experts)
        if self._panel is not None:
            self._panel.start()

    def _warn_if_open(self) -> None:
        # ``torchweft serve`` rejects this, but a program can intend it.
        address, named = self._grpc_server.address, self._grpc_server.authenticates
        if self._dispatcher.access.grants == OPEN and not named and not is_loopback(parse_address(address)[0]):
            text = "anybody who reaches %s can read and train every expert: there is no access=, and no tls= with an "
            _LOG.warning(text + "authority", address)


_WANTED = "an ExpertBackend, such as ExpertBackend('ffn.0', module, torch.optim.SGD, args_schema=(spec,))"


def _list_backends(check: Validator, experts: Any) -> list[ExpertBackend]:
    """The first experts as a list. Newcomers pass a module, or an expert without a list."""
    if experts is None:
        return []
    # A Sequential is iterable too, but over layers.
    if isinstance(experts, str | nn.Module | ExpertBackend) or not isinstance(experts, Iterable):
        wanted = f"a list of them, Server([...]); each is {_WANTED}"
        check.add(f"experts is of type {type(experts).__name__}, wanted {wanted}")
        return []
    backends = list(cast("Iterable[Any]", experts))
    check.require(bool(backends), f"experts is empty, wanted {_WANTED}; leave it out to add() some later")
    for place, backend in enumerate(backends):
        check.instance(f"experts[{place}]", backend, ExpertBackend, _WANTED)
    return backends


def _attempt(what: str, act: Callable[[], Result]) -> Result | None:
    # Logs exceptions, so that the remaining steps of a shutdown still run.
    try:
        return act()
    except Exception as error:
        _LOG.warning("%s failed while the server was ending: %s: %s", what, type(error).__name__, escape(error))
        return None
