"""Replacement for ``torchgpipe.skip``."""

from weft.pipeline.skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
