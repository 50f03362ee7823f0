"""Replacement for ``torchgpipe.skip``."""

from torchweft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
