"""The least that a server over gRPC does, with one module: ``python bare_server.py '{"width": 512}'``.

    F rows -> outputs        T rows -> outputs, and the graph stays        B gradients -> those of the rows, and a step

Each caller has a stream.

    one caller       loop: read, work, write
    more of them     loop: read ──> thread: all that wait with the same wish, as one batch ──> loop: write

No checks, keys, deadlines or guards. A graph serves the backward of exactly those who made it; else the forward runs
again.
"""

import asyncio
import json
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import grpc
import torch
from bare_words import FORWARD, METHOD, OPTIONS, SERVICE, TRACKED, message, tensor
from module import feed_forward
from torch import Tensor
from words import answer_until_the_end, take_stdout_aside

from torchweft.experts.server import keep_freed_memory, use_large_pages

_aio: Any = grpc.aio


@dataclass(eq=False)
class Caller:
    """One stream: what it wants now, and the rows that its next backward is for."""

    kind: bytes = FORWARD
    given: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: Tensor = field(default_factory=lambda: torch.empty(0))


class Module:
    """One module with its optimizer."""

    def __init__(self, width: int) -> None:
        self._module = feed_forward(width)
        self._optimizer = torch.optim.Adam(self._module.parameters(), lr=1e-3, fused=True)
        self._kept: tuple[list[Caller], Tensor, Tensor] | None = None
        self._lock = threading.Lock()

    def work(self, batch: list[Caller]) -> Sequence[bytes]:
        """The answer to each of them, all of one kind."""
        kind = batch[0].kind
        with self._lock:
            given = _joined([each.given for each in batch])
            if kind == FORWARD:
                with torch.no_grad():
                    found = self._module(given)
            elif kind == TRACKED:
                for each in batch:
                    each.rows = each.given
                found = self._tracked(batch, given).detach()
            else:
                found = self._backward(batch, given)
        return [message(kind, part) for part in found.split([len(each.given) for each in batch])]

    def _tracked(self, batch: list[Caller], rows: Tensor) -> Tensor:
        leaf = rows.detach().requires_grad_()
        outputs: Tensor = self._module(leaf)
        self._kept = batch, leaf, outputs
        return outputs

    def _backward(self, batch: list[Caller], gradients: Tensor) -> Tensor:
        if self._kept is None or self._kept[0] != batch:
            self._tracked(batch, _joined([each.rows for each in batch]))
        assert self._kept is not None
        (_, leaf, outputs), self._kept = self._kept, None
        self._optimizer.zero_grad()
        outputs.backward(gradients)
        self._optimizer.step()
        assert leaf.grad is not None
        return leaf.grad


class Streams:
    """The callers, and the thread that works for them if there are several."""

    def __init__(self, width: int) -> None:
        self._width, self._module = width, Module(width)
        self._waiting: SimpleQueue[tuple[Caller, asyncio.Future[bytes]]] = SimpleQueue()
        self._connected = 0
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    async def serve(self, _: Any, context: Any) -> None:
        """One of them, until it ends."""
        caller, read, write = Caller(), context.read, context.write
        self._connected += 1
        try:
            await self._served(caller, read, write)
        finally:
            self._connected -= 1

    async def _served(self, caller: Caller, read: Callable[[], Any], write: Callable[[bytes], Awaitable[None]]) -> None:
        while (asked := await read()) is not _aio.EOF:
            caller.kind, caller.given = asked[:1], tensor(asked, self._width)
            if self._connected == 1:
                (answer,) = self._module.work([caller])
            else:
                future: asyncio.Future[bytes] = self._loop.create_future()
                self._waiting.put((caller, future))
                answer = await future
            await write(answer)

    def _run(self) -> None:
        later: list[tuple[Caller, asyncio.Future[bytes]]] = []
        while True:
            found = [*(later or [self._waiting.get()]), *_all(self._waiting)]
            kind = found[0][0].kind
            batch = [each for each in found if each[0].kind == kind]
            later = [each for each in found if each[0].kind != kind]
            answers = self._module.work([caller for caller, _ in batch])
            self._loop.call_soon_threadsafe(_told, [future for _, future in batch], answers)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _all(queue: "SimpleQueue[Any]") -> list[Any]:
    found: list[Any] = []
    try:
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found


def _told(futures: Sequence["asyncio.Future[bytes]"], answers: Sequence[bytes]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)


async def serving(width: int) -> None:
    """Until standard input ends."""
    server: Any = _aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(Streams(width).serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, answer_until_the_end, {"port": port}, lambda _: {})
    await server.stop(None)


def main() -> None:
    """Serve until standard input ends."""
    keep_freed_memory()  # as the server does that it is compared with
    use_large_pages()
    take_stdout_aside()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    asyncio.run(serving(json.loads(sys.argv[1])["width"]))


if __name__ == "__main__":
    main()
