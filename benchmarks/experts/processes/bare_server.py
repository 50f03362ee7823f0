"""Minimal gRPC server of one module: ``python bare_server.py '{"width": 512}'``.

    F rows -> outputs        T rows -> outputs, keeps the graph        B gradients -> input gradients, takes a step

Each caller has its own stream.

    one caller         event loop: read, run, write
    several callers    event loop: read ──> thread: all waiting calls of one kind as a batch ──> event loop: write

There are no checks, keys, deadlines or guards. A kept graph is used if the backward has the same callers. Otherwise the
forward is repeated.
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
    """State of a stream: its current request, and the rows of its next backward."""

    kind: bytes = FORWARD
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: Tensor = field(default_factory=lambda: torch.empty(0))


class Module:
    """The module with its optimizer and the kept graph."""

    def __init__(self, width: int) -> None:
        self._module = feed_forward(width)
        self._optimizer = torch.optim.Adam(self._module.parameters(), lr=1e-3, fused=True)
        self._kept: tuple[list[Caller], Tensor, Tensor] | None = None
        self._lock = threading.Lock()

    def work(self, batch: list[Caller]) -> Sequence[bytes]:
        """Run requests of one kind as a batch, and return their answers."""
        kind = batch[0].kind
        with self._lock:
            values = _joined([caller.value for caller in batch])
            if kind == FORWARD:
                with torch.no_grad():
                    results = self._module(values)
            elif kind == TRACKED:
                for caller in batch:
                    caller.rows = caller.value
                results = self._tracked(batch, values).detach()
            else:
                results = self._backward(batch, values)
        return [message(kind, part) for part in results.split([len(caller.value) for caller in batch])]

    def _tracked(self, batch: list[Caller], rows: Tensor) -> Tensor:
        leaf = rows.detach().requires_grad_()
        outputs: Tensor = self._module(leaf)
        self._kept = batch, leaf, outputs
        return outputs

    def _backward(self, batch: list[Caller], gradients: Tensor) -> Tensor:
        if self._kept is None or self._kept[0] != batch:
            self._tracked(batch, _joined([caller.rows for caller in batch]))
        assert self._kept is not None
        (_, leaf, outputs), self._kept = self._kept, None
        self._optimizer.zero_grad()
        outputs.backward(gradients)
        self._optimizer.step()
        assert leaf.grad is not None
        return leaf.grad


class Streams:
    """Streams of all callers, and the thread that runs batches if there are several."""

    def __init__(self, width: int) -> None:
        self._width, self._module = width, Module(width)
        self._waiting: SimpleQueue[tuple[Caller, asyncio.Future[bytes]]] = SimpleQueue()
        self._connected = 0
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    async def serve(self, _: Any, context: Any) -> None:
        """Serve one stream until it ends."""
        caller, read, write = Caller(), context.read, context.write
        self._connected += 1
        try:
            await self._answer(caller, read, write)
        finally:
            self._connected -= 1

    async def _answer(self, caller: Caller, read: Callable[[], Any], write: Callable[[bytes], Awaitable[None]]) -> None:
        while (request := await read()) is not _aio.EOF:
            caller.kind, caller.value = request[:1], tensor(request, self._width)
            if self._connected == 1:
                (answer,) = self._module.work([caller])
            else:
                future: asyncio.Future[bytes] = self._loop.create_future()
                self._waiting.put((caller, future))
                answer = await future
            await write(answer)

    def _run(self) -> None:
        postponed: list[tuple[Caller, asyncio.Future[bytes]]] = []
        while True:
            requests = [*(postponed or [self._waiting.get()]), *_drain(self._waiting)]
            kind = requests[0][0].kind
            batch = [request for request in requests if request[0].kind == kind]
            postponed = [request for request in requests if request[0].kind != kind]
            answers = self._module.work([caller for caller, _ in batch])
            self._loop.call_soon_threadsafe(_set_results, [future for _, future in batch], answers)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _drain(queue: "SimpleQueue[Any]") -> list[Any]:
    entries: list[Any] = []
    try:
        while True:
            entries.append(queue.get_nowait())
    except Empty:
        return entries


def _set_results(futures: Sequence["asyncio.Future[bytes]"], answers: Sequence[bytes]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)


async def serve(width: int) -> None:
    """Serve until standard input ends."""
    server: Any = _aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(Streams(width).serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, answer_until_the_end, {"port": port}, lambda _: {})
    await server.stop(None)


def main() -> None:
    keep_freed_memory()  # like torchweft_server, so that both are comparable
    use_large_pages()
    take_stdout_aside()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    asyncio.run(serve(json.loads(sys.argv[1])["width"]))


if __name__ == "__main__":
    main()
