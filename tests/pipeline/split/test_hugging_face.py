"""A pipe behaves like the model itself under Trainer, accelerate and save_pretrained of Hugging Face."""

import copy
import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, rows
from tests.pipeline.split.test_split_pipe import Chain, cut
from tests.pipeline.split.test_zoo import needs_transformers
from tests.pipeline.split.zoo import HUGGING, gpt2, hugging, ids
from torchweft.core.errors import BatchError, SplitError, UsageError
from torchweft.pipeline.split.huggingface import split_by_device_map

pytestmark = [needs_transformers, pytest.mark.filterwarnings("ignore")]

LABELS = dict[str, Tensor]


def _loss(logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
    """The causal loss of Hugging Face, without its cast to float32."""
    shifted = labels[:, 1:]
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten(), reduction="sum")
    return total / ((shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def _model() -> Any:
    torch.manual_seed(0)
    model: Any = gpt2(layers=2).double()
    model.loss_function = _loss
    return model


def _unchanged(model: Any) -> Any:
    return model


def _pipe(model: Any) -> Any:
    return cut(model, "transformer.h.1", chunks=2)


def _data(count: int) -> list[LABELS]:
    """Sentences with different numbers of ignored labels, and a column that no model takes."""
    tokens = torch.randint(3, 50, (count, 9), generator=torch.Generator().manual_seed(count))
    labels = tokens.clone()
    for row in range(count):
        labels[row, : row % 4] = -100
    return [{"input_ids": one, "labels": other, "sentence": one} for one, other in zip(tokens, labels, strict=True)]


def _trainer(model: Any, folder: Path, **settings: Any) -> Any:
    """A plain Trainer with default arguments, except for numbers of steps and intervals."""
    import transformers  # noqa: PLC0415 - an extra

    arguments = transformers.TrainingArguments(
        str(folder),
        **{"use_cpu": True, "disable_tqdm": True, "report_to": [], "max_steps": 4, "logging_steps": 1},
        **{"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2, **settings},
    )
    return transformers.Trainer(model, arguments, train_dataset=_data(12), eval_dataset=_data(6))


@pytest.fixture(scope="module", params=[0.0, 0.1], ids=["plain", "smoothed"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The model and a pipe of it after the same training, with the best of several checkpoints loaded."""
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    # The label smoother of Hugging Face adds in float32.
    runs = SimpleNamespace(folder=tmp_path_factory.mktemp("trained"), smoothing=request.param)
    runs.tolerance = 1e-6 if request.param else 1e-10
    for name, wrap in (("plain", _unchanged), ("pipe", _pipe)):
        trainer = _trainer(wrap(_model()), runs.folder / name, label_smoothing_factor=request.param, **steps)
        trainer.train()
        setattr(runs, name, trainer)
    return runs


def test_trainer_trains_as_with_the_model(trained: SimpleNamespace) -> None:
    """This holds for the losses of training and evaluation, and for the best weights. Label smoothing shifts labels if
    the class name is that of a causal model."""
    histories = [
        [{key: log[key] for key in ("loss", "eval_loss", "grad_norm") if key in log} for log in run.state.log_history]
        for run in (trained.plain, trained.pipe)
    ]
    assert sum("eval_loss" in log for log in histories[0]) == 2
    for plain, pipe in zip(*histories, strict=True):
        assert pipe == pytest.approx(plain, rel=trained.tolerance)
    assert trained.pipe.state.best_metric == pytest.approx(trained.plain.state.best_metric, rel=trained.tolerance)
    assert_close(trained.pipe.model.state_dict(), trained.plain.model.state_dict(), trained.tolerance)


def test_trainer_predicts_as_with_the_model(trained: SimpleNamespace) -> None:
    seen, expected = (trainer.predict(_data(6)) for trainer in (trained.pipe, trained.plain))
    assert seen.predictions.shape == (6, 9, 50) and seen.label_ids.shape == (6, 9)
    assert_close(*(torch.tensor(prediction.predictions) for prediction in (seen, expected)), trained.tolerance)
    assert seen.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=trained.tolerance)


def test_trainer_saves_a_model_that_loads(trained: SimpleNamespace) -> None:
    """Tied weights are saved once, with the config, by `save_model` and by `save_pretrained`."""
    import transformers  # noqa: PLC0415 - an extra

    trained.pipe.save_model(str(trained.folder / "saved"))
    trained.pipe.model.save_pretrained(trained.folder / "pretrained")
    trained.plain.save_model(str(trained.folder / "expected"))
    config = (trained.folder / "expected" / "config.json").read_text()
    for name in ("saved", "pretrained"):
        files = {path.name for path in (trained.folder / name).iterdir()}
        assert files - {"training_args.bin"} == {"config.json", "generation_config.json", "model.safetensors"}
        assert (trained.folder / name / "config.json").read_text() == config
        again = transformers.AutoModelForCausalLM.from_pretrained(trained.folder / name)
        assert_close(again.state_dict(), trained.pipe.model.state_dict())


@pytest.mark.long
def test_trainer_resumes_as_with_the_model(trained: SimpleNamespace) -> None:
    """A pipe resumes from a checkpoint of a pipe, or of the model itself."""
    weights: list[LABELS] = []
    for wrap, saved in ((_unchanged, "plain"), (_pipe, "pipe"), (_pipe, "plain")):
        folder = trained.folder / f"again-{len(weights)}"
        trainer = _trainer(wrap(_model()), folder, label_smoothing_factor=trained.smoothing)
        trainer.train(resume_from_checkpoint=str(trained.folder / saved / "checkpoint-2"))
        weights.append(trainer.model.state_dict())
    for weight in weights[1:]:
        assert_close(weight, weights[0], trained.tolerance)


def test_trainer_takes_models_that_are_not_of_hugging_face(tmp_path: Path) -> None:
    class Regression(Chain):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            y = super().forward(x)
            return y if labels is None else {"loss": (y - labels).square().mean(), "logits": y}

    import transformers  # noqa: PLC0415 - an extra

    torch.manual_seed(0)
    plain, data = Regression().double(), [{"x": x, "labels": x.cos(), "other": x} for x in rows(6, 8)]
    results: list[Any] = []
    for model in (cut(copy.deepcopy(plain), chunks=2), plain):
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=1)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        trainer.train()
        results.append((trainer.evaluate()["eval_loss"], torch.tensor(trainer.predict(data).predictions)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-10)
    assert_close(results[0][1], results[1][1], 1e-10)


def test_a_pipe_on_several_devices_stays_where_it_is(tmp_path: Path) -> None:
    """Trainer moves a model to its device, and wraps it in `nn.DataParallel`, unless it has a map of devices."""
    pipe = _pipe(_model())
    assert pipe.hf_device_map == {} and _trainer(pipe, tmp_path).place_model_on_device
    pipe.devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert pipe.hf_device_map == {"": "cuda:0", "transformer.h.1": "cuda:1"}
    trainer = _trainer(pipe, tmp_path)
    assert trainer.is_model_parallel and not trainer.place_model_on_device


def test_accelerate_saves_and_loads_the_state(tmp_path: Path) -> None:
    import accelerate  # noqa: PLC0415 - an extra

    weights: list[LABELS] = []
    batch = {key: torch.stack([sentence[key] for sentence in _data(4)]) for key in ("input_ids", "labels")}
    count = (batch["labels"][:, 1:] != -100).sum()
    for wrap in (_unchanged, _pipe):
        accelerator = accelerate.Accelerator(cpu=True)
        model = wrap(_model())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))

        def step(model: Any = model, optimizer: Any = optimizer, accelerator: Any = accelerator) -> None:
            optimizer.zero_grad()
            accelerator.backward(model(**batch, num_items_in_batch=count).loss)
            optimizer.step()

        step()
        accelerator.save_state(str(tmp_path / wrap.__name__))
        step()
        expected = copy.deepcopy(model.state_dict())
        accelerator.load_state(str(tmp_path / wrap.__name__))
        step()
        assert_close(model.state_dict(), expected)
        weights.append(expected)
    assert_close(weights[1], weights[0], 1e-10)


def test_mixed_precision_of_accelerate_reaches_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate replaces the `forward` of the pipe, and restores it."""
    import accelerate  # noqa: PLC0415 - an extra

    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})  # the precision is set once per process
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    pipe = accelerator.prepare(cut(model := Chain(), chunks=2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(rows(4, 8).float())
    assert_close(pipe(rows(4, 8).float()), expected.float())
    again = accelerator.unwrap_model(pipe, keep_fp32_wrapper=False)
    before = again.statistics()["recordings"]
    again(rows(6, 8).float())
    assert again.statistics()["recordings"] > before  # it still runs in stages


@pytest.mark.usefixtures("process_group")
def test_a_pipe_is_a_pipe_and_a_model() -> None:
    """This includes copies, pickles and a sharded pipe."""
    import transformers  # noqa: PLC0415 - an extra

    pipe = _pipe(_model())
    sharded = _pipe(_model())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(sharded, FSDPModule)
    for copied in (pipe, copy.deepcopy(pipe), copy.copy(pipe), pickle.loads(pickle.dumps(pipe)), sharded):
        assert isinstance(copied, weft.Pipe) and isinstance(copied, transformers.GPT2LMHeadModel)
        assert inspect.signature(copied.forward) == inspect.signature(copied.module.forward)
        assert repr(copied).startswith("Pipe of GPT2LMHeadModel(\n  split=['transformer.h.1'], stages: 1 on cpu")
        copied(input_ids=ids(2)).logits.sum().backward()
        assert copied.statistics()["recordings"] == 1
    assert cut(Chain()).__class__ is Chain and type(cut(Chain())) is type(pipe)


_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 16, "patch_size": 8}
_TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 1}


def _blip() -> nn.Module:
    return hugging(
        *("Blip2", "Blip2ForConditionalGeneration"),
        text_config={
            "model_type": "opt",
            "word_embed_proj_dim": 16,
            "ffn_dim": 32,
            "dropout": 0.0,
            "vocab_size": 50,
            **_TEXT,
        },
        vision_config=_VISION,
        qformer_config={**_VISION, "encoder_hidden_size": 16, "vocab_size": 50},
        num_query_tokens=4,
        image_token_index=45,
    )()


_EXPERTS = {"num_experts_per_tok": 1, "num_local_experts": 2, "experts_implementation": "eager"}


@pytest.mark.parametrize(
    ("make", "inputs", "split"),
    [
        (HUGGING["llava"].make, HUGGING["llava"].inputs, HUGGING["llava"].split),
        (_blip, HUGGING["llava"].inputs, ["language_model.model.decoder.layers.1"]),
        (
            hugging("GraniteMoe", "GraniteMoeForCausalLM", **_TEXT, **_EXPERTS, num_key_value_heads=1),
            *(lambda n: {"input_ids": ids(n)}, ["model.layers.1"]),
        ),
        (
            hugging(
                *("SwitchTransformers", "SwitchTransformersForConditionalGeneration"),
                **{"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
                **{"num_experts": 2, "expert_capacity": 64, "experts_implementation": "eager"},
            ),
            *(lambda n: {"input_ids": ids(n), "decoder_input_ids": ids(n, 7)}, ["encoder.block.1", "decoder.block.1"]),
        ),
    ],
    ids=["llava", "blip2", "granitemoe", "switch"],
)
def test_no_cache_is_requested(make: Any, inputs: Any, split: Any) -> None:
    """The config of the text can be nested, and ``use_cache`` can be in ``**kwargs``."""
    torch.manual_seed(0)
    model, batch = make().double().eval(), inputs(4)
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    assert model.config.get_text_config().use_cache
    assert_close(cut(model, *split, chunks=2)(**batch).logits, model(**batch).logits, 1e-10)


@pytest.mark.usefixtures("double")
def test_no_cache_is_requested_by_a_second_config() -> None:
    """Trainer switches caches off in the model's config, but the decoder of T5 has a copy of it."""
    settings = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    model: Any = hugging("T5", "T5ForConditionalGeneration", **settings, decoder_start_token_id=0)().double()
    model.config.use_cache = False
    assert model.decoder.config.use_cache
    batch = {"input_ids": ids(4), "labels": ids(4, 7)}
    assert_close(cut(model, "decoder.block.0", chunks=2)(**batch).logits, model(**batch).logits, 1e-10)


def test_use_cache_of_other_models_is_theirs() -> None:
    class Scaled(Chain):
        def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
            return super().forward(x) * (2 if use_cache else 1)

    model = Scaled().double()
    assert_close(cut(model, chunks=2)(rows(4, 8)), model(rows(4, 8)))


def test_dispatched_pipe_still_runs_in_stages() -> None:
    import accelerate  # noqa: PLC0415 - an extra

    plain, batch = _model(), {"input_ids": ids(4), "labels": ids(4)}
    plain(**batch).loss.backward()
    pipe = _pipe(_model())
    names = ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h", "transformer.ln_f", "lm_head"]
    dispatched = accelerate.dispatch_model(pipe, dict.fromkeys(names, "cpu"), force_hooks=True)
    dispatched(**batch).loss.backward()
    assert dispatched is pipe and pipe.statistics()["recordings"] == 1
    assert_close([x.grad for x in pipe.parameters()], [x.grad for x in plain.parameters()], 1e-12)


_MAP = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.h.0": 0, "transformer.h.1": 1, "transformer.ln_f": 1}


def test_device_map_becomes_stages() -> None:
    model = _model()
    model.hf_device_map = {**_MAP, "lm_head": 0}
    cuda = [torch.device("cuda", index) for index in (0, 1, 0)]
    assert split_by_device_map(model) == (["transformer.h.1", "lm_head"], cuda)
    pipe = weft.Pipe(model, chunks=2, split="device_map", devices=["cpu"] * 3)
    assert pipe.split == ["transformer.h.1", "lm_head"]
    assert_close(pipe(input_ids=ids(4)).logits, _model()(input_ids=ids(4)).logits, 1e-12)


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        (None, "has no hf_device_map"),
        ({"": 0}, "has {'': 0}"),
        ({**_MAP, "lm_head": "cpu"}, "device_map has put lm_head on the CPU"),
        ({"transformer.wte": 0, "transformer.h.1.mlp.c_fc.weight": 1}, "weight, which is not a module"),
    ],
    ids=["none", "whole", "offloaded", "parameter"],
)
def test_device_map_that_gives_no_stages_is_refused(device_map: Any, words: str) -> None:
    model = _model()
    if device_map is not None:
        model.hf_device_map = device_map
    with pytest.raises(UsageError, match=words):
        weft.Pipe(model, chunks=2, split="device_map")


def test_keys_and_values_that_layers_share_are_refused() -> None:
    layers = {"layer_types": ["full_attention"] * 4, "activation_sparsity_pattern": [0.0] * 4, "head_dim": 8}
    sizes = {"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8, "laurel_rank": 4, **layers}
    sizes |= {**_TEXT, "num_hidden_layers": 4, "num_key_value_heads": 1, "intermediate_size": 32}
    model = hugging("Gemma3nText", "Gemma3nForCausalLM", **sizes, num_kv_shared_layers=2, altup_num_inputs=2)()
    with pytest.raises(SplitError, match=r"a KVSharingDict carries tensors .* layers share keys and values") as seen:
        cut(model, "model.layers.2", chunks=2)(input_ids=ids(2))
    assert "use_cache" not in str(seen.value)


@pytest.mark.usefixtures("double")
def test_packed_images_are_given_by_row() -> None:
    """Qwen2-VL takes the patches of all images in one tensor. This tests the recipe of docs/which_models.md."""
    import transformers  # noqa: PLC0415 - an extra

    class ByRow(transformers.Qwen2VLForConditionalGeneration):
        def forward(self, pixel_values: Any = None, image_grid_thw: Any = None, **others: Any) -> Any:
            counts = image_grid_thw.prod(1).tolist()
            packed = torch.cat([patches[:count] for patches, count in zip(pixel_values, counts, strict=True)])
            return super().forward(pixel_values=packed, image_grid_thw=image_grid_thw, **others)

    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.Qwen2VLConfig(
        text_config={**_TEXT, "vocab_size": 60, "num_key_value_heads": 1, "rope_parameters": rope},
        vision_config={
            **{"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2},
            **{"spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3},
        },
        **{"image_token_id": 51, "vision_start_token_id": 53, "vision_end_token_id": 54},
    )
    model = ByRow(config)
    plain = transformers.Qwen2VLForConditionalGeneration(config)
    plain.load_state_dict(model.state_dict())
    grids = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 2], [1, 4, 4]])
    tokens, patches = ids(4, 12) % 50, [torch.randn(count, 12) for count in grids.prod(1).tolist()]
    for row, patch in enumerate(patches):
        tokens[row, 1], tokens[row, 2 : 2 + len(patch) // 4] = 53, 51
    batch = {"input_ids": tokens, "image_grid_thw": grids, "mm_token_type_ids": (tokens == 51).long()}
    pipe = cut(model, "model.language_model.layers.1", chunks=2)
    result = pipe(**batch, pixel_values=nn.utils.rnn.pad_sequence(patches, batch_first=True)).logits
    expected = plain(**batch, pixel_values=torch.cat(patches)).logits
    assert_close(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 1e-10)
    packed = cut(plain, "model.language_model.layers.1", chunks=2)
    with pytest.raises(BatchError, match=r"(?s)several rows for one sample.*pixel_values'\]: 48 rows"):
        packed(**batch, pixel_values=torch.cat(patches))
