"""Which experts of a server are replicas, and how closely a follower keeps to the owner.

A follower is behind by at most ``follow_steps`` steps or ``follow_seconds``, whichever comes first, and what one
transfer takes: so much may be lost when an owner dies. An owner that ends by itself loses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, seconds_fault, token_fault
from weft.experts.client.transport import ClientTls


@dataclass(frozen=True)
class ReplicaOptions:
    """Args:
    experts: patterns (``*``, ``?``, ``[ab]``) of the names of experts that other servers have too.
    follow_seconds: after so long a follower fetches the state of an owner that has stepped.
    follow_steps: after so many steps it fetches at once.
    first_seconds: how long a server waits, when it starts, for the owners' states; then it starts without.
    state_bytes: of one expert's state at most; more is refused before it is held.
    tls, token: how this server shows itself to the others, where it needs the role `Role.ADMIN`; see `GrpcTransport`.

    Raises ``UsageError`` that lists the values that make no sense.
    """

    experts: Sequence[str] = ("*",)
    follow_seconds: float = 2.0
    follow_steps: int = 100
    first_seconds: float = 10.0
    state_bytes: int = 16 << 30
    tls: ClientTls | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        faults: list[str] = []
        for name in ("follow_seconds", "follow_steps", "first_seconds", "state_bytes"):
            check = seconds_fault if name.endswith("_seconds") else count_fault
            faults += check(name, getattr(self, name))
        faults += token_fault(self.token)
        if isinstance(self.experts, str) or not self.experts:
            faults.append(f"experts is {self.experts!r}, wanted a list of patterns such as ['ffn.*']")
        else:
            patterns: Sequence[Any] = self.experts
            wrong = [each for each in patterns if not isinstance(each, str) or not each]
            faults += [f"experts has {each!r}, wanted patterns such as 'ffn.*'" for each in wrong]
        if faults:
            raise UsageError(listed("replicas cannot be kept with these options:", faults))

    def covers(self, uid: str) -> bool:
        """Whether this expert is a replica."""
        return any(fnmatchcase(uid, pattern) for pattern in self.experts)
