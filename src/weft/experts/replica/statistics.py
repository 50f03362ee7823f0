"""What a server says of its replicas: plain numbers, taken at one moment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.experts.discovery.fencing import number_of
from weft.experts.replica.mark import Mark
from weft.experts.replica.replica import Replica


@dataclass(frozen=True)
class ReplicaStatistics:
    """One replicated expert at one server.

    ``role``: "owner", "taking over", or "follower". ``owner`` is the owner's address, "" if none is known, and
    ``token`` the number of its fencing token. ``lasts``: whether the own lease surely lasts (owners only).
    ``behind``: steps that this follower lacks, as the owner last told, ``heard_seconds`` ago; None before it told.
    ``followers``: an owner's followers by address, with the steps that each lacks. ``taken`` states were given away,
    ``received`` taken in.
    ``failure``: what last went wrong, "" if nothing does now.
    """

    role: str
    owner: str
    token: int
    lasts: bool
    steps: int
    behind: int | None
    heard_seconds: float | None
    followers: Mapping[str, int]
    taken: int
    received: int
    received_bytes: int
    failure: str


def statistics(replica: Replica, marks: Mapping[str, Mark]) -> ReplicaStatistics:
    """How a replica stands; ``marks`` tells what each server has that asks here for its states."""
    standing, owner, steps = replica.standing, replica.standing.owner, replica.backend.steps
    follows = standing.role == "follower"
    return ReplicaStatistics(
        role=standing.role,
        owner="" if owner is None else owner.address,
        token=0 if owner is None else number_of(owner.token),
        lasts=standing.lasts,
        steps=steps,
        behind=replica.behind,
        heard_seconds=time.monotonic() - replica.heard if follows and replica.heard else None,
        followers={}
        if follows
        else {name: steps if mark.token == 0 else max(0, steps - mark.steps) for name, mark in marks.items()},
        taken=replica.taken,
        received=replica.received,
        received_bytes=replica.received_bytes,
        failure="" if replica.failure is None else f"{type(replica.failure).__name__}: {replica.failure}",
    )


def line(uid: str, found: Mapping[str, Any]) -> str:
    """One replica in words; ``found`` is a `ReplicaStatistics` as a dict."""
    if found["role"] == "owner":
        others = ", ".join(f"{name} ({steps} steps behind)" for name, steps in sorted(found["followers"].items()))
        lapsed = "" if found["lasts"] else ", its lease has lapsed"
        text = f"owner with token {found['token']}{lapsed}; followed by {others or 'nobody'}"
    elif found["role"] == "follower":
        behind = "its state is not here yet" if found["behind"] is None else f"{found['behind']} steps behind"
        text = f"follows {found['owner']} with token {found['token']}, {behind}" if found["owner"] else "has no owner"
    else:
        text = f"is taking over with token {found['token']}"
    return f"{uid}: {text}" + (f"; goes wrong: {found['failure']}" if found["failure"] else "")
