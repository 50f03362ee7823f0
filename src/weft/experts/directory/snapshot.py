"""The directory as of one moment: it can be searched while the directory is away, and never changes.

snapshot of revision 9  + joined 10 + left 11 + owned 12  =  snapshot of revision 12
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Ownership:
    """The right of one server to step an expert. Later owners of it have a larger ``token``; see token.py."""

    uid: str
    address: str
    token: int


@runtime_checkable
class Change(Protocol):
    """What a snapshot reads of an event."""

    @property
    def revision(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def token(self) -> int: ...


@dataclass(frozen=True)
class Snapshot:
    """Experts with the addresses that serve them (sorted), and their owners, as of ``revision``."""

    revision: int = 0
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    owners: Mapping[str, Ownership] = field(default_factory=dict[str, Ownership])

    def __len__(self) -> int:
        return len(self.experts)

    def __contains__(self, uid: object) -> bool:
        return uid in self.experts

    @cached_property
    def uids(self) -> tuple[str, ...]:
        """All experts, sorted."""
        return tuple(sorted(self.experts))

    def search(self, prefix: str) -> list[str]:
        """The experts whose name starts with ``prefix``, sorted; in logarithmic time and that of the answer."""
        start = bisect_left(self.uids, prefix)
        return list(takewhile(lambda uid: uid.startswith(prefix), (self.uids[i] for i in range(start, len(self)))))

    def addresses(self, uid: str) -> tuple[str, ...]:
        """Where this expert is served; empty if nowhere."""
        return self.experts.get(uid, ())

    def owner(self, uid: str) -> Ownership | None:
        """Who steps this expert."""
        return self.owners.get(uid)

    def after(self, changes: Iterable[Change]) -> "Snapshot":
        """The snapshot that these changes make of this one. Older ones are passed over.

        Changes of its own revision are applied, again or at last: several may share one, and to repeat one changes
        nothing.
        """
        experts, owners, revision = dict(self.experts), dict(self.owners), self.revision
        for change in changes:
            if change.revision < self.revision:
                continue
            revision, uid = change.revision, change.uid
            if change.kind in ("joined", "left"):
                others = {address for address in experts.get(uid, ()) if address != change.address}
                now = {*others, change.address} if change.kind == "joined" else others
                experts[uid] = tuple(sorted(now))
                if not now:
                    del experts[uid]
            elif change.kind == "owned":
                owners[uid] = Ownership(uid, change.address, change.token)
            else:
                owners.pop(uid, None)
        return Snapshot(revision, experts, owners)
