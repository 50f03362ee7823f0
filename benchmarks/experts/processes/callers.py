"""Concurrent callers of an expert, and their total rate of calls.

    caller 1   |--call--|--call--|--call--|        3 calls in its own time
    caller 2   |----call----|----call----|         2 calls in its own time
               begin                 ^ time limit: no caller starts another call
                                                   the result is the sum of both rates

Each caller divides by its own time, up to its last answer. Calls that end after the limit therefore do not bias the
sum.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Call = Callable[[], object]
Layer = Callable[[Tensor], Tensor]


def rate(calls: Sequence[Call], seconds: float) -> float:
    """Total calls per second, after one warm-up call of each caller. Re-raises the first exception of a caller."""
    begin, rates, faults = threading.Barrier(len(calls)), [0.0] * len(calls), list[BaseException]()

    def work(number: int) -> None:
        try:
            calls[number]()
            begin.wait(60)
            rates[number] = _rate(calls[number], seconds)
        except BaseException as fault:
            faults.append(fault)
            begin.abort()

    if len(calls) == 1:
        calls[0]()
        return _rate(calls[0], seconds)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return sum(rates)


def forward_call(layer: Layer, rows: int, width: int) -> Call:
    """Forward without gradients."""
    x = torch.randn(rows, width)

    def call() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return call


def training_call(layer: Layer, rows: int, width: int, step: Callable[[], None] | None = None) -> Call:
    """Forward, backward to weights and inputs, and ``step``. A server takes its optimizer step by itself."""
    x, seed = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)

    def call() -> None:
        x.grad = None
        layer(x).backward(seed)
        if step is not None:
            step()

    return call


def _rate(call: Call, seconds: float) -> float:
    count, begun = 0, time.perf_counter()
    now, end = begun, begun + seconds
    while now < end:
        call()
        count += 1
        now = time.perf_counter()
    return count / (now - begun)
