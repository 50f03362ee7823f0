"""Replication manager: claims experts without an owner, follows those of others, takes over, hands over.

    every 50 ms:   the directory's snapshot ── is the owner this server? none? another?
        none        claim (compare and swap) ── newest state among: here, other replicas, checkpoints ──> lead
        another     follow: a stream from its owner
        was here    the lease ended: as if there were none; or follow the server that was faster
    at the end:    no steps any more ── save ── followers fetch the last state ── release

A server that claims an expert is its owner before it looks for a newer state, so that nobody steps while it looks; it
refuses calls until it has looked. In a directory that has begun anew it looks a lease later: the previous owner may not
know yet. Transfers are asynchronous: what an owner stepped after the last one is lost if it dies.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weft.core.errors import UsageError, WeftError, listed
from weft.core.validation import LONGEST
from weft.experts.discovery import Directory, Lease, LocalDirectory, Ownership, Snapshot
from weft.experts.discovery.fencing import number_of, replaced
from weft.experts.discovery.registration import LeaseHeartbeat
from weft.experts.errors import AlreadyDeclaredError, ExpertError, ExpertOwnedError, LeaseLostError
from weft.experts.replication.replica import Replica, ReplicaOptions, StateVersion
from weft.experts.replication.streams import FollowerStream, LeaderStreams
from weft.experts.tls import directory_faults
from weft.experts.wire import Limits, UnknownExpertError

_LOG = logging.getLogger("weft.experts.server")
INTERVAL = 0.05  # seconds between two looks at the directory, which are reads of memory
_AGAIN = 0.25  # seconds before something that failed is tried again
_ASKED = 2.0  # seconds that another replica may take to answer whether it has a newer state
_JOIN = 0.5  # seconds that `stop` waits for the thread; a call of a directory that is away ends it later
_LEAST = 0.5  # seconds that followers have for the last state, also if draining took all of its time


@dataclass(frozen=True)
class ReplicaStatistics:
    """One replicated expert at one server.

    ``role``: "owner", "taking over", or "follower". ``owner``: its address, "" if none is known, with the number of its
    fencing ``token``. ``lasts``: whether the own lease surely lasts. ``behind``: steps that this follower lacks, as the
    owner last reported, ``heard_seconds`` ago. ``followers``: by address, with the steps that each lacks.
    """

    role: str
    owner: str
    token: int
    lasts: bool
    steps: int
    behind: int | None
    heard_seconds: float | None
    followers: Mapping[str, int]
    sent: int
    received: int
    received_bytes: int
    failure: str


class ReplicationManager:
    """The replicas of one server, and a thread that tends them from `start` to `stop`.

    ``options``: None: no expert is replicated; then all methods do nothing. ``directory`` lists the owners, and stays
    open.

    Raises ``UsageError`` for options without a directory, and for certificates that name no servers.
    """

    def __init__(self, options: ReplicaOptions | None, directory: Directory | None, limits: Limits) -> None:
        self.replicas: dict[str, Replica] = {}
        self.leader_streams = None if options is None else LeaderStreams(self.replicas, limits)
        if options is not None:
            if directory is None:
                raise UsageError("replicas= wants directory= as well: the directory says which server owns an expert")
            if not isinstance(directory, LocalDirectory) and (faults := directory_faults(options.tls)):
                raise UsageError(listed("invalid replica options:", faults))
        self._options = options or ReplicaOptions()
        self._directory = directory or LocalDirectory()  # never used without options
        self._limits = limits
        self._heartbeat: LeaseHeartbeat | None = None
        self._here = ""  # this server's address
        self._streams: dict[str, FollowerStream] = {}  # by the leader's address
        self._led: list[Replica] = []  # taken over, and not saved yet
        self._retired = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-replicas", daemon=True)

    def covers(self, uid: str) -> bool:
        """Whether other servers may have this expert too."""
        return self.leader_streams is not None and self._options.covers(uid)

    def add(self, replica: Replica) -> None:
        """Tend this replica too, from the start on."""
        self.replicas[replica.uid] = replica

    def until(self, lease: Lease) -> float:
        """See `LeaseHeartbeat.until`."""
        return float("-inf") if self._heartbeat is None else self._heartbeat.until(lease)

    def start(self, heartbeat: LeaseHeartbeat, served: list[str]) -> None:
        """Claim and follow. ``served``: all experts of the server, replicated or not.

        Waits until every replica is owned here or has its owner's state, for at most ``first_seconds``. Raises
        ``UsageError`` if another server lists one alone.
        """
        self._heartbeat, self._here = heartbeat, heartbeat.address
        if self.leader_streams is None:
            return
        for pattern in self._options.experts if served else ():  # no fault: it may fit experts that come later
            if not any(fnmatchcase(name, pattern) for name in served):
                _LOG.warning("replicas: pattern %r fits none of the experts here, such as %r", pattern, served[0])
        self._thread.start()
        end = time.monotonic() + self._options.first_seconds
        while time.monotonic() < end and not self._stop.wait(0.01):
            for replica in self.replicas.values():
                if isinstance(replica.failure, AlreadyDeclaredError):
                    raise UsageError(str(replica.failure))
            if all(replica.settled for replica in self.replicas.values()):
                return

    def retire(self) -> bool:
        """Claim nothing more; whether experts are replicated, which are listed until `hand_over`."""
        self._retired = True
        return self.leader_streams is not None

    def hand_over(self, seconds: float, max_wait: float) -> None:
        """Nothing steps replicas any more: save them, let followers fetch the last state, own them no more.

        Waits at most ``max_wait`` seconds for a module that still holds its expert, and ``seconds`` for followers.
        Raises the last of what saving raised, at the end. The claims themselves end with the lease.
        """
        failure: Exception | None = None
        mine = [replica for replica in self.replicas.values() if replica.leadership.may_step]
        for replica in mine:
            replica.final = True
        for replica in mine:
            try:
                replica.save(max_wait)
            except Exception as error:  # the others are to be saved all the same
                failure = error
        end = time.monotonic() + max(_LEAST, seconds)
        while time.monotonic() < end and any(
            version != replica.version for replica in mine for version in self._followers(replica.uid).values()
        ):
            time.sleep(0.005)
        for replica in mine:
            replica.follow(None)
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """End the thread and all streams. May be called twice, and before the start."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN)
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def statistics(self) -> dict[str, ReplicaStatistics]:
        """Of every replica."""
        return {uid: self._statistics(replica) for uid, replica in sorted(self.replicas.items())}

    def _statistics(self, replica: Replica) -> ReplicaStatistics:
        leadership, steps, failure = replica.leadership, replica.backend.steps, replica.failure
        owner, follows = leadership.owner, leadership.role == "follower"
        versions = {} if follows else self._followers(replica.uid)
        return ReplicaStatistics(
            role=leadership.role,
            owner="" if owner is None else owner.address,
            token=0 if owner is None else number_of(owner.token),
            lasts=leadership.lasts,
            steps=steps,
            behind=replica.behind,
            heard_seconds=time.monotonic() - replica.heard_at if follows and replica.heard_at else None,
            followers={name: max(0, steps - (have.steps if have.token else 0)) for name, have in versions.items()},
            sent=replica.sent,
            received=replica.received,
            received_bytes=replica.received_bytes,
            failure="" if failure is None else f"{type(failure).__name__}: {failure}",
        )

    def _followers(self, uid: str) -> dict[str, StateVersion]:
        return {} if self.leader_streams is None else self.leader_streams.followers(uid)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                self._turn()
            except Exception:  # such as a directory that is away; the next turn comes anyway
                _LOG.debug("replicas: a turn failed", exc_info=True)

    def _turn(self) -> None:
        if self._heartbeat is None or self._heartbeat.watch is None:
            return
        snapshot, lease = self._heartbeat.watch.snapshot(), self._heartbeat.lease
        for replica in self.replicas.values():
            if self._stop.is_set():
                return
            if time.monotonic() < replica.next_try:
                continue
            try:
                self._tend(replica, snapshot, lease)
            except Exception as error:
                replica.failure, replica.next_try = error, time.monotonic() + _AGAIN
        self._follow_owners()
        while self._led:
            replica = self._led.pop()
            try:
                replica.save(LONGEST)
            except WeftError as error:
                replica.failure = error

    def _tend(self, replica: Replica, snapshot: Snapshot, lease: Lease | None) -> None:
        """Do what is due for one replica."""
        leadership, owner = replica.leadership, snapshot.owner(replica.uid)
        theirs = owner if owner is not None and owner.address != self._here else None
        if leadership.role == "follower":
            if leadership.owner != theirs:
                replica.follow(theirs)
            if theirs is None and lease is not None and replica.uid in lease.uids and not self._retired:
                if not replica.may_lead:
                    raise ExpertError(
                        f"expert {replica.uid!r} has no owner, and is not claimed: its owner's state never came here, "
                        "or could not be loaded. Start a server that has the state, or start this one again to go on "
                        "with what it has"
                    )
                self._claim(replica, snapshot, lease)
        elif theirs is not None and replaced(leadership.token, theirs.token):
            replica.follow(theirs)
        elif lease is None:
            return
        elif leadership.lease is None or lease.number != leadership.lease.number:
            if replica.uid in lease.uids:
                self._claim(replica, snapshot, lease)
        elif leadership.role == "taking over" and leadership.owner is not None:
            self._take_over(replica, leadership.owner, snapshot, lease)

    def _claim(self, replica: Replica, snapshot: Snapshot, lease: Lease) -> None:
        """Claim it, and take over unless a previous owner may still step it."""
        try:
            ownership = self._directory.claim(replica.uid, lease)
        except ExpertOwnedError as error:
            replica.follow(Ownership(replica.uid, error.address, 0))
        except LeaseLostError:  # it is declared again soon
            pass
        else:
            replica.claimed(ownership, lease)
            self._take_over(replica, ownership, snapshot, lease)

    def _take_over(self, replica: Replica, ownership: Ownership, snapshot: Snapshot, lease: Lease) -> None:
        """It is claimed: find the newest state, and lead, unless it is too early or the state is broken."""
        if seconds := replica.quiet(lease):
            replica.failure = ExpertError(
                f"the directory has begun anew: expert {replica.uid!r} is claimed, and is led in {seconds:.1f} s, when "
                "the lease of the previous owner has surely ended"
            )
            return
        failure: Exception | None = None
        try:
            for address in sorted({*snapshot.addresses(replica.uid)} - {self._here}):
                try:
                    self._stream(address).newest(replica, ownership.token, _ASKED)
                except UnknownExpertError:
                    words = "without replicas=, and clients would move between different weights: say it there too"
                    raise AlreadyDeclaredError(
                        f"the server at {address} lists expert {replica.uid!r} {words}"
                    ) from None
                except WeftError:  # that replica does not answer
                    pass
            replica.restore()
        except Exception as error:  # also what module and optimizer raise: no other server could claim it meanwhile
            failure = error
        if replica.broken or isinstance(failure, AlreadyDeclaredError):
            replica.follow(None)
            self._directory.release(ownership)
            replica.next_try = time.monotonic() + _AGAIN
        else:
            replica.lead(ownership, lease)
            self._led.append(replica)
        replica.failure = failure

    def _follow_owners(self) -> None:
        """Keep a stream from every owner, and no other."""
        wanted: set[str] = set()
        for replica in self.replicas.values():
            owner = replica.leadership.owner
            if replica.leadership.role != "follower" or owner is None or owner.address == self._here:
                continue
            wanted.add(owner.address)
            try:
                stream = self._stream(owner.address)
            except UsageError as error:  # its owner is no server that may be followed
                replica.failed(error)
                continue
            if replica.uid not in stream.followed and time.monotonic() >= replica.next_try:
                stream.follow(replica)
                replica.next_try = time.monotonic() + _AGAIN
        for address, stream in list(self._streams.items()):
            if stream.ended or address not in wanted:
                del self._streams[address]
                stream.close()

    def _stream(self, address: str) -> FollowerStream:
        if address not in self._streams or self._streams[address].ended:
            self._streams[address] = FollowerStream(address, self._here, self._options, self._limits)
        return self._streams[address]
