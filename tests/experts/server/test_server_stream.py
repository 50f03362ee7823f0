"""Answers of one stream: waiting answers share a frame, every thread can send, and each answer is sent once."""

import asyncio

import pytest

from tests.experts.concurrency import in_threads
from tests.experts.expert_cases import rows
from torchweft.experts.errors import LimitError
from torchweft.experts.server import Caller, RequestDispatcher, ServerOptions
from torchweft.experts.server.server_stream import ByteBudget, ServerStream
from torchweft.experts.wire import Call, Header, Kind, Limits, decode, encode, read_fault

WIDE = Limits(frame_bytes=64 << 20, decoded_bytes=64 << 20)


def ping(number: int) -> Call:
    return Call(Header(kind=Kind.PING, call_id=number))


def result(number: int, count: int = 1) -> Call:
    return Call(Header(kind=Kind.RESULT, call_id=number), [rows(count, 0)])


async def read_to_the_end(connection: ServerStream) -> list[list[int]]:
    """Call numbers in every frame until the end of the stream. Those of errors are negative."""
    frames: list[list[int]] = []

    async def send(message: bytes) -> None:
        frame = decode(message, WIDE)
        faults = [read_fault(answer.header.data) for answer in frame if answer.header.kind is Kind.ERROR]
        assert all(isinstance(fault, LimitError) for fault in faults)
        frames.append([answer.header.call_id * (-1 if answer.header.kind is Kind.ERROR else 1) for answer in frame])

    connection.finish()
    await asyncio.wait_for(connection.write_answers(send), 60)
    return frames


def connection(limits: Limits | None = None, **more: int) -> ServerStream:
    options = ServerOptions(limits=limits or Limits(), **more)
    return ServerStream(Caller("", "test"), RequestDispatcher(), options, ByteBudget(1 << 30))


@pytest.mark.parametrize(
    ("limits", "rows_of_answers", "frames"),
    [
        (Limits(), [1] * 5, [[1, 2, 3, 4, 5]]),
        (Limits(calls=2), [1] * 5 + [2_500] * 3, [[1, 2], [3, 4], [5, 6], [7], [8]]),  # 80 kB: two are too much
        (Limits(frame_bytes=4000), [2, 1000, 2], [[1], [-2], [3]]),  # what cannot be sent becomes its own error
    ],
)
def test_waiting_answers_share_frames_within_the_limits(
    limits: Limits, rows_of_answers: list[int], frames: list[list[int]]
) -> None:
    async def run() -> list[list[int]]:
        one = connection(limits)
        for number, count in enumerate(rows_of_answers, 1):
            one.send(result(number, count))
        return await read_to_the_end(one)

    assert asyncio.run(run()) == frames


def test_answers_of_many_threads_all_arrive_once() -> None:
    async def run() -> tuple[list[int], int, int]:
        one, numbers = connection(), list[int]()

        async def send(message: bytes) -> None:
            numbers.extend(answer.header.call_id for answer in decode(message, WIDE))
            await asyncio.sleep(0)

        writer = asyncio.create_task(one.write_answers(send))

        def work(start: int) -> None:
            for number in range(start, start + 50):
                one.send(ping(number))

        await asyncio.to_thread(in_threads, work, range(1, 401, 50))
        one.finish()
        await asyncio.wait_for(writer, 10)
        return sorted(numbers), one.calls, one.nbytes

    assert asyncio.run(run()) == (list(range(1, 401)), 0, 0)


def test_call_counts_until_its_answer_is_written() -> None:
    async def run() -> list[tuple[int, bool]]:
        one = connection(connection_calls=2)
        (question,) = decode(encode([ping(7)]))
        seen = list[tuple[int, bool]]()
        for _ in range(2):
            one.dispatch_call(question)
        waiting = asyncio.create_task(one.wait_for_room())
        await asyncio.sleep(0.01)
        seen.append((one.calls, waiting.done()))
        await read_to_the_end(one)
        await asyncio.wait_for(waiting, 10)
        seen.append((one.calls, waiting.done()))
        return seen

    assert asyncio.run(run()) == [(2, False), (0, True)]
