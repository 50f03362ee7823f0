"""What a server says of itself: one value of plain numbers, and the same as JSON for people and pages."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from weft.experts.counts import BackendStatistics, RuntimeStatistics


@dataclass(frozen=True)
class KeepingStatistics:
    """``durable``: the step on the disk (None: no checkpoints). ``restored``: the step that this start went on from."""

    durable: int | None
    restored: int | None


@dataclass(frozen=True)
class ServerStatistics:
    """``connections`` are open now, with ``calls`` and ``nbytes`` under way; the others count since the start.

    ``turned_away`` clients found the server full, ``broken`` ones sent what is no frame, ``refusals`` were forbidden;
    all by kind of call, ``errors`` by reason. ``seconds`` since the start. ``failures``: what last went wrong with
    the directory or the checkpoints, empty if nothing does now.
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
    keeping: Mapping[str, KeepingStatistics]
    runtimes: Mapping[str, RuntimeStatistics]

    def to_json(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and texts."""
        return _plain(asdict(self))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return value
