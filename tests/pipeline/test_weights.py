"""Models are built without storage, filled from seeds or files, and clipped as in plain PyTorch."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import with_batch_norm
from torchweft.errors import UsageError, WeightsError

safetensors = pytest.importorskip(
    "safetensors.torch", reason="weights: needs safetensors; the extra `weights` brings it"
)


class Rotary(nn.Module):
    """Model whose embedding and head share a weight, with a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x) + self.frequencies))


def sequential() -> nn.Sequential:
    """Layers, of which the first and the last share a weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def piped(model: nn.Module, **settings: Any) -> weft.Pipe:
    return weft.Pipe(model, chunks=2, devices=["cpu", "cpu"], **settings)


def saved(folder: Path, state: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    safetensors.save_file({key: value.contiguous().clone() for key, value in state.items()}, folder / name)
    return folder / name


def test_build_on_meta_keeps_ties_and_real_buffers() -> None:
    with weft.build_on_meta():
        model = Rotary()
        shared = nn.Parameter(torch.ones(2), requires_grad=False)
        one, other = nn.Module(), nn.Module()
        one.weight, other.weight = shared, shared
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.head.weight is model.embed.weight
    assert one.weight is other.weight and one.weight.is_meta and not one.weight.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta


def test_build_on_meta_nests_and_ends_with_an_error() -> None:
    with pytest.raises(RuntimeError), weft.build_on_meta():
        with weft.build_on_meta():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
        raise RuntimeError
    assert not nn.Linear(2, 2).weight.is_meta


def test_build_on_meta_leaves_other_threads_alone() -> None:
    on_meta: list[bool] = []
    with weft.build_on_meta():
        thread = threading.Thread(target=lambda: on_meta.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join(10.0)
    assert on_meta == [False]


def test_a_hugging_face_model_is_built_on_meta(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="hugging face: the extra `hf` brings transformers")
    config = transformers.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    with weft.build_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    pipe = piped(model, split=["transformer.h.1"]).materialize(tmp_path)
    ids = torch.randint(13, (4, 5))
    torch.testing.assert_close(pipe(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_hugging_face_model_is_initialised_by_its_own_function() -> None:
    transformers = pytest.importorskip("transformers", reason="hugging face: the extra `hf` brings transformers")
    config = transformers.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    with weft.build_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config)
    pipe = piped(model, split=["transformer.h.1"])
    with pytest.raises(UsageError, match=r"Conv1D has no reset_parameters\(\)"):
        pipe.materialize()
    pipe.materialize(model._init_weights)
    assert torch.equal(model.transformer.h[0].ln_1.weight, torch.ones(8))
    assert 0.01 < float(model.transformer.h[1].mlp.c_fc.weight.detach().std()) < 0.03


@with_batch_norm
@pytest.mark.parametrize("where", ["file", "folder", "index", "folder with index"])
@pytest.mark.parametrize("kind", ["sequential", "split"])
def test_weights_are_read_from_files(kind: str, where: str, tmp_path: Path) -> None:
    build = sequential if kind == "sequential" else Rotary
    expected = {key: torch.randn_like(value.float()).to(value.dtype) for key, value in build().state_dict().items()}
    tied = ("2.weight", "0.weight") if kind == "sequential" else ("head.weight", "embed.weight")
    expected[tied[1]] = expected[tied[0]]
    stored = {key: value for key, value in expected.items() if key != tied[1]}  # the tie under its second name
    if "index" in where:
        parts = [list(stored)[::2], list(stored)[1::2]]
        for number, part in enumerate(parts):
            saved(tmp_path, {key: stored[key] for key in part}, f"{number}.safetensors")
        index = {"weight_map": {key: f"{number}.safetensors" for number, part in enumerate(parts) for key in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        saved(tmp_path, stored)
    name = "model.safetensors.index.json" if where == "index" else "model.safetensors"
    with weft.build_on_meta():
        model = build()
    pipe = piped(model, **({} if kind == "sequential" else {"split": ["head"]}))
    assert pipe.materialize(tmp_path if "folder" in where else tmp_path / name) is pipe
    state = pipe.state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert len(list(pipe.parameters())) == (5 if kind == "sequential" else 4)


def test_values_are_cast_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    saved(tmp_path, {"0.weight": weight, "0.bias": torch.ones(4)})
    with weft.build_on_meta():
        model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Tanh())
    pipe = piped(model).materialize(str(tmp_path))
    assert torch.equal(pipe[0].weight, weight.bfloat16())


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    state = {"0.weight": torch.ones(4, 5), "1.bias": torch.ones(4), "9.extra": torch.ones(1)}
    saved(tmp_path, state)
    with weft.build_on_meta():
        pipe = piped(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    with pytest.raises(WeightsError) as caught:
        pipe.materialize(tmp_path)
    for words in (
        "9.extra: in the files, but not in the model",
        "0.weight: [4, 5] in the files, but [4, 4] in the model",
        "0.bias: in the model, but not in the files",
        "1.weight: in the model, but not in the files",
    ):
        assert words in str(caught.value)
    assert all(parameter.is_meta for parameter in pipe.parameters())


@with_batch_norm
def test_buffers_on_meta_that_are_in_no_file_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, Rotary().state_dict())
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(WeightsError, match=r"frequencies: in no file, because it is not persistent"):
        piped(model, split=["head"]).materialize(tmp_path)


def test_a_missing_or_damaged_file_is_an_error_of_weights(tmp_path: Path) -> None:
    pipe = piped(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with pytest.raises(WeightsError, match="FileNotFoundError"):
        pipe.materialize(tmp_path / "no.safetensors")
    with pytest.raises(WeightsError, match=r"wanted one \*.safetensors.index.json"):
        pipe.materialize(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    with pytest.raises(WeightsError, match="SafetensorError"):
        pipe.materialize(tmp_path / "bad.safetensors")


@with_batch_norm
def test_ties_between_layers_stay_when_storage_is_given() -> None:
    with weft.build_on_meta():
        model = sequential()
    pipe = piped(model).materialize()
    assert pipe[2].weight is pipe[0].weight


def test_modules_without_initialisation_are_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with weft.build_on_meta():
        pipe = piped(nn.Sequential(nn.Linear(4, 4), Scale()))
    with pytest.raises(UsageError, match=r"layer 1, itself: Scale has no reset_parameters\(\)"):
        pipe.materialize()


def test_attention_and_recurrent_layers_get_storage() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), Last())
    pipe = piped(model).materialize()
    pipe(torch.randn(4, 3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_every_module_draws_numbers_of_its_own() -> None:
    with weft.build_on_meta():
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    pipe = piped(model).materialize()
    weights = [pipe[0][0].weight, pipe[0][1].weight, pipe[1].weight]
    assert not any(torch.equal(a, b) for a, b in [(weights[0], weights[1]), (weights[1], weights[2])])


@with_batch_norm
def test_a_split_model_is_initialised_the_same_by_any_cut() -> None:
    states: list[Any] = []
    for split in (["head"], ["norm", "head"]):
        with weft.build_on_meta():
            model = Rotary()
        torch.manual_seed(4)
        weft.Pipe(model, chunks=2, split=split, devices=["cpu"] * (len(split) + 1)).materialize()
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@with_batch_norm
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_in_one_process_is_that_of_pytorch(norm_type: float) -> None:
    torch.manual_seed(0)
    one, other = sequential(), sequential()
    other.load_state_dict(one.state_dict())
    for model in (pipe := piped(one), other):
        model(torch.arange(16.0).reshape(4, 4)).square().sum().backward()
    other_gradients = [parameter.grad.clone() for parameter in other.parameters()]
    for parameter, gradient in zip(pipe.parameters(), other_gradients, strict=True):
        parameter.grad = gradient
    expected = nn.utils.clip_grad_norm_(other.parameters(), 0.5, norm_type)
    assert torch.equal(weft.clip_grad_norm_(pipe, 0.5, norm_type), expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(pipe.parameters(), other.parameters(), strict=True))
    assert float(weft.clip_grad_norm_(pipe.parameters(), 9.0, norm_type)) < 9.0
