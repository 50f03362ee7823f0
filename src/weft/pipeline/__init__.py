"""Across devices: a model in stages, micro-batches in a pipeline, skip connections of any length.

pipe, config        Pipe and its arguments            schedule     what runs when
engine, autotune    which way a step runs             executor     one thread, or one per stage
step, microbatch    one mini-batch's way through      routing      where values and gradients go
stage, plan         layers, skips and their wiring    recompute    what a second forward must find
partition           which layers to which stage       simulate     time and memory before running
weights             storage, seeds, files             gradients    clipping over all stages
skip/               layers that stash and pop         split/       models that are no nn.Sequential
"""

from weft.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from weft.pipeline.partition import balance_by_parameters, balance_by_size, balance_by_time
from weft.pipeline.pipe import Pipe
from weft.pipeline.schedule import (
    SCHEDULES,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from weft.pipeline.simulate import Costs, Forecast, MemoryRecorder, costs_from

__all__ = [
    "SCHEDULES",
    "Costs",
    "DeferredBatchNorm",
    "Forecast",
    "MemoryRecorder",
    "Pipe",
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "convert_deferred_batch_norm",
    "costs_from",
    "dualpipev",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "zbv",
    "zero_bubble",
]  # fmt: skip
