"""Work for ranks: models with an ordinary forward() over processes, beside the model itself."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from tests.pipeline.split.zoo import HUGGING, OWN, UNet, hugging, ids, pairs, text

ROWS = (8, 7, 3, 1, 8)


def _squares(output: Any) -> Tensor:
    """A loss that is a sum over rows, of all that the model returns."""
    leaves = [output.logits] if hasattr(output, "logits") else [output["logits"], output["deep"][0]]
    return sum((leaf.double().square().sum() for leaf in leaves), start=torch.zeros(()))


def _without_labels(inputs: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    return lambda rows: {key: value for key, value in inputs(rows).items() if key != "labels"}


def _t5_pairs(rows: int) -> dict[str, Any]:
    return {"input_ids": ids(rows), "attention_mask": torch.ones(rows, 12, dtype=torch.long), "decoder_input_ids": ids(rows, 7)}


Family = tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]], list[str]]
FAMILIES: dict[str, Family] = {
    "unet": (lambda: UNet().eval(), lambda n: {"x": torch.randn(n, 3, 9, 9), "scale": 2.0}, ["middle", "up1"]),
    "gpt2": (HUGGING["gpt2"].make, _without_labels(text), ["transformer.h.1", "transformer.h.3"]),
    "llama": (HUGGING["llama"].make, _without_labels(text), ["model.layers.1", "model.layers.3"]),
    "t5": (HUGGING["t5"].make, _t5_pairs, ["encoder.block.2", "decoder.block.1"]),
    "mixtral": (HUGGING["mixtral"].make, _without_labels(HUGGING["mixtral"].inputs), ["model.layers.1", "model.layers.3"]),
}


def train_beside_plain(name: str, schedule: str, sampled: bool = False) -> dict[str, Any]:
    """The worst difference of losses and gradients from the model itself, relative to the largest."""
    torch.set_default_dtype(torch.float64)
    try:
        return _train_beside_plain(name, schedule, sampled)
    finally:
        torch.set_default_dtype(torch.float32)


def _train_beside_plain(name: str, schedule: str, sampled: bool) -> dict[str, Any]:
    make, inputs, split = FAMILIES[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = make()
    split = split[: size - 1]
    # The loss that balances the experts of Mixtral is not a mean over rows.
    inside: dict[str, Any] = {"loss_reduction": "mean"} if name == "mixtral" else {}
    if schedule == "1f1b":
        inside = {"loss": lambda output, _: _squares(output), "loss_reduction": "sum"}
    sample = inputs(2) if sampled else None
    pipe = weft.Pipe(
        copy.deepcopy(plain), chunks=4, split=split, schedule=schedule, sample=sample, group=dist.group.WORLD, **inside
    )
    worst = 0.0
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    for rows in ROWS:
        call = inputs(rows)
        pipe.zero_grad()
        plain.zero_grad()
        given = call if rank == 0 else {}
        if schedule == "1f1b":
            loss = pipe(**given, target=torch.zeros(rows) if rank == size - 1 else None)
        else:
            loss = _squares(pipe(**given))
        loss.backward()
        wanted = _squares(plain(**call))
        wanted.backward()
        worst = max(worst, float((loss - wanted).abs() / wanted.abs()))
        for key, parameter in pipe.named_parameters():
            found, other = parameter.grad, theirs[key].grad
            assert (found is None) == (other is None), key
            if found is not None:
                worst = max(worst, float((found - other).abs().max() / (1 + other.abs().max())))
    keys = [key for key, _ in pipe.named_parameters()]
    return {"worst": worst, "keys": keys, "all": [key for key, _ in plain.named_parameters()]}
