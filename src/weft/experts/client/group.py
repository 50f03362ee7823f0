"""Many remote experts at once: made from a directory, and committed together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from weft.core.errors import UsageError
from weft.experts.client.connections import Connections
from weft.experts.client.remote import RemoteExpert
from weft.experts.directory import Directory


def create_remote_experts(
    uids: Sequence[str], directory: Directory | Connections, **options: Any
) -> list[RemoteExpert | None]:
    """One `RemoteExpert` per uid, in order; None for those that the directory does not know now.

    Args:
        uids: names of experts.
        directory: where they are looked up, now and at every call. With `Connections`, those are used and stay open;
            with a bare directory, connections are made that close when the last of the experts is collected.
        options: as `RemoteExpert` takes them, but for ``tls`` and ``token``, which `Connections` have.

    Raises ``AwayError`` if the directory does not answer, ``UsageError`` for a single text in place of a list.
    """
    if isinstance(uids, str):
        raise UsageError(f"uids is the single text {uids!r}, wanted a list of names")
    connections = directory if isinstance(directory, Connections) else Connections(directory)
    known = connections.snapshot()
    return [RemoteExpert(uid, connections, **options) if uid in known else None for uid in uids]


def commit(module: nn.Module) -> dict[str, bool]:
    """`RemoteExpert.commit` for every accumulating remote expert inside of ``module``: whether it stepped, by uid.

    To be called where the optimizer of the local parameters steps. Raises as `RemoteExpert.commit`; experts before
    the one that failed have stepped.
    """
    found = [each for each in module.modules() if isinstance(each, RemoteExpert)]
    return {each.uid: each.commit() for each in found if each.accumulates}
