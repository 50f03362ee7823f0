"""Keeps the replicas of one server: claims what is free, follows what others own, takes over, hands over.

    every 50 ms:   the directory's snapshot ── mine? free? another's?
        free        claim (compare and swap) ── newest state among: here, other replicas, checkpoints ──> lead
        another's   follow: a link to its owner
        was mine    the lease ended: as if it were free; or follow who was faster
    at the end:    nothing steps any more ── save ── followers fetch the last state ── let go

Who claims is the owner before it looks for a newer state, so that nobody steps while it looks; calls are refused until
it has looked. In a directory that has begun anew it looks a lease later: the owner of before may not know yet.
Transfers are asynchronous, as in most replicated stores: what an owner stepped after the last transfer is lost if it
dies.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from weft.core.errors import UsageError, WeftError
from weft.experts.discovery import (
    AwayError,
    Directory,
    DirectoryCache,
    DirectoryError,
    Lease,
    LeaseLostError,
    OwnedError,
    Ownership,
    Snapshot,
)
from weft.experts.discovery.fencing import later, replaced
from weft.experts.errors import ExpertError
from weft.experts.replica.feed import Feed
from weft.experts.replica.link import Link
from weft.experts.replica.options import ReplicaOptions
from weft.experts.replica.replica import Replica
from weft.experts.replica.statistics import ReplicaStatistics, statistics
from weft.experts.wire import Limits

TURN = 0.05  # seconds between two looks at the directory, which are reads of memory
_AGAIN = 0.25  # seconds before something that failed is tried again
_ASKED = 2.0  # seconds that another replica may take to say whether it has a newer state
_JOIN = 0.5  # seconds that `stop` waits for a turn; one that asks a directory that is away ends with that call


class Keeper:
    """A thread, from `start` to `stop`.

    Args:
        directory: who owns what. It stays open.
        address: where the directory lists this server.
        lease: its lease, as it is now; see `weft.experts.server.registration.LeaseHeartbeat`.
        options, limits: see `ReplicaOptions` and `Limits`.
    """

    def __init__(
        self,
        directory: Directory,
        address: Callable[[], str],
        lease: Callable[[], Lease | None],
        options: ReplicaOptions,
        limits: Limits,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.feed = Feed(lambda: self.replicas, limits)
        self.failure: Exception | None = None
        self._directory = directory
        self._address = address
        self._lease = lease
        self._options = options
        self._limits = limits
        self._mirror: DirectoryCache | None = None
        self._links: dict[str, Link] = {}
        self._again: dict[str, float] = {}
        self._retired = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-replicas", daemon=True)

    def start(self) -> None:
        """Begin, and wait until every replica is owned here or up to date, for at most ``first_seconds``."""
        self._thread.start()
        self.wait()

    def wait(self) -> None:
        """Until every replica is owned here or has its owner's state, for at most ``first_seconds``."""
        end = time.monotonic() + self._options.first_seconds
        while not all(replica.settled for replica in list(self.replicas.values())) and time.monotonic() < end:
            if self._stop.wait(0.01):
                return

    def add(self, replica: Replica) -> None:
        """Keep one more."""
        self.replicas[replica.uid] = replica

    def moved(self, before: Lease, lease: Lease) -> None:
        """The experts are declared under a new lease, and the one before still lasts: move the claims over."""
        for replica in list(self.replicas.values()):
            standing = replica.standing
            kept = standing.lease is not None and standing.lease.number == before.number
            if standing.role == "owner" and kept and replica.uid in lease.uids:
                with suppress(DirectoryError):  # then the next turn sees what became of it
                    standing.claim(self._directory.claim(replica.uid, lease), lease, "owner")

    def retire(self) -> None:
        """Claim nothing more."""
        self._retired = True

    def hand_over(self, uids: list[str], seconds: float, *, save: bool = True) -> None:
        """Nothing steps these any more: save them, let followers fetch the last state, and own them no more.

        ``save`` is False where a module still holds its expert. Waits at most ``seconds`` for followers.
        Raises the last of what saving raised, after all was let go. The
        claims themselves end with the lease, or by `release`.
        """
        mine = [self.replicas[uid] for uid in uids if uid in self.replicas and self.replicas[uid].standing.may_step]
        failure: Exception | None = None
        for replica in mine:
            replica.final = True
        for replica in mine if save else ():
            try:
                replica.save()
            except Exception as error:  # the others are to be saved all the same
                failure = error
        end = time.monotonic() + seconds
        while any(self._lacking(replica) for replica in mine) and time.monotonic() < end:
            time.sleep(0.005)
        for replica in mine:
            replica.follow(None)
        if failure is not None:
            raise failure

    def remove(self, uid: str, seconds: float, *, save: bool = True) -> None:
        """Keep one less, after `hand_over`. Raises what that raises."""
        replica = self.replicas[uid]
        ownership = replica.standing.owner if replica.standing.role != "follower" else None
        try:
            self.hand_over([uid], seconds, save=save)
        finally:
            del self.replicas[uid]
            if ownership is not None:
                with suppress(AwayError):
                    self._directory.release(ownership)

    def stop(self) -> None:
        """End the thread and all links. May be called twice, and before the start."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN)
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._mirror is not None:
            self._mirror.close()

    def statistics(self) -> dict[str, ReplicaStatistics]:
        """How every replica stands."""
        return {uid: statistics(each, self.feed.followers(uid)) for uid, each in sorted(self.replicas.items())}

    def _lacking(self, replica: Replica) -> bool:
        return any(mark != replica.mark for mark in self.feed.followers(replica.uid).values())

    # The thread.

    def _run(self) -> None:
        while not self._stop.wait(TURN):
            try:
                self._turn()
                self.failure = None
            except Exception as error:  # such as a directory that is away; the next turn comes anyway
                self.failure = error

    def _turn(self) -> None:
        if self._mirror is None:
            self._mirror = DirectoryCache(self._directory, retry=_AGAIN)
        snapshot, lease = self._mirror.snapshot(), self._lease()
        led: list[Replica] = []
        for replica in list(self.replicas.values()):
            if self._stop.is_set():
                return
            if time.monotonic() < self._again.get(replica.uid, 0.0):
                continue
            try:
                if self._settled(replica, snapshot, lease):
                    led.append(replica)
            except Exception as error:
                replica.failure = error
                self._later(replica)
        self._tend()
        for replica in led:
            try:
                replica.save()
            except WeftError as error:
                replica.failure = error

    def _settled(self, replica: Replica, snapshot: Snapshot, lease: Lease | None) -> bool:
        """Do what is due for one replica; whether it was taken over."""
        standing, owner = replica.standing, snapshot.owner(replica.uid)
        theirs = owner is not None and owner.address != self._address()
        listed = lease is not None and replica.uid in lease.uids
        if standing.role != "follower":
            kept = lease is not None and standing.lease is not None and lease.number == standing.lease.number
            if theirs and owner is not None and replaced(standing.token, owner.token):
                replica.follow(owner)
            elif listed and not kept and lease is not None:
                return self._claimed(replica, snapshot, lease)
            elif kept and lease is not None and owner is not None and later(owner.token, standing.token):
                standing.claim(owner, lease, standing.role)  # two claims of ours crossed: the later one counts
            elif kept and lease is not None and standing.role == "taking over":
                return self._led(replica, snapshot, lease)
            return False
        if theirs:
            if standing.owner != owner:
                replica.follow(owner)
            return False
        if standing.owner is not None:
            replica.follow(None)
        if lease is None or not listed or self._retired:
            return False
        if not replica.may_lead:
            raise ExpertError(
                f"expert {replica.uid!r} has no owner, and is not claimed: its owner's state never came here, or could "
                "not be loaded. Start a server that has the state, or start this one again to go on with what it has"
            )
        return self._claimed(replica, snapshot, lease)

    def _claimed(self, replica: Replica, snapshot: Snapshot, lease: Lease) -> bool:
        """Claim it, and lead if nobody of before may step it any more; whether that came about."""
        try:
            ownership = self._directory.claim(replica.uid, lease)
        except OwnedError as error:
            replica.follow(Ownership(replica.uid, error.address, 0))
            return False
        except LeaseLostError:  # it is declared again soon
            return False
        replica.claimed(ownership, lease)
        return self._led(replica, snapshot, lease)

    def _led(self, replica: Replica, snapshot: Snapshot, lease: Lease) -> bool:
        """It is claimed: find the newest state, and lead; whether that came about."""
        ownership = replica.standing.owner
        if ownership is None:
            return False
        if seconds := replica.quiet(lease):
            replica.failure = ExpertError(
                f"the directory has begun anew: expert {replica.uid!r} is claimed, and is led in {seconds:.1f} s, when "
                "the lease of the owner of before has surely ended"
            )
            return False
        failure: Exception | None = None
        try:
            for address in snapshot.addresses(replica.uid):
                if address != self._address():
                    with suppress(WeftError):  # who does not answer cannot be asked
                        self._link(address).newest(replica, ownership.token, _ASKED)
            replica.improve()
        except Exception as error:  # also what module and optimizer raise: nobody else could claim it meanwhile
            failure = error
        if replica.broken:
            replica.failure = failure
            replica.follow(None)
            self._directory.release(ownership)
            self._later(replica)
            return False
        replica.lead(ownership, lease)
        replica.failure = failure
        return True

    def _tend(self) -> None:
        """A link to every owner, and no other."""
        wanted: set[str] = set()
        for replica in list(self.replicas.values()):
            owner = replica.standing.owner
            if replica.standing.role != "follower" or owner is None or owner.address == self._address():
                continue
            wanted.add(owner.address)
            try:
                link = self._link(owner.address)
            except UsageError as error:  # who claims it is no server that may be followed
                replica.failed(error)
                continue
            if replica.uid not in link.followed and time.monotonic() >= self._again.get(replica.uid, 0.0):
                link.follow(replica)
                self._later(replica)
        for address, link in list(self._links.items()):
            if link.gone or address not in wanted:
                del self._links[address]
                link.close()

    def _link(self, address: str) -> Link:
        if address not in self._links or self._links[address].gone:
            self._links.pop(address, None)
            self._links[address] = Link(address, self._address(), self._options, self._limits)
        return self._links[address]

    def _later(self, replica: Replica) -> None:
        self._again[replica.uid] = time.monotonic() + _AGAIN
