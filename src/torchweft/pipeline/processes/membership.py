"""Rendezvous of the ranks of a group: one socket per pair, for members only.

    store (of the process group)   a secret, and where each rank listens
    connecting rank  ── nonce, rank ──>  <── nonce ──  ── proof ──>  <── proof ──  listening rank

A proof is an HMAC of both nonces, both ranks and the role of its author, so that it cannot be reflected or replayed.
Each handshake has its own thread and deadline, so that a stranger on the port delays no member. The listener is bound
to one interface, and closed when all members are connected.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from torchweft.core.errors import RankFailedError, RankLostError, UsageError, text_of
from torchweft.pipeline.processes.lanes import PrefixStore, Store, host_of

_MAGIC, _SHAKE_SECONDS, _POLL_SECONDS = b"torchweft", 5.0, 0.02
_HELLO = struct.Struct(f"<{len(_MAGIC)}si32s")
_FAILURE = "failure"  # the key under which a rank tells that it failed before it connected
_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankProcess(NamedTuple):
    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


class Rendezvous:
    """The exchange of a group's ranks through its store, before `deadline`."""

    def __init__(self, store: Store, ranks: list[int], rank: int, deadline: float) -> None:
        # Several pipes of one group follow each other, in one order on all ranks. Each has its own keys.
        uses = store.add(f"torchweft/links/{rank}", 1)
        self.store = PrefixStore(f"torchweft/links/{uses}", store)
        self._host_store, self._ranks, self._rank, self._deadline = store, ranks, rank, deadline

    def exchange(self, name: str, content: Any) -> list[Any]:
        """The plain contents of all ranks. Raises ``RankLostError`` that names the missing ones."""
        self.store.set(f"{name}/{self._rank}", json.dumps(content))
        keys = [f"{name}/{rank}" for rank in range(len(self._ranks))]
        # Polled: a blocking wait of the store could not name the ranks that are missing.
        while not self.store.check(keys):
            if self.store.check([_FAILURE]):
                raise RankFailedError(self.store.get(_FAILURE).decode())
            if time.monotonic() > self._deadline:
                present = [self.store.check([key]) for key in keys]
                raise self._missing([rank for rank, here in enumerate(present) if not here])
            time.sleep(_POLL_SECONDS)
        return [json.loads(self.store.get(key)) for key in keys]

    def tell_failure(self, error: BaseException) -> None:
        """Let the other ranks raise, which wait for this one."""
        with suppress(RuntimeError):  # without a store, they are gone too
            if not self.store.check([_FAILURE]):
                me = RankProcess(self._ranks[self._rank], socket.gethostname(), os.getpid())
                self.store.set(_FAILURE, f"{me} raised {type(error).__name__}: {text_of(error)}")

    def _missing(self, places: list[int]) -> RankLostError:
        ranks = ", ".join(str(self._ranks[place]) for place in places)
        return RankLostError(
            f"setting up a pipeline of the ranks {self._ranks}: no connection with rank {ranks} within the timeout of "
            "the group; every rank of the group must make its Pipe, in the same order"
        )

    def connect(self) -> tuple[list[RankProcess], dict[int, socket.socket], str]:
        me = RankProcess(self._ranks[self._rank], socket.gethostname(), os.getpid())
        machines = self.exchange("machine", _network_stack())
        address = _own_address(self._host_store, alone=len(set(machines)) == 1)
        secret = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=128 + len(self._ranks)) as listener:
            entries = self.exchange("member", [*me, *listener.getsockname()[:2], secret.hex()])
            members = [RankProcess(*entry[:3]) for entry in entries]
            secret = bytes.fromhex(entries[0][5])  # that of the first rank
            return members, self._shake_all(listener, [tuple(entry[3:5]) for entry in entries], secret), address

    def _shake_all(self, listener: socket.socket, addresses: list[Any], secret: bytes) -> dict[int, socket.socket]:
        done: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        sockets: dict[int, socket.socket] = {}
        # The higher rank calls. If both called, a pair would have two sockets.
        for other in range(self._rank):
            _start(lambda other=other: self._call(addresses[other], other, secret, done))
        # Short, because handshakes end in other threads, and the deadline is checked here.
        listener.settimeout(_POLL_SECONDS)
        try:
            while len(sockets) < len(self._ranks) - 1:
                if time.monotonic() > self._deadline:
                    everyone = range(len(self._ranks))
                    raise self._missing([rank for rank in everyone if rank not in sockets and rank != self._rank])
                try:
                    stranger, _ = listener.accept()
                    _start(lambda stranger=stranger: self._answer(stranger, secret, done))
                except OSError:  # none so far, or a connection that is gone already
                    pass
                try:
                    while True:
                        other, connection = done.get_nowait()
                        sockets.setdefault(other, connection)
                except Empty:
                    pass
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
        return sockets

    def _call(self, address: Any, other: int, secret: bytes, done: SimpleQueue[Any]) -> None:
        while time.monotonic() < self._deadline:
            try:
                connection = socket.create_connection(address, _SHAKE_SECONDS)
            except OSError:
                time.sleep(5 * _POLL_SECONDS)
                continue
            try:
                nonce = secrets.token_bytes(32)
                connection.sendall(_HELLO.pack(_MAGIC, self._rank, nonce))
                nonces = nonce + _receive(connection, 32)
                connection.sendall(_proof(secret, b"call", self._rank, other, nonces))
                _verify(connection, _proof(secret, b"answer", other, self._rank, nonces))
                done.put((other, connection))
                return
            except OSError:
                connection.close()

    def _answer(self, connection: socket.socket, secret: bytes, done: SimpleQueue[Any]) -> None:
        try:
            connection.settimeout(_SHAKE_SECONDS)
            # A stranger gets at most a nonce, and no proof that it could use.
            magic, other, theirs = _HELLO.unpack(_receive(connection, _HELLO.size))
            if magic != _MAGIC or not self._rank < other < len(self._ranks):
                raise ConnectionError("not a member")
            nonce = secrets.token_bytes(32)
            connection.sendall(nonce)
            _verify(connection, _proof(secret, b"call", other, self._rank, theirs + nonce))
            connection.sendall(_proof(secret, b"answer", self._rank, other, theirs + nonce))
            done.put((other, connection))
        except OSError:
            connection.close()


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="torchweft-handshake", daemon=True).start()


def _proof(secret: bytes, role: bytes, author: int, other: int, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + struct.pack("<ii", author, other) + nonces, hashlib.sha256)


def _verify(connection: socket.socket, wanted: bytes) -> None:
    if not hmac.compare_digest(_receive(connection, len(wanted)), wanted):
        raise ConnectionError("the other end does not know the secret of the group")


def _receive(connection: socket.socket, count: int) -> bytes:
    # The deadline is that of all bytes together: a stranger cannot prolong it with one byte at a time.
    deadline, data = time.monotonic() + _SHAKE_SECONDS, b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part or time.monotonic() > deadline:
            raise ConnectionError("the other end closed the connection, or is too slow")
        data += part
    return data


def _network_stack() -> str:
    # Equal for two processes only if they share one loopback interface. Containers of a host do not.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _own_address(store: Any, *, alone: bool) -> str:
    for variable in _VARIABLES:
        wanted = os.environ.get(variable, "").split(",")[0].lstrip("=")
        if wanted and not wanted.startswith("^"):  # NCCL takes the start of a name
            names = [name for _, name in socket.if_nameindex() if name.startswith(wanted)]
            if names:
                return _address_of(min(names, key=len))
            raise UsageError(f"{variable}={wanted}: this host has no such network interface")
    if alone:
        return "127.0.0.1"
    host = host_of(store) or socket.gethostname()
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only chooses the interface
        own = probe.getsockname()[0]
    if own.startswith("127.") or own == "::1":
        raise UsageError(f"{host} is {own} here, which other hosts cannot reach; set {_VARIABLES[0]} to an interface")
    return own


def _address_of(interface: str) -> str:
    import fcntl  # noqa: PLC0415  (POSIX only)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
