"""Calls of an etcd cluster: to the member that answered last, and to the next one if that does not.

    call ── member 1 ── no answer ──> member 2 ── answer        from now on member 2 goes first

Every call has a deadline, of which each member gets its share. All calls of a directory may be sent twice: a second
lease ends by itself, and whoever swaps has compared before.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import grpc

from weft.core.errors import UsageError, listed
from weft.experts.address import address_fault
from weft.experts.checks import seconds_fault
from weft.experts.directory.etcd_messages import LEASE_KEEP_ALIVE, WATCH, Method
from weft.experts.errors import AwayError
from weft.experts.fork_guard import ForkGuard, GrpcThreads, check_fork
from weft.experts.tls import Certificates

_grpc = cast("Any", grpc)
_Code = _grpc.StatusCode
_ELSEWHERE = {_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.UNKNOWN, _Code.INTERNAL, _Code.CANCELLED}
_LEADER = (("hasleader", "true"),)  # a member that lost the others says so, instead of telling old news
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


class RefusedByEtcdError(AwayError):
    """etcd answered, and did not do it. ``missing``: what was named, such as a lease, is not there (any more)."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class EtcdTls(Certificates):
    """Certificates for the way to etcd, as PEM bytes or paths; a key if etcd asks for it (``--client-cert-auth``)."""


class Endpoints:
    """The members of a cluster, as host:port. Thread-safe.

    Raises ``UsageError`` that lists addresses that are none, and a timeout that nobody can wait for.
    """

    def __init__(self, addresses: Sequence[str], tls: EtcdTls | None, timeout: float) -> None:
        faults = [] if addresses else ["there is no endpoint, wanted at least one host:port"]
        faults += [fault for one in addresses for fault in address_fault("an endpoint", one)]
        faults += seconds_fault("timeout", timeout)
        if faults:
            raise UsageError(listed("etcd cannot be reached like this:", faults))
        self.addresses, self.timeout = tuple(addresses), timeout
        self.fork_guard, self._lock = ForkGuard(), threading.Lock()
        self._first, self.grpc_threads = 0, GrpcThreads()
        self._closed = False
        check_fork("the way to etcd")
        self._channels = [_channel(address, tls) for address in addresses]

    def call(self, method: Method, request: Any, most: float = float("inf")) -> Any:
        """The response, within ``most`` seconds or `timeout`, whichever is less.

        Raises ``AwayError`` if no member answers, ``RefusedByEtcdError`` if one refuses.
        """
        timeout = min(most, self.timeout)
        end, faults = time.monotonic() + timeout, list[str]()
        for left, index in zip(range(len(self.addresses), 0, -1), self.order(), strict=True):
            seconds = (end - time.monotonic()) / left
            try:
                found = self._sent(index, method, request, seconds)
            except (_grpc.RpcError, StopIteration, ValueError) as error:
                faults.append(self.fault(index, error))
                continue
            self._first = index
            return found
        raise AwayError(listed(f"etcd does not answer {method.path} within {timeout:g} s:", faults))

    def watch(self, index: int, requests: Any) -> Any:
        """A stream of watch responses from one member; iterate it, and ``cancel`` it."""
        return self.grpc_threads.stream(self._method(index, WATCH, stream=True), requests, metadata=_LEADER)

    def order(self) -> list[int]:
        """The members, in the order in which to try them. ``AwayError`` after `close`, ``UsageError`` in a fork."""
        check_fork("the way to etcd")
        with self._lock:
            if self._closed:
                raise AwayError("the directory is closed")
            count, first = len(self.addresses), self._first
        return [(first + i) % count for i in range(count)]

    def fault(self, index: int, error: Any) -> str:
        """What went wrong with a member, in words. Raises ``RefusedByEtcdError`` if the others would say the same."""
        address = self.addresses[index]
        if self._closed:
            raise AwayError("the directory is closed") from None
        if not isinstance(error, _grpc.RpcError):
            return f"{address}: the connection ended"
        code, text = error.code(), error.details()
        if code not in _ELSEWHERE:
            missing = code is _Code.NOT_FOUND
            raise RefusedByEtcdError(f"etcd at {address} answers {code.name}: {text}", missing=missing) from None
        return f"{address}: {code.name}: {text}"

    def close(self) -> None:
        """End all calls. Again is no error."""
        with self._lock:
            self._closed = True
        for channel in self._channels:
            channel.close()

    def _sent(self, index: int, method: Method, request: Any, seconds: float) -> Any:
        stream = method is LEASE_KEEP_ALIVE
        call = self._method(index, method, stream=stream)
        if not stream:
            return call(request, timeout=seconds, metadata=_LEADER)
        answers = self.grpc_threads.stream(call, iter([request]), timeout=seconds, metadata=_LEADER)
        try:
            return next(answers)
        finally:
            answers.cancel()

    def _method(self, index: int, method: Method, *, stream: bool) -> Any:
        channel = self._channels[index]
        kind = channel.stream_stream if stream else channel.unary_unary
        made = {
            "request_serializer": method.request.SerializeToString,
            "response_deserializer": method.response.FromString,
        }
        return kind(method.path, **made)


def _channel(address: str, tls: EtcdTls | None) -> Any:
    if tls is None:
        return _grpc.insecure_channel(address, options=_OPTIONS)
    return _grpc.secure_channel(address, tls.credentials(), options=[*_OPTIONS, *tls.options()])
