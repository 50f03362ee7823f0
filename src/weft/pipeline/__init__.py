"""Across devices: a sequential model in stages, micro-batches in a pipeline, skip connections of any length.

pipe.py       Pipe, what users see        plan.py, runtime.py   how it is laid out and run
skip/         layers that stash and pop   step.py, cargo.py     one mini-batch's way through
partition.py  which layers to which stage schedules.py          what runs when
"""

from weft.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from weft.pipeline.costs import Costs, Sizes, costs_from
from weft.pipeline.partition import balance_by_parameters, balance_by_size, balance_by_time
from weft.pipeline.pipe import Pipe
from weft.pipeline.schedule import SCHEDULES, gpipe, one_f_one_b
from weft.pipeline.simulate import Forecast

__all__ = [
    "SCHEDULES",
    "Costs",
    "DeferredBatchNorm",
    "Forecast",
    "Pipe",
    "Sizes",
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "convert_deferred_batch_norm",
    "costs_from",
    "gpipe",
    "one_f_one_b",
]
