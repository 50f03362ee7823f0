"""Statistics of a server: plain numbers, and the same as JSON for people, pages and Prometheus."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, cast

from weft.experts.discovery.registration import LeaseStatistics
from weft.experts.replication import ReplicaStatistics
from weft.experts.telemetry import BackendStatistics, RuntimeStatistics


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
        return _plain(self)


def _plain(value: Any) -> Any:
    """By hand: `dataclasses.asdict` copies deeply, and the panel asks again and again."""
    if value is None or isinstance(value, int | float | str):
        return value
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return value
