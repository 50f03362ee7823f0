"""Raw HTTP/2 client that can send any frame in any order, also sequences that no gRPC library sends."""

import socket
import ssl
from collections.abc import Sequence
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import h2.settings

PATIENCE = 10.0  # timeout of each wait in seconds

Metadata = Sequence[tuple[str, str]]


class RawHttp2:
    """One connection. Waits raise ``TimeoutError`` after `PATIENCE` seconds. ``window``: flow-control window for the
    messages of the server, in bytes. With 0 the server can send no message.
    """

    def __init__(self, address: str, *, window: int = 65_535, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket: socket.socket = socket.create_connection((host.strip("[]"), int(port)), PATIENCE)
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.events: list[Any] = []  # all received events, oldest first
        self._authority, self._scheme = address, "http" if tls is None else "https"
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.flush()

    def open(self, path: str, *, metadata: Metadata = (), end: bool = False) -> int:
        """Send the headers of a call, e.g. ``/grpc.health.v1.Health/Watch``. Returns the number of its stream."""
        stream: int = self._h2.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":scheme", self._scheme), (":path", path), (":authority", self._authority)]
        headers = [*pseudo, ("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        self._h2.send_headers(stream, headers, end_stream=end)
        self.flush()
        return stream

    def call(self, path: str, message: bytes = b"", *, metadata: Metadata = ()) -> int:
        """Send a complete call of one message. Returns the number of its stream."""
        stream = self.open(path, metadata=metadata)
        self.send(stream, framed(message), end=True)
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send raw data, e.g. half a message, in as many frames as the server's flow control requires."""
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
        """Wait for data and append its events to `events`. Raises ``ConnectionError`` if the server has hung up."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server has hung up")
        self.events += self._h2.receive_data(data)
        self.flush()

    def wait(self, kind: type[Any], stream: int | None = None) -> Any:
        """Wait for the first event of this class of ``h2.events``, and of this stream if one is given."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and stream in (None, event.stream_id):
                    return event
            self.receive()

    def answered(self, stream: int) -> dict[str, str]:
        """Wait for the first headers of an answer. Flow control does not apply to headers."""
        return dict(self.wait(h2.events.ResponseReceived, stream).headers)

    def status(self, stream: int) -> int:
        """Wait for the end of a call. Returns its ``grpc-status``, or -1 if the server has reset it without one."""
        while True:
            for event in self.events:
                if getattr(event, "stream_id", None) != stream:
                    continue
                if isinstance(event, h2.events.StreamReset):
                    return -1
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    status = dict[Any, Any](event.headers).get("grpc-status")
                    if status is not None:
                        return int(status)
            self.receive()

    def ping(self) -> None:
        """Wait until the server has read everything sent before."""
        before = sum(isinstance(event, h2.events.PingAckReceived) for event in self.events)
        self._h2.ping(b"are here")
        self.flush()
        while sum(isinstance(event, h2.events.PingAckReceived) for event in self.events) == before:
            self.receive()

    def flush(self) -> None:
        """Send the pending bytes of the protocol. All methods that send or receive call this."""
        self.socket.sendall(self._h2.data_to_send())

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def framed(message: bytes, length: int | None = None) -> bytes:
    """Frame a message as gRPC does. ``length``: a false length for its header."""
    return b"\0" + (len(message) if length is None else length).to_bytes(4, "big") + message
