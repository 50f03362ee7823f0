"""Expert kinds that fail like a lost GPU, for a server in a separate process; see `test_lost_gpu`."""

import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.experts import ExpertFactory, register_expert


class _Breaking(nn.Module):
    """Raises the error of an index out of range on a GPU, and all later uses of the GPU fail too."""

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
    """Looks up rows without `nn.Embedding`, which would require a range for its indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x.sum(1).long(), self.table)


@register_expert("look-up")
def look_up() -> ExpertFactory:
    """Fails on a GPU."""
    return ExpertFactory(_LookUp().to("cuda:0"), (weft.TensorSpec((None, 2), torch.float32),))
