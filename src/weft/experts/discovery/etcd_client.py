"""etcd's API over gRPC: the members of a cluster, and calls with failover between them.

    call ── member 1 ── no answer ──> member 2 ── answer        from now on member 2 goes first

Every call has a deadline, of which each member gets its share. All calls of a directory may be sent twice: a second
lease ends by itself, and a compare-and-swap has compared before. The messages are made from ``etcd.proto``.
"""

import time
from collections.abc import Sequence
from typing import Any, cast

import grpc

from weft.core.errors import listed
from weft.core.validation import Validator
from weft.experts.address import address_fault
from weft.experts.errors import AwayError
from weft.experts.fork_guard import ForkGuard, GrpcThreads, check_fork
from weft.experts.protobuf import load_messages
from weft.experts.tls import Certificates

_grpc = cast("Any", grpc)
_Code = _grpc.StatusCode
RpcError = _grpc.RpcError
_ELSEWHERE = {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.UNKNOWN, _Code.INTERNAL, _Code.CANCELLED}
_LEADER = (("hasleader", "true"),)  # a member that lost the others says so, instead of serving outdated reads
_OPTIONS = [
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 10_000),  # etcd allows one every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of any other ping, behind which the one for keepalive waits
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a watch may hear nothing for days, and must notice its end
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
]

MESSAGES = load_messages(__package__ or "", "etcd")
"""The classes of etcd's messages, by their names in its ``rpc.proto``."""

DELETE = 1  # type of an Event
MODIFIED, VALUE = 2, 3  # targets of a Compare, whose result is "equal" unless told otherwise


_SERVICES = {
    "Range": "KV",  # keys of a prefix, and their revision
    "Txn": "KV",  # compare and swap; puts and ranges of one moment
    "LeaseGrant": "Lease",
    "LeaseRevoke": "Lease",
    "LeaseKeepAlive": "Lease",
    "Watch": "Watch",  # changes from now on
}
_PATHS = {name: f"/etcdserverpb.{service}/{name}" for name, service in _SERVICES.items()}
_STREAMS = ("LeaseKeepAlive", "Watch")


class RefusedByEtcdError(AwayError):
    """etcd answered with a refusal. ``missing``: what the call named, such as a lease, does not exist (any more)."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class EtcdTls(Certificates):
    """Certificates for the way to etcd, as PEM bytes or paths; a key if etcd asks for it (``--client-cert-auth``)."""


class EtcdClient:
    """Calls of the members of a cluster, given as host:port. Thread-safe.

    Raises ``UsageError`` that lists invalid addresses, and an invalid timeout.
    """

    def __init__(self, addresses: Sequence[str], tls: EtcdTls | None, timeout: float) -> None:
        with Validator("invalid options of an etcd client") as check:
            check.that(bool(addresses), "there is no endpoint, wanted at least one host:port")
            for one in addresses:
                check.add(*address_fault("an endpoint", one))
            check.seconds("timeout", timeout)
        check_fork("the way to etcd")
        self.addresses, self.timeout = tuple(addresses), timeout
        self.fork_guard, self.grpc_threads = ForkGuard(), GrpcThreads()
        self._first = 0
        self._closed = False
        secure = {} if tls is None else {"credentials": tls.credentials()}
        options = _OPTIONS if tls is None else [*_OPTIONS, *tls.options()]
        channel = _grpc.secure_channel if secure else _grpc.insecure_channel
        self._channels = [channel(address, options=options, **secure) for address in addresses]

    def call(self, name: str, /, *, within: float = float("inf"), **fields: Any) -> Any:
        """The response to a request of these fields, in ``within`` seconds or `timeout`, whichever is less.

        Raises ``AwayError`` if no member answers, ``RefusedByEtcdError`` if one refuses.
        """
        request = MESSAGES[f"{name}Request"](**fields)
        timeout = min(within, self.timeout)
        end, faults = time.monotonic() + timeout, list[str]()
        for left, index in zip(range(len(self.addresses), 0, -1), self.order(), strict=True):
            seconds = (end - time.monotonic()) / left
            try:
                found = self._call_member(index, name, request, seconds)
                self._first = index
                return found
            except (RpcError, StopIteration, ValueError) as error:
                faults.append(self.fault(index, error))
        raise AwayError(listed(f"etcd does not answer {_PATHS[name]} within {timeout:g} s:", faults))

    def watch(self, index: int, requests: Any) -> Any:
        """A stream of watch responses from one member; iterate it, and ``cancel`` it."""
        return self.grpc_threads.stream(self._callable(index, "Watch"), requests, metadata=_LEADER)

    def order(self) -> list[int]:
        """The members, in the order in which to try them. ``AwayError`` after `close`, ``UsageError`` in a fork."""
        check_fork("the way to etcd")
        if self._closed:
            raise AwayError("the directory is closed")
        count, first = len(self.addresses), self._first
        return [(first + i) % count for i in range(count)]

    def fault(self, index: int, error: Any) -> str:
        """The error of a member in words. Raises ``RefusedByEtcdError`` if the others would refuse as well."""
        address = self.addresses[index]
        if self._closed:
            raise AwayError("the directory is closed") from None
        if not isinstance(error, RpcError):
            return f"{address}: the connection ended"
        code, text = error.code(), error.details()
        if code not in _ELSEWHERE:
            missing = code is _Code.NOT_FOUND
            raise RefusedByEtcdError(f"etcd at {address} answers {code.name}: {text}", missing=missing) from None
        return f"{address}: {code.name}: {text}"

    def close(self) -> None:
        """End all calls. Again is no error."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _call_member(self, index: int, name: str, request: Any, seconds: float) -> Any:
        call = self._callable(index, name)
        if name not in _STREAMS:
            return call(request, timeout=seconds, metadata=_LEADER)
        answers = self.grpc_threads.stream(call, iter([request]), timeout=seconds, metadata=_LEADER)
        try:
            return next(answers)
        finally:
            answers.cancel()

    def _callable(self, index: int, name: str) -> Any:
        channel, request, response = self._channels[index], MESSAGES[f"{name}Request"], MESSAGES[f"{name}Response"]
        make = channel.stream_stream if name in _STREAMS else channel.unary_unary
        return make(_PATHS[name], request.SerializeToString, response.FromString)
