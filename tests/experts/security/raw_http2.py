"""A raw HTTP/2 client: any frame in any order, for servers that must survive what no gRPC library would send."""

import socket
import ssl
from collections.abc import Sequence
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import h2.settings

PATIENCE = 10.0  # seconds that any answer may take

Metadata = Sequence[tuple[str, str]]


class RawHttp2:
    """One connection, whose waits end after `PATIENCE` seconds with ``TimeoutError``. ``window``: of flow control for
    what the server sends, in bytes; with 0 no message of it ever leaves.
    """

    def __init__(self, address: str, *, window: int = 65_535, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket: socket.socket = socket.create_connection((host.strip("[]"), int(port)), PATIENCE)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.events: list[Any] = []  # all that came, oldest first
        self._authority, self._scheme = address, "http" if tls is None else "https"
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.flush()

    def open(self, path: str, *, metadata: Metadata = (), end: bool = False) -> int:
        """Send the headers of a call, such as of ``/grpc.health.v1.Health/Watch``; the number of its stream."""
        stream: int = self._h2.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":scheme", self._scheme), (":path", path), (":authority", self._authority)]
        headers = [*pseudo, ("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        self._h2.send_headers(stream, headers, end_stream=end)
        self.flush()
        return stream

    def call(self, path: str, message: bytes = b"", *, metadata: Metadata = ()) -> int:
        """A call of one message, whole and ended; the number of its stream."""
        stream = self.open(path, metadata=metadata)
        self.send(stream, framed(message), end=True)
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send data as it is, in as many frames as the server's flow control wants; it may be half a message."""
        while data:
            while not (room := min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)):
                self.receive()
            self._h2.send_data(stream, data[:room])
            data = data[room:]
            self.flush()
        if end:
            self._h2.end_stream(stream)
            self.flush()

    def receive(self) -> None:
        """Wait for something, and put it into `events`. Raises ``ConnectionError`` if the server has hung up."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server has hung up")
        self.events += self._h2.receive_data(data)
        self.flush()

    def wait(self, kind: type[Any], stream: int | None = None) -> Any:
        """The first event of this kind, of ``h2.events``, and of this stream, if one is given."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and stream in (None, event.stream_id):
                    return event
            self.receive()

    def answered(self, stream: int) -> dict[str, str]:
        """Wait for the first headers of an answer, which flow control never holds back."""
        return dict(self.wait(h2.events.ResponseReceived, stream).headers)

    def status(self, stream: int) -> int:
        """Wait for the end of a call; its ``grpc-status``, or -1 if the server has reset it without one."""
        while True:
            for event in self.events:
                if getattr(event, "stream_id", None) != stream:
                    continue
                if isinstance(event, h2.events.StreamReset):
                    return -1
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    found = dict[Any, Any](event.headers).get("grpc-status")
                    if found is not None:
                        return int(found)
            self.receive()

    def ping(self) -> None:
        """Return when the server has read all that was sent before."""
        before = sum(isinstance(event, h2.events.PingAckReceived) for event in self.events)
        self._h2.ping(b"are here")
        self.flush()
        while sum(isinstance(event, h2.events.PingAckReceived) for event in self.events) == before:
            self.receive()

    def flush(self) -> None:
        """Send what the protocol has to say: done by all methods that send or receive."""
        self.socket.sendall(self._h2.data_to_send())

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def framed(message: bytes, length: int | None = None) -> bytes:
    """A message as gRPC frames it, or one that claims to have another length than it has."""
    return b"\0" + (len(message) if length is None else length).to_bytes(4, "big") + message
