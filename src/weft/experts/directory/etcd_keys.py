"""How a directory lies in etcd: one key per expert and address, and one per owner, each under its server's lease.

    weft/ffn.3.17 0 a 10.0.0.5:7000      listed there              value: nothing
    weft/ffn.3.17 0 o                    who steps it              value: the address 0 life; its revision and that
                                                                          life are the token
    weft/ 0 life                         a number of this etcd's   drawn by who declares or claims first, for good

The byte 0 ends the name, so no name is a prefix of another's keys; and names stand first, so that one range, and one
watch, covers all that concerns the experts with a prefix, in the order in which it happened.
"""

from typing import Any

from weft.core.errors import UsageError
from weft.experts.directory.etcd_messages import DELETE
from weft.experts.directory.protocol import Event
from weft.experts.directory.snapshot import Ownership, Snapshot
from weft.experts.directory.token import token_of

_END = b"\0"
_DIGITS = 8  # more than a life has


def _text(value: bytes) -> str:
    """A value as text. What somebody else put there may be none: it is shown, and is no address of anybody."""
    return value.decode("utf-8", "backslashreplace")


def life_told(value: bytes) -> int:
    """The life of the directory that a value tells; 0 if it tells none."""
    return int(value) if value.isdigit() and len(value) < _DIGITS else 0


class Keys:
    """The keys below one namespace. Directories of different namespaces share an etcd without seeing each other."""

    def __init__(self, namespace: str) -> None:
        if not namespace or "\0" in namespace:
            raise UsageError(f"namespace is {namespace!r}, wanted a name without the character 0")
        self._root = namespace.encode() + b"/"

    def entry(self, uid: str, address: str) -> bytes:
        """Where it is written that ``address`` serves ``uid``."""
        return self._root + uid.encode() + _END + b"a" + address.encode()

    def owner(self, uid: str) -> bytes:
        """Where it is written who owns ``uid``."""
        return self._root + uid.encode() + _END + b"o"

    @property
    def life(self) -> bytes:
        """Where it is written which life of the directory this is; no expert's name is empty."""
        return self._root + _END + b"life"

    def owned(self, address: str, life: int) -> bytes:
        """What is written for an owner: the life goes with it, so that whoever reads it knows the whole token."""
        return address.encode() + _END + str(life).encode()

    def ownership(self, uid: str, kv: Any) -> Ownership:
        """What the KeyValue of an owner tells."""
        address, _, life = kv.value.partition(_END)
        return Ownership(uid, _text(address), token_of(life_told(life), kv.mod_revision))

    def range(self, prefix: str) -> tuple[bytes, bytes]:
        """First key, and first key behind the last, of all experts whose name starts with ``prefix``."""
        start = self._root + prefix.encode()
        return start, start[:-1] + bytes([start[-1] + 1])  # UTF-8 has no byte 255

    def snapshot(self, found: Any) -> Snapshot:
        """The snapshot that a RangeResponse tells."""
        experts: dict[str, list[str]] = {}
        owners: dict[str, Ownership] = {}
        for each in found.kvs:
            uid, kind, address = self._read(each.key)
            if kind == "a":
                experts.setdefault(uid, []).append(address)
            elif kind == "o":
                owners[uid] = self.ownership(uid, each)
        lists = {uid: tuple(sorted(addresses)) for uid, addresses in experts.items()}
        return Snapshot(found.header.revision, lists, owners)

    def event(self, told: Any) -> Event | None:
        """What an Event of etcd means; ``None`` for nothing, such as an entry that moved to another lease."""
        kv, gone = told.kv, told.type == DELETE
        uid, kind, address = self._read(kv.key)
        if kind == "a":
            if not gone and kv.create_revision != kv.mod_revision:
                return None
            return Event(kv.mod_revision, "left" if gone else "joined", uid, address)
        if kind != "o":
            return None
        if gone:
            before = self.ownership(uid, told.prev_kv)
            return Event(kv.mod_revision, "released", uid, before.address, before.token)
        now = self.ownership(uid, kv)
        return Event(kv.mod_revision, "owned", uid, now.address, now.token)

    def _read(self, key: bytes) -> tuple[str, str, str]:
        """Name, kind and address; all empty for a key that somebody else put there."""
        uid, end, rest = key.removeprefix(self._root).partition(_END)
        try:
            return (uid.decode(), rest[:1].decode(), rest[1:].decode()) if end else ("", "", "")
        except UnicodeDecodeError:
            return "", "", ""
