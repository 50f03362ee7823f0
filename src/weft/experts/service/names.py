"""The gRPC service by which experts are reached: its methods, its metadata, and the options of both ends.

    /weft.Experts/Stream    stream of messages <-> stream of frames   calls and their answers, in any order
    /weft.Experts/Info      one frame of INFO calls -> one frame      what a client must know of experts
    /weft.Experts/Status    nothing -> JSON                           what the server says of itself
    /weft.Experts/State     stream of frames <-> stream of frames     states of experts, for servers that follow

Messages are the frames of `weft.experts.wire`, not protobuf: a serializer of the identity, on both ends. What a client
sends is cut: a frame of more than `MESSAGE_BYTES` goes as messages of just so many and one with the rest. gRPC holds a
message before anybody has seen a byte of it; so the server gives it no more than that, and counts what follows.
"""

from collections.abc import Iterator

from weft.experts.wire.limits import Limits

SERVICE = "weft.Experts"
STREAM = f"/{SERVICE}/Stream"
INFO = f"/{SERVICE}/Info"
STATUS = f"/{SERVICE}/Status"
STATE = f"/{SERVICE}/State"

FRAME_BYTES = "weft-frame-bytes"
"""Metadata that opens a stream: the largest frame that the server takes. When it is there, the server listens."""
AUTHORIZATION = "authorization"
"""Metadata of a client: ``Bearer TOKEN``."""
BEARER = "Bearer "
TRACEPARENT = "traceparent"
"""Metadata of a client's stream, as W3C's Trace Context has it: the trace that its calls belong to."""

COALESCED = 1 << 17
"""Calls share a frame up to about so many bytes: beyond that, waiting for the neighbours costs more than a frame. Of
a mixture's calls the first can then be worked on while the others still travel."""

MESSAGE_BYTES = 512 << 10
"""The largest message that a server takes, which is a frame or a part of one."""

Options = list[tuple[str, int | str]]

_ROOM = 1 << 16  # gRPC's own framing is no concern of our limits


def common_options(limits: Limits) -> Options:
    """What both ends set: the size of messages, which gRPC checks before it allocates."""
    size = limits.frame_bytes + _ROOM
    return [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]


def messages(frame: bytes) -> Iterator[bytes]:
    """What a client sends for one frame."""
    if len(frame) <= MESSAGE_BYTES:
        yield frame
        return
    for start in range(0, len(frame), MESSAGE_BYTES):
        yield frame[start : start + MESSAGE_BYTES]


def client_options(limits: Limits) -> Options:
    """A connection of its own, that comes back soon after a restart and notices a peer that fell silent.

    A connection that swallows everything is given up 20 s after the last that came over it, which is sooner than a
    call's usual 30 s. gRPC asks nothing while another ping of its own is under way, hence a time for that as well; and
    by itself it asks a quiet peer twice at most.
    """
    return [
        *common_options(limits),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),  # a server that is back is found within 0.3 s
        ("grpc.min_reconnect_backoff_ms", 5_000),  # what one attempt may take: slow networks need several round trips
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(limits: Limits, connections: int, metadata_bytes: int = 16 << 10) -> Options:
    """The port belongs to one process; messages and metadata are capped; clients may ask for life.

    Silent peers are dropped: one that does not finish its handshake, one that opens no stream, and one that answers no
    ping. ``connections``: TCP connections at a time; gRPC hangs up on one more.
    """
    return [
        ("grpc.max_receive_message_length", min(MESSAGE_BYTES, limits.frame_bytes) + _ROOM),
        ("grpc.max_send_message_length", limits.frame_bytes + _ROOM),
        ("grpc.max_concurrent_streams", 128),  # of one connection
        ("grpc.http2.bdp_probe", 0),  # else the window of a stream that nobody reads grows to several MB
        ("grpc.http2.lookahead_bytes", MESSAGE_BYTES),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", 5_000),  # of TLS, and of HTTP/2's first words
        ("grpc.max_connection_idle_ms", 10_000),  # without a stream
        ("grpc.so_reuseport", 0),
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
