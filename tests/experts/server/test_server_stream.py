"""One stream's answers: in one frame where they wait together, from any thread, each once."""

import asyncio
import threading

from tests.experts.expert_cases import rows
from weft.experts.server import Caller, RequestDispatcher, ServerOptions
from weft.experts.server.server_stream import ByteBudget, ServerStream
from weft.experts.wire import Call, Header, Kind, LimitError, Limits, decode, encode, read_fault

WIDE = Limits(frame_bytes=64 << 20, decoded_bytes=64 << 20)


def ping(number: int) -> Call:
    return Call(Header(kind=Kind.PING, call_id=number))


def result(number: int, count: int = 1) -> Call:
    return Call(Header(kind=Kind.RESULT, call_id=number), [rows(count, 0)])


async def written(connection: ServerStream) -> list[list[int]]:
    """The numbers of the calls in every frame, up to the end."""
    found: list[list[int]] = []

    async def send(message: bytes) -> None:
        found.append([answer.header.call_id for answer in decode(message, WIDE)])

    connection.finish()
    await asyncio.wait_for(connection.write(send), 10)
    return found


def connection(limits: Limits | None = None) -> ServerStream:
    return ServerStream(
        Caller("", "test"), RequestDispatcher(), ServerOptions(limits=limits or Limits()), ByteBudget(1 << 30)
    )


def test_what_waits_together_leaves_together() -> None:
    async def run() -> list[list[int]]:
        one = connection()
        for number in range(1, 6):
            one.answer(result(number))
        return await written(one)

    assert asyncio.run(run()) == [[1, 2, 3, 4, 5]]


def test_frames_keep_to_the_limits() -> None:
    async def run() -> list[list[int]]:
        one = connection(Limits(calls=2))
        for number in range(1, 6):
            one.answer(result(number))
        for number in range(6, 9):
            one.answer(result(number, 2_500))  # 80 kB: two of them are more than a frame should be
        return await written(one)

    assert asyncio.run(run()) == [[1, 2], [3, 4], [5, 6], [7], [8]]


def test_an_answer_that_cannot_be_sent_becomes_its_own_error() -> None:
    async def run() -> list[tuple[int, bool]]:
        one, found = connection(Limits(frame_bytes=4000)), list[tuple[int, bool]]()
        for number, count in ((1, 2), (2, 1000), (3, 2)):
            one.answer(result(number, count))

        async def send(message: bytes) -> None:
            for answer in decode(message, WIDE):
                bad = answer.header.kind is Kind.ERROR
                assert not bad or isinstance(read_fault(answer.header.data), LimitError)
                found.append((answer.header.call_id, bad))

        one.finish()
        await one.write(send)
        return found

    assert asyncio.run(run()) == [(1, False), (2, True), (3, False)]


def test_answers_of_many_threads_all_arrive_once() -> None:
    async def run() -> tuple[list[int], int, int]:
        one, found = connection(), list[int]()

        async def send(message: bytes) -> None:
            found.extend(answer.header.call_id for answer in decode(message, WIDE))
            await asyncio.sleep(0)

        writer = asyncio.create_task(one.write(send))

        def work(start: int) -> None:
            for number in range(start, start + 50):
                one.answer(ping(number))

        threads = [threading.Thread(target=work, args=(start,)) for start in range(1, 401, 50)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        one.finish()
        await asyncio.wait_for(writer, 10)
        return sorted(found), one.calls, one.nbytes

    assert asyncio.run(run()) == (list(range(1, 401)), 0, 0)


def test_a_call_is_under_way_until_its_answer_has_left() -> None:
    async def run() -> list[tuple[int, bool]]:
        one = ServerStream(
            Caller("", "test"), RequestDispatcher(), ServerOptions(connection_calls=2), ByteBudget(1 << 30)
        )
        (question,) = decode(encode([ping(7)]))
        seen = list[tuple[int, bool]]()
        for _ in range(2):
            one.take(question)
        waiting = asyncio.create_task(one.has_room())
        await asyncio.sleep(0.01)
        seen.append((one.calls, waiting.done()))
        await written(one)
        await asyncio.wait_for(waiting, 10)
        seen.append((one.calls, waiting.done()))
        return seen

    assert asyncio.run(run()) == [(2, False), (0, True)]
