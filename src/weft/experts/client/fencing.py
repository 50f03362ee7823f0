"""Who asks, and under which fence: what goes with a call that steps an expert, and how its answer is checked.

    call     client       owns quotas, keys and open mini-batches
             token        of the owner that the directory names now: one that was replaced hears of it, and refuses
             incarnation  of the server that has the sum to commit; 0 for a backward
    answer   token        of who answered: if it is smaller than the directory's by then, or of another life of the
                          directory, the answer is not taken

Fencing tokens are as in `weft.experts.directory`; the bytes are those of `weft.experts.wire.service`.
"""

import os
import socket
import uuid

from weft.experts.client.route import Route
from weft.experts.directory.token import number_of, replaced
from weft.experts.wire import NotOwnerError, Received
from weft.experts.wire.service import Receipt, read_receipt


def client_name(wanted: str) -> str:
    """What servers know a caller by: what it wants, or a name that nobody else has."""
    return wanted or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def fence(route: Route, incarnation: int = 0) -> bytes:
    """The data of a call that steps."""
    return Receipt(None, incarnation, route.token()).to_bytes()


def fenced(uid: str, route: Route, answer: Received) -> Receipt:
    """What an answer says beside its tensors.

    Raises ``NotOwnerError`` for that of an owner which the directory has replaced: its steps are lost.
    """
    receipt, known = read_receipt(answer.header.data), route.token()
    if replaced(receipt.token, known):
        raise NotOwnerError(
            f"expert {uid!r} was answered by a server with fencing token {number_of(receipt.token)}, but its owner has "
            f"{number_of(known)}: what it stepped does not count, and the call is to be sent to the owner"
        )
    return receipt
