"""Groups of remote experts: created from a directory, committed or discarded together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn

from weft.core.validation import Validator, uid_fault
from weft.experts.client.connections import Connections, fixed_faults
from weft.experts.client.remote import RemoteExpert, check_options
from weft.experts.discovery import Directory

_WANTED = (
    "a directory, Connections to one, or addresses by uid; for the address of a single server, make each "
    "RemoteExpert(uid, address)"
)


def create_remote_experts(
    uids: Sequence[str], directory: Directory | Connections | Mapping[str, str], **options: Any
) -> list[RemoteExpert | None]:
    """Create one `RemoteExpert` per uid, in order; None for those that the directory does not know now.

    Args:
        uids: names of experts.
        directory: where they are looked up, now and at every call. With `Connections`, those are used and stay open;
            with a bare directory, or addresses by uid, connections are made that close when the last of the experts is
            collected.
        options: as `RemoteExpert` takes them, but for ``tls`` and ``token``, which `Connections` have.

    Raises ``AwayError`` if the directory does not answer, ``UsageError`` that lists all invalid arguments,
    such as a single text in place of a list.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     (remote,) = weft.create_remote_experts(["ffn.0"], {"ffn.0": server.address})
        ...     remote(torch.randn(4, 8)).shape
        torch.Size([4, 8])
    """
    with Validator("invalid remote experts") as check:
        names: list[Any] = []
        if isinstance(uids, str) or not isinstance(cast("Any", uids), Iterable):
            check.add(f"uids is {uids!r}, wanted a list of names")
        else:
            names = list(uids)
            check.add(*(fault for uid in names for fault in uid_fault(uid)))
        if isinstance(directory, Mapping):
            check.add(*fixed_faults(cast("Mapping[Any, Any]", directory)))
        else:
            check.instance("directory", directory, (Directory, Connections), _WANTED)
        check_options(check, options, address=False)
    connections = directory if isinstance(directory, Connections) else Connections(directory)
    known = connections.snapshot()
    return [RemoteExpert(uid, connections, **options) if uid in known else None for uid in names]


@runtime_checkable
class Commits(Protocol):
    """A layer of several experts, such as a mixture, that commits to all of them."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for `commit`."""
        ...

    def commit(self) -> Mapping[str, bool]:
        """One optimizer step with the gradients since the last: whether it stepped, by uid."""
        ...


@runtime_checkable
class Discards(Protocol):
    """A layer that can drop its open mini-batch: a remote expert, or a layer of several."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for `commit`."""
        ...

    def discard(self) -> None:
        """Drop the gradients since the last commit."""
        ...


def commit(module: nn.Module) -> dict[str, bool]:
    """Commit every accumulating remote expert and mixture inside of ``module``: whether it stepped, by uid.

    Call it where the optimizer of the local parameters steps. An expert that several of them call has stepped if
    it did for one. Raises as `RemoteExpert.commit` and `RemoteMixtureOfExperts.commit`; layers before the one that
    failed have stepped. After a `CommitError`, `discard` begins a new mini-batch.

    Example:
        >>> from weft.experts.client import commit
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows)
        >>> with weft.Server([expert]) as server, weft.RemoteExpert("ffn.0", server.address, accumulate=True) as remote:
        ...     for micro_batch in torch.randn(8, 8).split(2):
        ...         remote(micro_batch).sum().backward()
        ...     commit(remote)
        {'ffn.0': True}
    """
    found: dict[str, bool] = {}
    for each in module.modules():
        for uid, stepped in _committed(each).items():
            found[uid] = stepped or found.get(uid, False)
    return found


def discard(module: nn.Module) -> None:
    """Drop the gradients since the last commit, of every accumulating remote expert and mixture inside of ``module``.

    For a mini-batch that failed, and is to be run again or left out: until then every `commit` of it fails. Does not
    wait for the servers.

    Example:
        >>> from weft.experts.client import discard
        >>> discard(nn.Sequential(nn.Linear(8, 8)))  # has no remote experts, so nothing is dropped
    """
    for each in module.modules():
        if isinstance(each, Discards) and each.accumulates:
            each.discard()


def _committed(each: nn.Module) -> Mapping[str, bool]:
    if isinstance(each, RemoteExpert):
        return {each.uid: each.commit()} if each.accumulates else {}
    return each.commit() if isinstance(each, Commits) and each.accumulates else {}
