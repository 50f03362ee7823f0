"""Fencing: a token for each ownership, by which the writes of a replaced owner are rejected.

    A owns with token 7 ... A stalls, its lease ends ... B owns with token 12, writes ... A wakes up and writes: 7 < 12

A lease alone is not enough, because A cannot notice that it has stalled. The receiver of a write can. A follower, a
store, or a server that takes over therefore keeps the largest token of each expert. A token has two parts:

    20 bits   epoch     a random number that the directory draws when it begins
    44 bits   number    the revision of the claim, which only grows within one epoch

    7/2003  <  7/2010        within one epoch the larger token is the later owner's
    7/2003  ?  9/120         the directory lost its data and began again, or was replaced: the numbers have no order.
                             The later token is the one that the directory grants or lists now

A token of another epoch than the known owner's is therefore rejected until the directory has listed it. A write never
changes the epoch. Epoch 0 is for tokens from other sources, such as a test: only their numbers are compared.
"""

import secrets

from torchweft.experts.errors import FencedError

_BITS = 44
_NUMBERS = (1 << _BITS) - 1
_EPOCHS = 1 << 20


def new_epoch() -> int:
    # Never 0, which stands for tokens of unknown epochs.
    return 1 + secrets.randbelow(_EPOCHS - 1)


def token_of(epoch: int, number: int) -> int:
    return (epoch % _EPOCHS) << _BITS | number


def epoch_of(token: int) -> int:
    return token >> _BITS


def number_of(token: int) -> int:
    """The part of a token that users see. It grows at every claim within one epoch."""
    return token & _NUMBERS


def later(token: int, known: int) -> bool:
    """Whether ``token`` is certainly of a later owner than ``known``: larger, and of the same epoch."""
    return epoch_of(token) == epoch_of(known) and token > known


def replaced(token: int, known: int) -> bool:
    """Whether a receiver that knows the owner with token ``known`` rejects one with ``token``. 0 rejects none."""
    epochs = epoch_of(token), epoch_of(known)
    return number_of(token) < number_of(known) if 0 in epochs or epochs[0] == epochs[1] else True


class Fence:
    """The largest known token of one expert. Not thread-safe.

    Example:
        >>> weft.experts.discovery.Fence("ffn.0").largest is None  # nothing seen yet
        True
    """

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self.largest: int | None = None

    def admit(self, token: int) -> None:
        largest = token if self.largest is None else self.largest
        if replaced(token, largest):
            reason = f"is stale: an owner with token {number_of(largest)} has written since"
            if epoch_of(token) != epoch_of(largest):
                reason = f"is of another epoch of the directory than the known owner's, {number_of(largest)}"
            text = f"token {number_of(token)} for expert {self._uid!r} {reason}"
            raise FencedError(f"{text}. Stop stepping it; claim it again if it is free")
        self.largest = token

    def listed(self, token: int, *, granted: bool = False) -> bool:
        """Note that the directory lists the owner with ``token``. Returns whether the directory has begun again."""
        # ``granted`` just now: then even a smaller token is later than the known one.
        largest = self.largest
        if largest is None or later(token, largest):
            self.largest = token
            return False
        # A smaller token of the same epoch comes from a stale listing, unless it was granted just now.
        has_begun_again = granted or epoch_of(token) != epoch_of(largest)
        if has_begun_again:
            self.largest = token
        return has_begun_again
