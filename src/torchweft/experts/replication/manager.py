"""Replication manager: claims experts without an owner, follows those of other servers, takes over, hands over.

    every 50 ms:    the directory's snapshot ── which server is the owner?
        none         claim (compare and swap) ── newest of: own state, other replicas, checkpoints ──> lead
        another      follow: a stream from its owner
        this one     if the lease has ended: claim again, or follow the server that was faster
    at shutdown:    no more steps ── save ── followers fetch the last state ── release

A server claims an expert before it looks for a newer state, so that no other server steps the expert in between. It
rejects calls until it has looked. If the directory has begun again, it waits for one lease before it looks, because the
previous owner may still be stepping. Transfers are asynchronous, because a step must not wait for a follower: the steps
since the last transfer are lost if the owner crashes.
"""

import logging
import threading
import time
from fnmatch import fnmatchcase

from torchweft.core.errors import UsageError, WeftError, join_faults
from torchweft.core.validation import MAX_SECONDS
from torchweft.experts import errors
from torchweft.experts.discovery import Directory, Lease, LocalDirectory, Ownership, Snapshot
from torchweft.experts.discovery.fencing import number_of, replaced
from torchweft.experts.discovery.registration import LeaseHeartbeat
from torchweft.experts.replication.replica import Replica, ReplicaOptions, StateVersion
from torchweft.experts.replication.streams import FollowerStream, LeaderStreams
from torchweft.experts.statistics import ReplicaStatistics
from torchweft.experts.tls import directory_faults
from torchweft.experts.wire import Limits

_LOG = logging.getLogger("torchweft.experts.server")
INTERVAL = 0.05  # seconds between two readings of the snapshot, which is in memory
_RETRY_SECONDS = 0.25
_ANSWER_SECONDS = 2.0  # longest wait for a replica that is asked for a newer state
_JOIN = 0.5  # longest wait of `stop` for the thread; a pending call of an unavailable directory ends it later
_LEAST_HANDOVER = 0.5  # seconds for followers to fetch the last state, even if draining took all of its time


class ReplicationManager:
    """The replicas of one server, and a thread that attends to them. Without ``options``, all methods do nothing."""

    # Raises ``UsageError`` for options without a directory, and for certificates without server names.
    def __init__(self, options: ReplicaOptions | None, directory: Directory | None, limits: Limits) -> None:
        self.replicas: dict[str, Replica] = {}
        self.leader_streams = None if options is None else LeaderStreams(self.replicas, limits)
        if options is not None:
            if directory is None:
                raise UsageError("replicas= needs directory= as well: the directory says which server owns an expert")
            if not isinstance(directory, LocalDirectory) and (faults := directory_faults(options.tls)):
                raise UsageError(join_faults("invalid replica options:", faults))
        self._options = options or ReplicaOptions()
        self._directory = directory or LocalDirectory()  # never used without options
        self._limits = limits
        self._heartbeat: LeaseHeartbeat | None = None
        self._address = ""  # of this server
        self._streams: dict[str, FollowerStream] = {}  # by the leader's address
        self._unsaved: list[Replica] = []  # those taken over since the last save
        self._is_retired = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_rounds, name="torchweft-replicas", daemon=True)

    def covers(self, uid: str) -> bool:
        return self.leader_streams is not None and self._options.covers(uid)

    def add(self, replica: Replica) -> None:
        self.replicas[replica.uid] = replica

    def until(self, lease: Lease) -> float:
        return float("-inf") if self._heartbeat is None else self._heartbeat.until(lease)

    def start(self, heartbeat: LeaseHeartbeat, served: list[str]) -> None:
        """Start to claim and follow, and wait until each replica has an owner, for at most ``first_seconds``."""
        self._heartbeat, self._address = heartbeat, heartbeat.address
        if self.leader_streams is None:
            return
        # Only a warning, because the pattern can match experts that are added later.
        for pattern in self._options.experts if served else ():
            if not any(fnmatchcase(name, pattern) for name in served):
                _LOG.warning("replicas: pattern %r matches none of the experts here, such as %r", pattern, served[0])
        self._thread.start()
        end = time.monotonic() + self._options.first_seconds
        while time.monotonic() < end and not self._stop.wait(0.01):
            for replica in self.replicas.values():
                if isinstance(replica.failure, errors.AlreadyDeclaredError):
                    raise UsageError(str(replica.failure))
            if all(replica.is_settled for replica in self.replicas.values()):
                return

    def retire(self) -> bool:
        """Stop claiming experts. Returns whether any are replicated: those stay listed until `hand_over`."""
        self._is_retired = True
        return self.leader_streams is not None

    def claim_again(self, replica: Replica) -> Ownership:
        """A larger token for the owner of a replica. Raises ``NotOwnerError`` at any other server."""
        replica.leadership.check(steps=True)
        lease = replica.leadership.lease
        assert lease is not None
        return self._directory.claim(replica.uid, lease)

    def hand_over(self, seconds: float, max_wait: float) -> None:
        """Save the owned replicas, let followers fetch the last states, and stop owning. No steps may follow."""
        # Waits ``max_wait`` seconds for a module that holds its expert, and ``seconds`` for followers.
        failure: Exception | None = None
        owned = [replica for replica in self.replicas.values() if replica.leadership.may_step]
        for replica in owned:
            replica.mark_final()
        for replica in owned:
            try:
                replica.save(max_wait)
            except Exception as error:  # continue, so that the other replicas are saved
                failure = error
        # A follower acknowledges a state by its next request, which names the version that it has. Stopping as soon as
        # the bytes are sent would lose the steps of a follower that has not loaded them yet.
        end = time.monotonic() + max(_LEAST_HANDOVER, seconds)
        while time.monotonic() < end and any(
            version != replica.version for replica in owned for version in self._follower_versions(replica.uid).values()
        ):
            time.sleep(0.005)
        for replica in owned:
            replica.follow(None)
        if failure is not None:
            raise failure

    def stop(self) -> None:
        # Can be called twice, and before `start`.
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN)
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def statistics(self) -> dict[str, ReplicaStatistics]:
        return {uid: self._replica_statistics(replica) for uid, replica in sorted(self.replicas.items())}

    def _replica_statistics(self, replica: Replica) -> ReplicaStatistics:
        leadership, steps, failure = replica.leadership, replica.backend.steps, replica.failure
        owner, follows, report = leadership.owner, leadership.role == "follower", replica.report
        versions = {} if follows else self._follower_versions(replica.uid)
        return ReplicaStatistics(
            role=leadership.role,
            owner="" if owner is None else owner.address,
            token=0 if owner is None else number_of(owner.token),
            lasts=leadership.lasts,
            steps=steps,
            behind=replica.steps_behind,
            heard_seconds=time.monotonic() - report.heard_at if follows and report is not None else None,
            # Token 0: the follower has initial weights only, so its steps do not count.
            followers={name: max(0, steps - (have.steps if have.token else 0)) for name, have in versions.items()},
            sent=replica.state.sent,
            received=replica.state.received,
            received_bytes=replica.state.received_bytes,
            failure="" if failure is None else f"{type(failure).__name__}: {failure}",
        )

    def _follower_versions(self, uid: str) -> dict[str, StateVersion]:
        return {} if self.leader_streams is None else self.leader_streams.followers(uid)

    def _run_rounds(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                self._attend_all()
            except Exception:  # e.g. an unavailable directory; the next round tries again
                _LOG.debug("replicas: a round failed", exc_info=True)

    def _attend_all(self) -> None:
        if self._heartbeat is None or self._heartbeat.watch is None:
            return
        snapshot, lease = self._heartbeat.watch.snapshot(), self._heartbeat.lease
        for replica in self.replicas.values():
            if self._stop.is_set():
                return
            if time.monotonic() < replica.next_try:
                continue
            try:
                self._attend_replica(replica, snapshot, lease)
            except Exception as error:
                replica.record_failure(error)
                replica.postpone(_RETRY_SECONDS)
        self._follow_owners()
        # After all replicas have been attended to: saving can wait long for a busy module, and claims must not.
        while self._unsaved:
            replica = self._unsaved.pop()
            try:
                replica.save(MAX_SECONDS)
            except WeftError as error:
                replica.record_failure(error)

    def _attend_replica(self, replica: Replica, snapshot: Snapshot, lease: Lease | None) -> None:
        leadership, owner = replica.leadership, snapshot.owner(replica.uid)
        other = owner if owner is not None and owner.address != self._address else None
        if leadership.role == "follower":
            if leadership.owner != other:
                replica.follow(other)
            if other is None and lease is not None and replica.uid in lease.uids and not self._is_retired:
                if not replica.may_lead:
                    raise errors.ExpertError(
                        f"expert {replica.uid!r} has no owner, and this server does not claim it, because it never "
                        "received the owner's state or could not load it. Start a server that has the state, or "
                        "restart this one to continue with its present state"
                    )
                self._claim_replica(replica, snapshot, lease)
        elif other is not None and replaced(leadership.token, other.token):
            replica.follow(other)
        elif lease is None:
            return
        elif leadership.lease is None or lease.number != leadership.lease.number:
            if replica.uid in lease.uids:
                self._claim_replica(replica, snapshot, lease)
        elif leadership.role == "taking over" and leadership.owner is not None:
            self._take_over(replica, leadership.owner, snapshot, lease)

    def _claim_replica(self, replica: Replica, snapshot: Snapshot, lease: Lease) -> None:
        try:
            ownership = self._directory.claim(replica.uid, lease)
        except errors.ExpertOwnedError as error:
            replica.follow(Ownership(replica.uid, error.address, 0))
        except errors.LeaseLostError:  # the heartbeat declares the experts again soon
            pass
        else:
            replica.claimed(ownership, lease)
            self._take_over(replica, ownership, snapshot, lease)

    def _take_over(self, replica: Replica, ownership: Ownership, snapshot: Snapshot, lease: Lease) -> None:
        if seconds := replica.quiet(lease):
            replica.record_failure(
                errors.ExpertError(
                    f"the directory has begun again: expert {replica.uid!r} is claimed, and will be led in "
                    f"{seconds:.1f} s, when the lease of the previous owner has certainly ended"
                )
            )
            return
        failure: Exception | None = None
        try:
            # Every replica, not only the last owner: its address can be unknown after a restart of this server.
            for address in sorted({*snapshot.addresses(replica.uid)} - {self._address}):
                try:
                    self._stream_from(address).fetch_newest(replica, ownership.token, _ANSWER_SECONDS)
                except errors.UnknownExpertError:
                    raise errors.AlreadyDeclaredError(
                        f"the server at {address} lists expert {replica.uid!r} without replicas=, so clients would "
                        "move between different weights: set replicas= at that server too"
                    ) from None
                except WeftError:  # that replica does not answer
                    pass
            replica.restore()
        # Errors of module and optimizer included: while this server holds the claim, no other server can lead.
        except Exception as error:
            failure = error
        if replica.state.is_broken or isinstance(failure, errors.AlreadyDeclaredError):
            # Follow first: once the claim is released, another server may step.
            replica.follow(None)
            self._directory.release(ownership)
            replica.postpone(_RETRY_SECONDS)
        else:
            replica.lead(ownership, lease)
            self._unsaved.append(replica)
        replica.record_failure(failure)

    def _follow_owners(self) -> None:
        owners: set[str] = set()
        for replica in self.replicas.values():
            owner = replica.leadership.owner
            if replica.leadership.role != "follower" or owner is None or owner.address == self._address:
                continue
            owners.add(owner.address)
            try:
                stream = self._stream_from(owner.address)
            except UsageError as error:  # this server must not connect to the owner
                replica.failed(error)
                continue
            if replica.uid not in stream.followed and time.monotonic() >= replica.next_try:
                stream.follow(replica)
                replica.postpone(_RETRY_SECONDS)
        for address, stream in list(self._streams.items()):
            if stream.ended or address not in owners:
                del self._streams[address]
                stream.close()

    def _stream_from(self, address: str) -> FollowerStream:
        if address not in self._streams or self._streams[address].ended:
            self._streams[address] = FollowerStream(address, self._address, self._options, self._limits)
        return self._streams[address]
