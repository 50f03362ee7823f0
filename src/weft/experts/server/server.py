"""Server: experts behind an address. One process for any number of them.

    network thread ── frames ──> RequestDispatcher ── tasks ──> pools ──> one Runtime thread per device
                                                                    |
    lease thread ── directory                    checkpoint thread ─┴─ CheckpointStore

    start   restore from checkpoints ── runtimes ── listen ── be listed in the directory
    end     leave the directory ── refuse new work ── finish what was accepted ── save ── answer ── close

Nothing outlives the ``with`` block.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from weft.core.errors import UsageError, WeftError, escaped
from weft.core.validation import LONGEST, Validator
from weft.experts.address import is_loopback, split
from weft.experts.checkpoint import CheckpointStore
from weft.experts.discovery import Directory
from weft.experts.discovery.registration import LeaseHeartbeat, LeaseStatistics
from weft.experts.errors import AlreadyDeclaredError
from weft.experts.expert import ExpertBackend
from weft.experts.fork_guard import ForkGuard
from weft.experts.replication import ReplicaOptions, ReplicaStatistics, ReplicationManager
from weft.experts.runtime import Runtime
from weft.experts.server.auth import OPEN, Access, Audit, Caller
from weft.experts.server.dispatcher import ObservedDispatcher, Reply, RequestDispatcher
from weft.experts.server.grpc_server import GrpcServer
from weft.experts.server.hosted_expert import HostedExpert
from weft.experts.server.options import ServerOptions, listen_faults
from weft.experts.status_page.http import PanelOptions, StatusServer
from weft.experts.telemetry import BackendStatistics, RuntimeStatistics, SpanObserver
from weft.experts.tls import ServerTls
from weft.experts.wire import Received

_LOG = logging.getLogger("weft.experts.server")
Result = TypeVar("Result")
_LAST = 1.0  # seconds for answers to leave, and for threads to end, after the work is done
_LONGEST_PAUSE = 0.2  # seconds between the saves of two experts
_LEAST = 0.1  # of these for each thread, also if those before it took all of them


@dataclass(frozen=True)
class CheckpointStatistics:
    """``durable``: the step on the disk (None: no checkpoints). ``restored``: the step that this start went on from.

    ``notes``: where the checkpoint it went on from says something else than the configuration.
    """

    durable: int | None
    restored: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerStatistics:
    """``connections`` are open now, with ``calls`` and ``nbytes`` under way; the others count since the start.

    ``turned_away`` clients found the server full, ``broken`` ones sent what is no frame, ``refusals`` were forbidden;
    all by kind of call, ``errors`` by reason. ``seconds`` since the start. ``failures``: what last went wrong with
    the directory or the checkpoints, empty if nothing does now; and damaged checkpoints that the start passed over.
    ``directory``: the live servers; ``lease``: how its renewals keep up. None without one.
    """

    address: str
    seconds: float
    draining: str | None
    incarnation: int
    connections: int
    calls: int
    nbytes: int
    accepted: int
    turned_away: int
    broken: int
    answered: Mapping[str, int]
    errors: Mapping[str, int]
    refusals: Mapping[str, int]
    failures: Mapping[str, str]
    listed: tuple[str, ...]
    experts: Mapping[str, BackendStatistics]
    keeping: Mapping[str, CheckpointStatistics]
    runtimes: Mapping[str, RuntimeStatistics]
    directory: Mapping[str, Any] | None = None
    lease: LeaseStatistics | None = None
    replicas: Mapping[str, ReplicaStatistics] = field(default_factory=dict[str, ReplicaStatistics])

    def to_json(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and texts."""
        return json.loads(json.dumps(self, default=vars))


class Server:
    """Serves experts over gRPC. A context manager; or `start` and `shutdown`.

    Args:
        experts: more may be added and removed while it runs.
        address: host and port to listen at; port 0 takes a free one, see `address` afterwards.
        advertise: the address that the directory lists; by default the one where it listens, if others can call that.
        access: roles of clients; see `Access`. By default every client that can connect may do everything.
        tls: certificates. Without, nothing is encrypted.
        directory: where the experts are listed.
        checkpoints: where they are saved, and restored from at the start.
        options: see `ServerOptions`.
        replicas: which of the experts other servers of the directory have too; one of them owns each, and steps it.
            None: none. See `weft.experts.replication`.
        panel: host and port of a status page and metrics, see `weft.experts.status_page`; port 0 takes a free one, see
            `panel_url`. Beyond loopback it wants `PanelOptions`, with a token. None: no panel.
        observer: receives spans of calls, queues, batches and steps; see `weft.experts.telemetry`.

    Raises ``UsageError`` for two experts of one name, schemas that cannot be sent, replicas without a directory, and
    addresses that are invalid, that the directory would list and no client could call (0.0.0.0 without
    ``advertise``), or that no directory would list (``advertise`` without one).

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     print(server.address)
        127.0.0.1:...
    """

    def __init__(
        self,
        experts: Iterable[ExpertBackend] = (),
        *,
        address: str = "127.0.0.1:0",
        advertise: str | None = None,
        access: Access | None = None,
        tls: ServerTls | None = None,
        directory: Directory | None = None,
        checkpoints: CheckpointStore | None = None,
        options: ServerOptions | None = None,
        replicas: ReplicaOptions | None = None,
        panel: PanelOptions | str | None = None,
        observer: SpanObserver | None = None,
    ) -> None:
        self.options = options or ServerOptions()
        self.audit = Audit()
        with Validator("invalid address of a server") as check:
            check.add(*listen_faults(address, advertise, directory is not None))
        self._wanted, self._advertise, self._port = address, advertise, 0
        self._tls = tls
        self._directory = directory
        self._closing, self._owned = ExitStack(), ExitStack()  # what ends all that was started, the last first
        self._end = 0.0  # until when that may take (`time.monotonic`)
        self._failure: Exception | None = None  # of saving while experts were handed over
        self._store = checkpoints
        allowed = access, self.audit, self.options.longest_seconds
        self._dispatcher = ObservedDispatcher(observer, *allowed) if observer else RequestDispatcher(*allowed)
        self._closing.callback(self._dispatcher.close)
        self._closing.enter_context(self._owned)
        self._replication = ReplicationManager(replicas, directory, self.options.limits)
        self._grpc_server = GrpcServer(self._dispatcher, self.options, self.status, self._replication.leader_streams)
        self._runtimes: dict[str, Runtime] = {}  # by device
        self._heartbeat: LeaseHeartbeat | None = None
        self._tasks: dict[str, PeriodicTask] = {}
        self._began: float | None = None
        self._panel = None if panel is None else StatusServer(panel, self.status)
        self._lock = threading.RLock()
        self._fork_guard, self._running, self._ended = ForkGuard(), False, False
        for backend in experts:
            self._dispatcher.add(self._host(backend))

    @property
    def address(self) -> str:
        """Where it listens. Raises ``UsageError`` before the start."""
        if not self._port:
            raise UsageError("the server has no address before it is started; use it in a with block, or call start()")
        return f"{self._wanted.rpartition(':')[0]}:{self._port}"

    @property
    def panel_url(self) -> str | None:
        """Where the status page is, once it is started; None without one."""
        return None if self._panel is None else self._panel.url

    @property
    def lost(self) -> str | None:
        """Why experts cannot run until the process is started again, such as a failed GPU; None if all can."""
        return next((runtime.lost for runtime in list(self._runtimes.values()) if runtime.lost is not None), None)

    @property
    def experts(self) -> list[str]:
        """The names of the experts, sorted."""
        return sorted(self._dispatcher.experts())

    def start(self) -> None:
        """Restore, listen, and be listed.

        Raises what `GrpcServer.start` and `HostedExpert.restore` raise; then nothing runs.
        """
        with self._lock:
            if self._running or self._ended:
                raise UsageError("a server is started once; make a new one")
            self._fork_guard = ForkGuard()  # the process that starts it ends it
            try:
                self._start()
            except BaseException:
                with suppress(WeftError):  # the caller gets the error of the start, and no other
                    self.shutdown()  # which saves what came if it listened already
                raise

    def add(self, backend: ExpertBackend) -> None:
        """Serve one more expert, restored from its checkpoint if there is one. Raises as constructor and `start`.

        A server with replicas that runs keeps its experts as they are, and raises ``UsageError``.
        """
        with self._lock:
            self._check_change()
            self._dispatcher.check_new(backend.name)
            served = self._host(backend)
            if self._running:
                served.restore()
                self._run(backend)
            self._dispatcher.add(served)
        try:
            self._announce()
        except UsageError:
            self.remove(backend.name)
            raise

    def remove(self, uid: str, timeout: float = 30.0) -> bool:
        """Finish what this expert has accepted, save it, and serve it no more; whether all was finished in time.

        Raises ``UnknownExpertError``, and what saving raises; then it is served no more, but not saved. A server with
        replicas that runs raises ``UsageError``.
        """
        with self._lock:
            self._check_change()
            served = self._dispatcher.remove(uid)
            finished = True
            if self._running:
                finished = self._runtimes[str(served.backend.device)].remove(served.backend, timeout=timeout)
        self._announce()
        try:
            served.save()
        finally:
            served.close()
        return finished

    def checkpoint(self) -> int:
        """Save every expert that has stepped since it was saved; how many. Raises the last of what went wrong."""
        return self._save_all()

    def _save_all(self, max_wait: float = LONGEST, *, pause: bool = False) -> int:
        """`checkpoint`. ``pause``: rest after each save for as long as it took, so that calls have half of the time."""
        saved, failure = 0, None
        for hosted in self._dispatcher.experts().values():
            start = time.monotonic()
            try:
                saved += hosted.save(max_wait)
            except Exception as error:  # the others are to be saved all the same
                failure = error
            if pause:
                time.sleep(min(_LONGEST_PAUSE, time.monotonic() - start))
        if failure is not None:
            raise failure
        return saved

    def drain(self, why: str = "it is shutting down") -> bool:
        """Leave the directory, refuse new work, and finish what was accepted; whether that ended in time.

        A step of it that fails is logged, and the others are taken all the same.
        """
        with self._lock:
            if not self._running:
                return True
            self._dispatcher.draining = why
            if not self._replication.retire():
                _attempt("leaving the directory", self._leave)
            _attempt("telling clients that it ends", self._grpc_server.drain)
            end, lost = time.monotonic() + self.options.drain_seconds, self.lost
            finished = bool(_attempt("finishing what was accepted", lambda: self._finish(end))) and lost is None
            hand_over = partial(self._replication.hand_over, end - time.monotonic())
            if finished:
                try:
                    hand_over(LONGEST)
                except Exception as error:  # `shutdown` raises it
                    self._failure = error
            else:  # the result reports what a module holds
                _attempt("saving", lambda: hand_over(_LEAST))
            _attempt("leaving the directory", self._leave)  # last where others need the last state
            return finished

    def shutdown(self) -> bool:
        """`drain`, save, let the answers leave, and end all threads; False if a module still runs. May be called twice.

        Also False if a GPU failed. Saves what is reached whatever fails before; of an expert whose module still runs,
        what is saved already. Raises what saving raises, after everything has ended. In a fork of its process it does
        nothing.
        """
        if not self._fork_guard.here:
            return True
        with self._lock:
            finished = self.drain()
            try:
                if "checkpoints" in self._tasks:
                    self._tasks["checkpoints"].stop(_LAST)
                    if finished:
                        self.checkpoint()
                    else:  # what no module holds; the result reports the rest
                        _attempt("saving", lambda: self._save_all(_LEAST))
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
            finally:
                self._running, self._ended = False, True
                self._close(_LAST if finished else _LAST / 2)
            return finished

    def handler(self, client: str = "") -> Callable[[Received, Reply], object]:
        """Calls from within this process, as if ``client`` sent them: for a `LocalTransport`."""
        caller = Caller(client, "this process")
        return lambda call, reply: self._dispatcher.dispatch(call, caller, reply)

    def statistics(self) -> ServerStatistics:
        """What was done since the start, and what is under way. Never waits for a module, a disk or a network."""
        grpc_server, dispatcher, served = self._grpc_server, self._dispatcher, self._dispatcher.experts()
        connections, heartbeat = list(grpc_server.connections), self._heartbeat
        answered, errors = dispatcher.counts()
        failures = {name: str(each.last_failure) for name, each in dict(self._tasks).items() if each.last_failure}
        failures |= {f"runtime {name}": each.lost for name, each in dict(self._runtimes).items() if each.lost}
        failures |= {f"restore of {uid}": one.failure for uid, one in served.items() if one.failure is not None}
        return ServerStatistics(
            address=self.address if self._port else self._wanted,
            seconds=0.0 if self._began is None else time.monotonic() - self._began,
            draining=dispatcher.draining,
            incarnation=dispatcher.incarnation,
            connections=len(connections),
            calls=sum(each.calls for each in connections),
            nbytes=sum(each.nbytes for each in connections),
            accepted=grpc_server.accepted,
            turned_away=grpc_server.turned_away,
            broken=grpc_server.broken,
            answered=answered,
            errors=errors,
            refusals=dispatcher.audit.counts(),
            failures=failures,
            listed=() if heartbeat is None else heartbeat.listed,
            experts={uid: one.backend.statistics(wait=False) for uid, one in served.items()},
            keeping={uid: CheckpointStatistics(one.durable, one.restored, one.notes) for uid, one in served.items()},
            runtimes={name: runtime.statistics() for name, runtime in dict(self._runtimes).items()},
            directory=None if heartbeat is None else heartbeat.directory_statistics(),
            lease=None if heartbeat is None else heartbeat.statistics(),
            replicas=self._replication.statistics(),
        )

    def status(self) -> dict[str, Any]:
        """`statistics` as JSON has it, and the last refusals: what ``weft status`` and pages show."""
        return {**self.statistics().to_json(), "audit": [vars(each) for each in self.audit.last()]}

    def __enter__(self) -> "Server":
        self.start()
        return self

    def own(self, close: Callable[[], None]) -> None:
        """Call ``close`` when all has ended; for what was made for this server alone."""
        self._owned.callback(close)

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _check_change(self) -> None:
        if self._running and self._replication.leader_streams is not None:
            raise UsageError(
                "a server with replicas= keeps its experts while it runs, for what it owns stands under one lease: "
                "shut it down, or start another server for others"
            )

    def _host(self, backend: ExpertBackend) -> HostedExpert:
        until = self._replication.until if self._replication.covers(backend.name) else None
        hosted = HostedExpert(backend, self._store, self._dispatcher.incarnation, until, self.options.limits)
        if hosted.replica is not None:
            self._replication.replicas[backend.name] = hosted.replica
        return hosted

    def _start(self) -> None:
        named = self._tls is not None and self._tls.authority is not None
        if self._dispatcher.access.grants == OPEN and not named and not is_loopback(split(self._wanted)[0]):
            # `weft serve` refuses this; a program may mean it
            text = (
                "whoever reaches %s may read and train every expert: it has no access=, and no tls= with an authority"
            )
            _LOG.warning(text, self._wanted)
        with Validator("the server cannot start") as check:
            for served in self._dispatcher.experts().values():
                check.call(served.restore)
        for served in self._dispatcher.experts().values():
            self._run(served.backend)
        if self._panel is not None:
            self._closing.callback(self._panel.stop, _LAST)  # it shows how the rest ends
        self._closing.callback(lambda: self._grpc_server.stop(self._left()))
        self._port = self._grpc_server.start(self._wanted, self._tls)
        self._began, self._running = time.monotonic(), True
        if self._store is not None:
            seconds = self.options.checkpoint_seconds
            self._begin("checkpoints", seconds, seconds, partial(self._save_all, pause=True))
        if self._directory is not None:
            ttl = self.options.lease_seconds
            here = self._advertise or self.address
            covers = self._replication.covers
            self._heartbeat = LeaseHeartbeat(self._directory, lambda: self.experts, here, ttl, covers)
            self._closing.callback(self._heartbeat.close)
            self._announce()
            self._begin("lease", ttl / 3, ttl / 30, self._heartbeat.turn)  # waits behind nothing else
            self._begin("directory", ttl / 3, ttl / 3, self._heartbeat.look)
            self._closing.callback(self._replication.stop)
            self._replication.start(self._heartbeat, self.experts)
        if self._panel is not None:
            self._panel.start()

    def _begin(self, name: str, seconds: float, again: float, act: Callable[[], object]) -> None:
        task = self._tasks[name] = PeriodicTask(name, seconds, again, act)
        self._closing.callback(lambda: task.stop(self._left()))
        task.start()

    def _run(self, backend: ExpertBackend) -> None:
        """Work on this expert's tasks from now on."""
        name = str(backend.device)
        if name not in self._runtimes:
            runtime = self._runtimes[name] = Runtime(name=name)
            self._closing.callback(lambda: runtime.shutdown(drain=False, timeout=self._left()))
            runtime.start()
        self._runtimes[name].add(backend)

    def _finish(self, end: float) -> bool:
        """Finish what was accepted; whether all of it was before ``end`` (`time.monotonic`)."""
        return all([each.shutdown(timeout=max(0.0, end - time.monotonic())) for each in self._runtimes.values()])

    def _announce(self) -> None:
        """Be listed now; if the directory is away, the lease thread goes on trying.

        Raises ``UsageError`` for experts that another server lists, for longer than the lease of a dead one lasts.
        """
        end = time.monotonic() + 1.5 * self.options.lease_seconds
        while self._heartbeat is not None:
            try:
                self._heartbeat.turn()
                self._heartbeat.look()
                return
            except ConnectionError:
                return
            except AlreadyDeclaredError as error:
                if time.monotonic() >= end:
                    raise UsageError(str(error)) from None
            time.sleep(self.options.lease_seconds * random.uniform(0.05, 0.15))

    def _leave(self) -> None:
        """Be listed no more. May be called twice."""
        if self._heartbeat is not None:
            self._heartbeat.withdraw()
        if "lease" in self._tasks:
            self._tasks["lease"].stop(_LEAST)  # a turn of it that goes on declares nothing any more

    def _left(self) -> float:
        return max(_LEAST, self._end - time.monotonic())

    def _close(self, seconds: float) -> None:
        """End whatever runs, in about so many seconds: a module or directory that holds a thread keeps it."""
        self._end, self._began = time.monotonic() + seconds, None
        self._closing.close()


class PeriodicTask:
    """A thread that calls ``act`` every ``seconds``, from the beginning of one turn to that of the next.

    What it raises is kept, and it is called again after ``again`` seconds: a full disk or a directory that is away now
    may be fine in a while. The first failure of several is logged, and their end.
    """

    def __init__(self, name: str, seconds: float, again: float, act: Callable[[], object]) -> None:
        self.last_failure: Exception | None = None
        self._name, self._seconds, self._again, self._act = name, seconds, again, act
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft-{name}", daemon=True)

    def start(self) -> None:
        """Begin to wait for the first turn."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """No more turns; whether the one under way has ended within ``timeout`` seconds. Again does not wait."""
        waited = self._stop.is_set()
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(0.0 if waited else max(0.0, timeout))
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = self._seconds
        while not self._stop.wait(pause):
            start, pause = time.monotonic(), self._seconds
            try:
                self._act()
            except Exception as error:
                pause = self._again
                if self.last_failure is None:
                    _LOG.warning("%s: %s; tried again every %g s", self._name, escaped(error), pause)
                self.last_failure = error
            else:
                if self.last_failure is not None:
                    _LOG.warning("%s: works again", self._name)
                self.last_failure = None
            pause = max(0.0, start + pause - time.monotonic())


def _attempt(what: str, act: Callable[[], Result]) -> Result | None:
    """Take one step of the end. What it raises is logged, for the steps after it are to be taken all the same."""
    try:
        return act()
    except Exception as error:
        _LOG.warning("%s failed while the server was ending: %s: %s", what, type(error).__name__, escaped(error))
        return None
