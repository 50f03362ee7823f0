"""Across devices: a model in stages, micro-batches in a pipeline, skip connections of any length.

pipe, config             Pipe and its arguments            schedule     the order of actions
pipe_runtime, autotune   the route of a step               executor     one thread, or one per stage
step, microbatch         one mini-batch                    routing      addresses of values and gradients
stage, pipeline_plan     layers, skips and their wiring    recompute    the state that a second forward needs
partition                balance of layers over stages     simulate     time and memory before running
weights                  storage, seeds, files             gradients    clipping over all stages
skip/                    layers that stash and pop         split/       models other than nn.Sequential
processes/               stages in several processes
"""

from torchweft.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from torchweft.pipeline.partition import balance_by_parameters, balance_by_size, balance_by_time
from torchweft.pipeline.pipe import Pipe
from torchweft.pipeline.schedule import (
    SCHEDULES,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from torchweft.pipeline.simulate import Costs, Forecast, MemoryRecorder, costs_from

__all__ = [
    "SCHEDULES", "Costs", "DeferredBatchNorm", "Forecast", "MemoryRecorder", "Pipe", "balance_by_parameters",
    "balance_by_size", "balance_by_time", "convert_deferred_batch_norm", "costs_from", "dualpipev", "gpipe",
    "interleaved", "looped_bfs", "one_f_one_b", "zbv", "zero_bubble",
]  # fmt: skip
