"""Heads of Hugging Face with ragged labels: a pipe has the losses, outputs, gradients and weights of the bare model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import assert_close
from tests.pipeline.split.test_losses import assert_trains_as
from tests.pipeline.split.test_split_pipe import cut
from tests.pipeline.split.test_zoo import needs_transformers
from tests.pipeline.split.zoo import HUGGING, VOCABULARY, gpt2, hugging, ids
from torchweft.core.errors import BatchError

pytestmark = [needs_transformers, pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore")]

LENGTH, CLASSES = 9, 5
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_SMALL |= _QUIET


def ragged(rows: int) -> dict[str, Tensor]:
    """Tokens, half of which have labels. The first row has one label, and all rows but one are padded."""
    tokens = ids(rows, LENGTH)
    labels, mask = tokens.masked_fill(torch.rand(rows, LENGTH) < 0.5, -100), torch.ones_like(tokens)
    labels[0], labels[0, 1] = -100, 5
    for row in range(rows):
        mask[row, LENGTH - row % 4 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def classified(rows: int) -> dict[str, Tensor]:
    batch = ragged(rows)
    return {**batch, "labels": torch.where(batch["labels"] < 0, -100, batch["labels"] % CLASSES)}


def answered(rows: int) -> dict[str, Tensor]:
    """The ends of answers. Some are beyond the text, and do not count."""
    batch = ragged(rows)
    del batch["labels"]
    ends = [torch.randint(0, LENGTH + 3, (rows,)) for _ in range(2)]
    return {**batch, "start_positions": ends[0], "end_positions": ends[1]}


def pictures(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, CLASSES, (rows,))}


class Head(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    split: str


HEADS = {
    "masked": Head(hugging("Roberta", "RobertaForMaskedLM", **_SMALL), ragged, "roberta.encoder.layer.1"),
    "tokens": Head(
        hugging("Roberta", "RobertaForTokenClassification", **_SMALL, num_labels=CLASSES),
        classified,
        "roberta.encoder.layer.1",
    ),
    "bart": Head(HUGGING["bart"].make, ragged, "model.decoder.layers.0"),
    "answers": Head(hugging("Bert", "BertForQuestionAnswering", **_SMALL), answered, "bert.encoder.layer.1"),
    "causal": Head(lambda: gpt2(layers=2), ragged, "transformer.h.1"),
    "pictures": Head(
        hugging("ViT", "ViTForImageClassification", **_SMALL, image_size=16, patch_size=8, num_labels=CLASSES),
        pictures,
        "vit.layers.1",
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return HEADS[name].make().double().train()


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_exact_with_ragged_labels(name: str) -> None:
    """Also with hidden states among the outputs, and one row per micro-batch."""
    plain = made(name)
    for chunks, rows, more in ((3, 7, {}), (3, 7, {"output_hidden_states": True}), (4, 4, {})):
        pipe = cut(copy.deepcopy(plain), HEADS[name].split, chunks=chunks)
        for _ in range(2):
            assert_trains_as(pipe, plain, {**HEADS[name].inputs(rows), **more})


@pytest.mark.parametrize("name", HEADS)
def test_trainer_with_default_arguments_trains_as_with_the_model(name: str, tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415 - an extra

    torch.manual_seed(1)
    columns = HEADS[name].inputs(14)
    data = [{key: x[row] for key, x in columns.items()} for row in range(14)]
    runs: list[tuple[float, Any]] = []
    for wrap in (lambda model: model, lambda model: cut(model, HEADS[name].split, chunks=3)):
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, disable_tqdm=True, report_to=[], max_steps=3, save_strategy="no"
        )
        trainer = transformers.Trainer(wrap(made(name)), arguments, train_dataset=data)
        runs.append((trainer.train().training_loss, trainer.model.state_dict()))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-12)
    assert_close(runs[1][1], runs[0][1], 1e-10)


def test_the_balancing_loss_of_mixtral_is_refused() -> None:
    """The blocks return logits of their routers, from which the model computes a loss at its end."""
    torch.manual_seed(0)
    model, batch = HUGGING["mixtral"].make().double(), HUGGING["mixtral"].inputs(8)
    pipe = cut(model, "model.layers.2", chunks=4)
    for _ in range(2):
        with pytest.raises(BatchError, match=r"(?s)balancing loss.*loss_reduction=.*router|gate|mlp|layers"):
            pipe(**batch)
    assert pipe(**batch, output_router_logits=False).logits.shape[-1] == VOCABULARY
