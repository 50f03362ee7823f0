"""Callers: threads that call an expert again and again, and how many calls a second they get answered.

    caller 1   |--call--|--call--|--call--|        3 calls in its own time
    caller 2   |----call----|----call----|         2 calls in its own time
               begin                 ^ the time is up: nobody begins another
                                                   the sum of both rates is the result

Each divides by its own time, up to its last answer; so neither a long call nor the last ones bias the sum.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Call = Callable[[], object]
Layer = Callable[[Tensor], Tensor]


def rate(calls: Sequence[Call], seconds: float) -> float:
    """Calls per second of all callers together, after one call of each that does not count. Raises what one raises."""
    begin, found, faults = threading.Barrier(len(calls)), [0.0] * len(calls), list[BaseException]()

    def work(number: int) -> None:
        try:
            calls[number]()
            begin.wait(60)
            found[number] = _rate(calls[number], seconds)
        except BaseException as fault:
            faults.append(fault)
            begin.abort()

    if len(calls) == 1:
        calls[0]()
        return _rate(calls[0], seconds)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if faults:
        raise faults[0]
    return sum(found)


def forward_call(layer: Layer, rows: int, width: int) -> Call:
    """Only forward."""
    x = torch.randn(rows, width)

    def call() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return call


def training_call(layer: Layer, rows: int, width: int, step: Callable[[], None] | None = None) -> Call:
    """Forward and backward, to the inputs too, and a step; without ``step`` somebody else takes it."""
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
