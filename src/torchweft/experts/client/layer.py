"""Base of layers with experts at servers, and results of forwards that will be recomputed."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

_ANCHOR = "anchor"
_MOST = 256  # entries of a cache
Value = TypeVar("Value")


class RemoteLayer(nn.Module):
    """Base of layers with experts at servers. State dicts do not include ``anchor``."""

    anchor: nn.Parameter

    def make_anchor(self, like: Tensor | None = None) -> None:
        """Make the anchor, like another parameter: some wrappers need one dtype and device for all of a module."""
        self.anchor = nn.Parameter(torch.zeros(1) if like is None else like.detach().new_zeros(1))

    @property
    def accumulates(self) -> bool:
        raise NotImplementedError

    def commit(self) -> Any:
        raise NotImplementedError

    # The two phases of `commit`, for a commit of several layers, see `weft.experts.client.commit`.

    def prepare_commit(self) -> None:
        """Raise if no step can be taken now."""

    def apply_commit(self) -> Any:
        return self.commit()

    def discard(self) -> None:
        raise NotImplementedError

    @property
    def steps_in_backward(self) -> str:
        """See `weft.core.autograd.StepsInBackward`."""
        if self.accumulates or not self.anchor.requires_grad:
            return ""
        return "make it with accumulate=True and commit after backward, or freeze it if its server does not train it"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Without the anchor: the servers save the experts, and the anchor is always zero.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + _ANCHOR, None)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # An anchor is unexpected, which is an error if ``strict``.
        key, missing = prefix + _ANCHOR, list[str]()
        if state_dict.pop(key, None) is not None and strict:
            unexpected_keys.append(key)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [name for name in missing if name != key]


class RecomputeCache(Generic[Value]):
    """Results of forwards that will be recomputed, by their inputs. Thread-safe."""

    # A second call could return other outputs, because other clients train the experts in between. The gradient would
    # then belong to another forward. Newer results evict those that no backward has fetched.
    def __init__(self, most: int = _MOST) -> None:
        self._lock = threading.Lock()
        self._entries: deque[tuple[list[Tensor], Value]] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, inputs: Sequence[Tensor], value: Value) -> None:
        copies = [tensor.detach().clone() for tensor in inputs]
        with self._lock:
            self._entries.append((copies, value))

    def pop_match(self, inputs: Sequence[Tensor]) -> Value | None:
        with self._lock:
            for place, (stored, value) in enumerate(self._entries):
                pairs = zip(stored, inputs, strict=True)
                if all(a.shape == b.shape and a.device == b.device and torch.equal(a, b.detach()) for a, b in pairs):
                    del self._entries[place]
                    return value
        return None
