"""Replacement for ``torchgpipe.balance``."""

from torchweft.pipeline.partition import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
