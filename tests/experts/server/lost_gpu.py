"""Expert kinds that fail as a GPU does, for a server in a process of its own; see `test_lost_gpu`."""

import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.experts import ExpertFactory, register_expert


class _Breaking(nn.Module):
    """Raises what an index out of range raises on a GPU, after which all that uses it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = _fail
            _fail()
        return self.inner(x)


def _fail(device: object = None) -> None:
    raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")


@register_expert("breaking")
def breaking() -> ExpertFactory:
    """Fails on the CPU."""
    return ExpertFactory(_Breaking(), (weft.TensorSpec((None, 2), torch.float32),))


class _LookUp(nn.Module):
    """Looks up rows without an embedding, so no range is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x.sum(1).long(), self.table)


@register_expert("look-up")
def look_up() -> ExpertFactory:
    """Fails on a GPU."""
    return ExpertFactory(_LookUp().to("cuda:0"), (weft.TensorSpec((None, 2), torch.float32),))
