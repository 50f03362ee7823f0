"""The parameter by which autograd finds experts that are elsewhere, and by which they are frozen here.

    anchor wants a gradient                 a node of autograd, whose backward trains the experts
    frozen, nor does any input want one     no node: the experts only answer
    frozen, but an input wants one          refused: the servers would step in the backward that the input wants

It is one zero, not none: optimizers and norms of gradients take no tensor without numbers. Its gradient is zero, too.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import UsageError

_NAME = "anchor"


class Anchored(nn.Module):
    """A module with an ``anchor`` beside its own parameters. What is saved and loaded are those alone."""

    anchor: nn.Parameter

    def make_anchor(self, like: Tensor | None = None) -> None:
        """Make it, of the dtype and on the device of another parameter: some wrappers want all of a module alike."""
        self.anchor = nn.Parameter(torch.zeros(1) if like is None else like.detach().new_zeros(1))

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for a commit."""
        raise NotImplementedError

    @property
    def steps_in_backward(self) -> str:
        """See `weft.core.boundary.StepsInBackward`."""
        if self.accumulates or not self.anchor.requires_grad:
            return ""
        return "make it with accumulate=True and commit after backward, or freeze it if its server does not train it"

    def anchor_for(self, who: str, trained: bool, inputs: Iterable[Tensor]) -> Tensor:
        """The anchor, which wants a gradient only where these inputs' call is to train the experts.

        Args:
            who: the experts, in an error, with "is" or "are".
            trained: whether servers step in a backward.

        Raises ``UsageError`` if that is forbidden here, but an input wants a gradient.
        """
        if trained and self.anchor.requires_grad:
            return self.anchor
        if trained and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            raise UsageError(
                f"{who} frozen here (the anchor does not require a gradient), but there would be a step in the "
                "backward that the inputs want; call it under no_grad, or unfreeze it"
            )
        return self.anchor.detach()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing of the experts: what they learn is saved by their servers."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + _NAME, None)

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
        """Nothing of the experts, for the same reason: weights for them are unexpected, an error if ``strict``."""
        key, missing = prefix + _NAME, list[str]()
        if state_dict.pop(key, None) is not None and strict:
            unexpected_keys.append(key)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [name for name in missing if name != key]
