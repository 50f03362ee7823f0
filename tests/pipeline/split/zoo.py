"""Small models with an ordinary forward(), and Hugging Face models with tiny random configs. Each has inputs, split
points, and a loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 50


class Entry(NamedTuple):
    """A model of the zoo. `inputs` takes the number of rows, `loss` the output of one micro-batch. `reduction` combines
    the losses of micro-batches, and is passed to the pipe if `stated`. `whole`: the loss is that of all rows."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    split: tuple[str, ...]
    loss: Callable[[Any], Tensor]
    reduction: str = "mean"
    stated: bool = False
    whole: bool = False


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.down is None else self.down(x)
        y = self.second(self.relu(self.norm(self.first(x))))
        y += shortcut
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu = nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.stem(x))))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class UNet(nn.Module):
    """Model with long skips in local variables, and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = block(3, 6), block(6, 8), block(8, 8)
        self.up2, self.up1, self.out = block(16, 6), block(12, 6), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        fine = self.down1(x)
        coarse = self.down2(functional.max_pool2d(fine, 2))
        middle = self.middle(functional.max_pool2d(coarse, 2))
        up = self.up2(torch.cat([functional.interpolate(middle, size=coarse.shape[2:]), coarse], 1))
        up = self.up1(torch.cat([functional.interpolate(up, size=fine.shape[2:]), fine], 1))
        return {"logits": self.out(up) * scale, "deep": [middle.mean((1, 2, 3)), None]}


class ShapeDriven(nn.Module):
    """Model with shape-dependent Python, a parameter and a counter of its own, in-place code, a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        x = torch.cat([self.cls.expand(rows, -1, -1), x], 1)
        if length > 6:
            x = x[:, :7]
        first = x
        for i, layer in enumerate(self.blocks):
            x = x + (torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if i == 1 else layer(x))
            x += first / (i + 1)
            if length % 2 == 0:
                x = x * 1.5
        self.calls += 1
        if mask is not None:
            x = x * mask[:, None, None]
        return self.head(x[:, 0])


class Router(nn.Module):
    """Block that branches on its data, with the same result for each row by either branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.mean(-1, keepdim=True) > 0
        return self.a(x) if bool(chosen.all()) else torch.where(chosen, self.a(x), self.b(x).tanh())


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Router() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(x)
        return x


@dataclass
class State:
    """A container that PyTorch does not know."""

    main: Tensor
    early: Tensor
    steps: int = 0


class Advance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state: State) -> State:
        return State(self.linear(state.main).tanh() + state.early, state.early, state.steps + 1)


class Shared(nn.Module):
    """Model with a block that is called twice, tied weights, and a dataclass between blocks and as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.block, self.other = Advance(), Advance()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> State:
        state = State(self.embed(x), x)
        state = self.block(self.other(self.block(state)))
        return State(self.head(state.main), state.early, state.steps)


class Dropping(nn.Module):
    """Model with dropout in blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + functional.dropout(layer(x), 0.2, self.training)
        return x


class Annealing(nn.Module):
    """Model with a counter in a buffer, which is a factor of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.middle, self.decode = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        code = self.middle(self.encode(x).tanh())
        self.steps += 1
        weight = (self.steps / 10).clamp(max=1)
        return (self.decode(code) - x).square().mean(1) + weight * code.square().mean(1)


class SummedLoss(nn.Module):
    """Transcribes sounds, with a CTC loss that is summed over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.middle, self.head = nn.Conv1d(3, 8, 3, 2), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> "Transcript":
        logits = self.head(self.middle(self.encode(x).transpose(1, 2)).tanh())
        steps, lengths = logits.log_softmax(-1).transpose(0, 1), torch.full((len(x),), logits.shape[1])
        loss = functional.ctc_loss(steps, labels, lengths, (labels > 0).sum(1), reduction="sum")
        return Transcript(loss, logits)


@dataclass
class Transcript:
    loss: Tensor
    logits: Tensor


def _transcribed(n: int) -> dict[str, Any]:
    labels = torch.randint(1, 5, (n, 3))
    labels[::2, 2] = 0  # shorter
    return {"x": torch.randn(n, 3, 17), "labels": labels}


def _square(output: Tensor) -> Tensor:
    return output.square().mean()


OWN = {
    "resnet": Entry(ResNet, lambda n: {"x": torch.randn(n, 3, 8, 8)}, ("layer1.1", "layer2"), _square),
    "unet": Entry(
        UNet,
        lambda n: {"x": torch.randn(n, 3, 9, 9), "scale": 2.0},
        ("middle", "up2", "up1"),
        lambda output: output["logits"].square().mean() + output["deep"][0].mean(),
    ),
    "shapes": Entry(
        ShapeDriven,
        lambda n: {"x": torch.randn(n, 5 + n % 4, 8), "mask": torch.rand(n)},
        ("blocks.1", "blocks.3"),
        _square,
        whole=True,
    ),
    "annealing": Entry(Annealing, lambda n: {"x": torch.randn(n, 8)}, ("decode",), Tensor.mean, whole=True),
    "summed loss": Entry(SummedLoss, _transcribed, ("head",), lambda output: output.loss, reduction="sum"),
    "data": Entry(DataDependent, lambda n: {"x": torch.randn(n, 8)}, ("blocks.2",), _square),
    "shared": Entry(
        Shared, lambda n: {"x": torch.randn(n, 8)}, ("other", "head"), lambda output: output.main.square().mean()
    ),
}


def ids(rows: int, length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length))


def text(rows: int) -> dict[str, Any]:
    """Token ids, some rows with padding, and labels that all count."""
    tokens = ids(rows)
    mask = torch.ones_like(tokens)
    mask[::2, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def pairs(rows: int) -> dict[str, Any]:
    return {"input_ids": ids(rows), "attention_mask": torch.ones(rows, 12, dtype=torch.long), "labels": ids(rows, 7)}


def image(rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 5, (rows,))}


def pictured(rows: int) -> Tensor:
    """Token ids, four of which stand for an image."""
    tokens = ids(rows) % 45
    tokens[:, 2:6] = 45
    return tokens


def sound(rows: int) -> dict[str, Any]:
    return {"input_features": torch.randn(rows, 8, 20), "labels": ids(rows, 7)}


def _causal(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def hugging(name: str, kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Factory of a model by the names of its classes. Its loss has the dtype of the model."""

    def make() -> nn.Module:
        import transformers  # noqa: PLC0415 - an extra

        model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **config))
        if kind.endswith(("LMHeadModel", "CausalLM")):
            model.loss_function = _causal
        return model

    return make


_SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
_PATCHES: dict[str, Any] = {"image_size": 16, "patch_size": 8}
_LLAMA: dict[str, Any] = {**_SMALL, "num_key_value_heads": 1, "use_cache": False}
_PAIR: dict[str, Any] = {
    **{"d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "use_cache": False, "pad_token_id": 0},
}
_ENDS = ("model.encoder.layers.2", "model.decoder.layers.0", "model.decoder.layers.2")


def gpt2(drop: float = 0.0, layers: int = 4) -> nn.Module:
    drops = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    size = {"n_positions": 32, "n_embd": 16, "n_layer": layers, "n_head": 2}
    return hugging("GPT2", "GPT2LMHeadModel", use_cache=False, **size, **drops)()


def wav2vec2(drop: float = 0.0, augment: bool = False) -> nn.Module:
    """Model with a summed loss. With `augment`, the default of Hugging Face, it draws NumPy random numbers."""
    drops = [f"{part}_dropout" for part in ("hidden", "attention", "activation", "feat_proj", "final")]
    size = {**_SMALL, "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    rest = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": drop}
    settings = {**size, **rest, **dict.fromkeys(drops, 0.0), "apply_spec_augment": augment}
    return hugging("Wav2Vec2", "Wav2Vec2ForCTC", **settings)()


def clip() -> nn.Module:
    import transformers  # noqa: PLC0415 - an extra

    words = {**_SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    pictures = {**_SMALL, "image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=words, vision_config=pictures, projection_dim=8))


def time_series() -> nn.Module:
    """Model with a mean loss over observed values."""
    import transformers  # noqa: PLC0415 - an extra

    size = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    size |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    rest = {"prediction_length": 4, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 1}
    drops = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")
    config = transformers.TimeSeriesTransformerConfig(**size, **rest, **dict.fromkeys(drops, 0.0), use_cache=False)
    return transformers.TimeSeriesTransformerForPrediction(config)


def speech(rows: int) -> dict[str, Any]:
    return {"input_values": torch.randn(rows, 200), "labels": torch.randint(1, 12, (rows, 3))}


def series(rows: int, unobserved: int = 0) -> dict[str, Any]:
    past, future = torch.randn(rows, 8), torch.randn(rows, 4)
    times = {"past_time_features": torch.randn(rows, 8, 1), "future_time_features": torch.randn(rows, 4, 1)}
    masks = {"past_observed_mask": torch.ones(rows, 8), "future_observed_mask": torch.ones(rows, 4)}
    masks["future_observed_mask"][0, :unobserved] = 0
    return {"past_values": past, "future_values": future, **times, **masks}


def _of_model(output: Any) -> Tensor:
    return output.loss


HUGGING = {
    "gpt2": Entry(gpt2, text, ("transformer.h.2",), _of_model),
    "llama": Entry(hugging("Llama", "LlamaForCausalLM", **_LLAMA), text, ("model.layers.2",), _of_model),
    "qwen3": Entry(
        hugging("Qwen3", "Qwen3ForCausalLM", **_LLAMA, head_dim=8, tie_word_embeddings=True),
        text,
        ("model.layers.1", "model.layers.3"),
        _of_model,
    ),
    "gemma": Entry(hugging("Gemma", "GemmaForCausalLM", **_LLAMA, head_dim=8), text, ("model.layers.2",), _of_model),
    "bert": Entry(
        hugging("Bert", "BertForMaskedLM", **_SMALL, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
        text,
        ("bert.encoder.layer.2",),
        _of_model,
    ),
    "t5": Entry(
        hugging(
            *("T5", "T5ForConditionalGeneration"),
            **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2},
            **{"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0},
        ),
        pairs,
        ("encoder.block.2", "decoder.block.0", "decoder.block.2"),
        _of_model,
    ),
    "bart": Entry(
        hugging("Bart", "BartForConditionalGeneration", **_PAIR, max_position_embeddings=32, dropout=0.0),
        pairs,
        _ENDS,
        _of_model,
    ),
    "vit": Entry(
        hugging("ViT", "ViTForImageClassification", **_SMALL, image_size=16, patch_size=4, num_labels=5),
        image,
        ("vit.layers.2",),
        _of_model,
    ),
    "whisper": Entry(
        hugging(
            *("Whisper", "WhisperForConditionalGeneration"),
            **_PAIR,
            **{"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32, "dropout": 0.0},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        ),
        sound,
        _ENDS,
        _of_model,
    ),
    "mixtral": Entry(
        hugging(
            *("Mixtral", "MixtralForCausalLM"),
            **_LLAMA,
            **{"num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"},
        ),
        lambda n: {key: value for key, value in text(n).items() if key != "attention_mask"},
        ("model.layers.2",),
        _of_model,
        stated=True,  # its loss that balances the experts is not a mean over rows
    ),
    "time series": Entry(time_series, series, ("model.decoder.layers.0",), _of_model),
    "llava": Entry(  # caches keys and values, by a nested config and an entry of **kwargs
        hugging(
            *("Llava", "LlavaForConditionalGeneration"),
            text_config={**_SMALL, "model_type": "llama", "num_key_value_heads": 1, "vocab_size": VOCABULARY},
            vision_config={**_SMALL, "model_type": "clip_vision_model", "num_hidden_layers": 2, **_PATCHES},
            **{"image_token_index": 45, "image_seq_length": 4},
        ),
        lambda n: {"input_ids": pictured(n), "pixel_values": torch.randn(n, 3, 16, 16)},
        ("model.language_model.layers.2",),
        lambda output: output.logits.square().mean(),
    ),
    "mamba": Entry(
        hugging("Mamba", "MambaForCausalLM", hidden_size=16, state_size=4, num_hidden_layers=4, use_cache=False),
        lambda n: {"input_ids": ids(n)},
        ("backbone.layers.2",),
        lambda output: output.logits.double().square().mean(),  # the model casts them to float32
    ),
    "rwkv": Entry(
        hugging(
            "Rwkv", "RwkvForCausalLM", hidden_size=16, attention_hidden_size=16, num_hidden_layers=4, use_cache=False
        ),
        lambda n: {key: value for key, value in text(n).items() if key != "attention_mask"},
        ("rwkv.blocks.2",),
        _of_model,
    ),
}

Refused = tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]], str, str]
"""Factory, inputs by number of rows, split point, words of the error."""
WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]], str]] = {
    "contrastive": (
        clip,
        lambda n: {"input_ids": ids(n, 7), "pixel_values": torch.randn(n, 3, 16, 16), "return_loss": True},
        "text_model.encoder.layers.1",
    ),
    "unequal mask": (time_series, lambda n: series(n, 3), "model.decoder.layers.0"),
}
"""Hugging Face models whose loss is not a mean over micro-batches. Factory, inputs by number of rows, split point."""
REFUSED: dict[str, Refused] = {
    "LayerDrop": (lambda: wav2vec2(0.1), speech, "wav2vec2.encoder.layers.1", r"layerdrop=0\.0 in its config"),
    "time masks": (
        lambda: wav2vec2(augment=True),
        speech,
        "wav2vec2.encoder.layers.1",
        "NumPy's random.*apply_spec_augment=False in its config",
    ),
}
"""Hugging Face models that are refused, with any inputs or with these."""
