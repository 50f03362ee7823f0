"""Check of an expert's own weights: a step must not leave NaN or infinity in them.

Guards keep such gradients out, but an optimizer can still make weights infinite, such as by a learning rate of 1e38.
Every output would then be NaN, and so would the gradients that trainers send. The expert answers every call with
`NotFiniteError`, and is not saved, until a sound state is loaded.
"""

import time

import torch
from torch import Tensor, nn

from torchweft.experts.gradients import norm

_REST = 50.0  # a check after a step follows a rest of so many times its duration, so that steps take 2% longer at most


class WeightCheck:
    """The check of one module's parameters. ``fault`` says what is wrong with them. Guarded by the expert's lock."""

    def __init__(self, name: str, module: nn.Module, *, enabled: bool) -> None:
        self.fault: str | None = None
        self._name, self._module, self._enabled = name, module, enabled
        self._exempt: set[str] = set()  # parameters that are not finite by intention
        self._next = 0.0
        self.accept()

    def accept(self) -> None:
        """Take the present parameters as they are, such as those of a new module."""
        self._exempt, self.fault, self._next = set(), None, 0.0
        if self._enabled and not self._is_sound():
            self._exempt = set(self._not_finite())

    def after_load(self) -> None:
        self.fault, self._next = None, 0.0
        self.check("after its state was loaded")

    def after_step(self, step: int) -> None:
        begin = time.monotonic()
        if begin >= self._next:
            self.check(f"after step {step}")
            end = time.monotonic()
            self._next = end + _REST * (end - begin)

    def check(self, when: str) -> None:
        if self.fault is None and self._enabled and not self._is_sound() and (names := self._not_finite()):
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            self.fault = (
                f"{shown} of expert {self._name!r} hold NaN or infinity, seen {when}. No client is at fault: see its "
                "optimizer, the learning rate first. Nothing is served or saved until a sound checkpoint is loaded: "
                "restart the server, or roll the expert back"
            )

    def _is_sound(self) -> bool:
        total = norm([parameter.detach() for _, parameter in self._checked()])
        return total - total == 0.0  # false for NaN and infinity; a sum of large finite numbers can also overflow

    def _not_finite(self) -> list[str]:
        return [name for name, parameter in self._checked() if not bool(torch.isfinite(_widened(parameter)).all())]

    def _checked(self) -> list[tuple[str, Tensor]]:
        named = self._module.named_parameters()
        return [(name, parameter) for name, parameter in named if name not in self._exempt and not parameter.is_meta]


def _widened(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.float() if plain.is_floating_point() and plain.element_size() == 1 else plain
