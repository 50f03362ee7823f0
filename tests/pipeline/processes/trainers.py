"""Training by Trainer and accelerate, with a model, or with a pipe of it over ranks."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import torchweft as weft
from tests.pipeline.split.zoo import gpt2
from tests.processes import ROOT
from torchweft.pipeline.processes import hugging_face

Wrap = Callable[[nn.Module], Any]


def causal_loss(logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
    """The loss of Hugging Face, without its cast to float32."""
    shifted = labels[:, 1:]
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten(), reduction="sum")
    return total / ((shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def sentences(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(3, 50, (count, 9), generator=torch.Generator().manual_seed(count))
    labels = [row.masked_fill(torch.arange(9) < number % 4, -100) for number, row in enumerate(tokens)]
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def language_model() -> Any:
    torch.manual_seed(0)
    model: Any = gpt2(layers=2).double()
    model.loss_function = causal_loss
    return model


def unchanged(model: nn.Module) -> nn.Module:
    return model


def over_ranks(model: nn.Module) -> weft.Pipe:
    return weft.Pipe(model, chunks=2, split=["transformer.h.1"], group=dist.group.WORLD)


def train(folder: str, wrap: Wrap = over_ranks, resume: str | None = None) -> list[dict[str, float]]:
    """The numbers that Trainer logs, with clipping, accumulation, evaluation, and the best of several checkpoints."""
    import transformers  # noqa: PLC0415 - an extra

    arguments = transformers.TrainingArguments(
        folder,
        **{"use_cpu": True, "disable_tqdm": True, "report_to": [], "max_steps": 4, "logging_steps": 1},
        **{"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2},
        **{"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "weight_decay": 0.1},
        **{"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True},
    )
    model = wrap(language_model())
    trainer = transformers.Trainer(model, arguments, train_dataset=sentences(22), eval_dataset=sentences(6))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/saved")
    predicted = trainer.predict(sentences(6))
    scores = {"rows": len(predicted.predictions), "sum": float(predicted.predictions.sum()), **trainer.evaluate()}
    wanted = ("loss", "eval_loss", "grad_norm", "rows", "sum")
    return [{key: log[key] for key in wanted if key in log} for log in [*trainer.state.log_history, scores]]


def loop(folder: str, replicas: int, piped: bool = True) -> dict[str, Any]:
    """An ordinary loop of accelerate. Without `piped`, each process has the whole model."""
    import accelerate  # noqa: PLC0415 - an extra

    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.utils.set_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    rows = TensorDataset(torch.randn(42, 6).double(), torch.randint(3, (42,)))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = plain
    if piped:
        shape = replicas, dist.get_world_size() // replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
        model = weft.Pipe(plain, chunks=2, balance=[3, 2], group=mesh["pp"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    loaders = DataLoader(rows, 8 // replicas, shuffle=True), DataLoader(rows, 8 // replicas)
    model, optimizer, scheduler, *loaders = accelerator.prepare(model, optimizer, scheduler, *loaders)
    norms: list[float] = []

    def epoch() -> None:
        for x, y in loaders[0]:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    def weights() -> dict[str, Tensor]:
        return {key: weight.clone() for key, weight in accelerator.get_state_dict(model).items()}

    epoch()
    accelerator.save_state(folder)
    saved = weights()
    epoch()
    accelerator.load_state(folder)
    loaded = weights()
    with torch.no_grad():
        chosen = [accelerator.gather_for_metrics((model(x).argmax(-1), y)) for x, y in loaders[1]]
    counts = [len(y) for _, y in chosen]
    texts = [accelerator.gather_for_metrics([str(int(label)) for label in y]) for _, y in loaders[1]]
    assert [label for batch in texts for label in batch] == [str(int(label)) for _, y in chosen for label in y]
    return {"norms": norms, "saved": saved, "loaded": loaded, "rate": scheduler.get_last_lr(), "counts": counts}


def run_tutorial(folder: str, over_ranks: bool) -> dict[str, Any]:
    """Train, evaluate, save and load as the page of the tutorial does, in float64 and with fewer steps."""
    page = (ROOT / "docs" / "tutorials" / "hugging_face.md").read_text("utf-8")
    model, cut, training, _, saving = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:5]
    changes = {"max_steps=40": "max_steps=4", "tempfile.mkdtemp()": repr(folder)}
    if over_ranks:
        changes['devices=["cpu", "cpu"]'] = "group=torch.distributed.group.WORLD"
    program = "\n".join([model, cut, training, saving])
    for before, after in changes.items():
        assert before in program
        program = program.replace(before, after)
    names: dict[str, Any] = {}
    torch.set_default_dtype(torch.float64)
    try:
        exec(program, names)
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {key: x.clone() for key, x in names["plain"].state_dict().items()}
    return {"loss": names["result"].training_loss, "eval": names["metrics"]["eval_loss"], "weights": weights}


def fine_tune(folder: str, kind: str, wrap: Wrap) -> list[float]:
    """The losses and norms of training adapters, by Trainer or by the SFTTrainer of TRL."""
    import peft  # noqa: PLC0415 - an extra
    import transformers  # noqa: PLC0415 - an extra
    import trl  # noqa: PLC0415 - an extra

    settings = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "max_steps": 3, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_grad_norm": 0.01}
    adapter = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = wrap(peft.get_peft_model(language_model(), adapter))
    tokens = [row["input_ids"].tolist() for row in sentences(20)]
    if kind == "sft":
        tokens = [row[: 4 + 5 * number % 6] for number, row in enumerate(tokens)]  # TRL pads each batch to its longest
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    if kind == "lora":
        trainer: Any = transformers.Trainer(
            model, transformers.TrainingArguments(folder, **settings), train_dataset=tensors_of(rows)
        )
    else:
        import datasets  # noqa: PLC0415 - an extra
        import tokenizers  # noqa: PLC0415 - an extra

        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(k): k for k in range(50)}, unk_token="0"))
        trainer = trl.SFTTrainer(
            model,
            trl.SFTConfig(folder, bf16=False, **settings),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0"
            ),
        )
    trainer.train()
    trainer.save_model(f"{folder}/adapter")
    return [log[key] for log in trainer.state.log_history if "loss" in log for key in ("loss", "grad_norm")]


def tensors_of(rows: list[dict[str, list[int]]]) -> list[dict[str, Tensor]]:
    return [{key: torch.tensor(row) for key, row in of_row.items()} for of_row in rows]


def adapted_over_ranks(model: nn.Module) -> weft.Pipe:
    return weft.Pipe(model, chunks=2, split=["base_model.model.transformer.h.1"], group=dist.group.WORLD)


def save_both(folder: str) -> None:
    """The files of the pipe, and those of the model that it wraps."""
    model = language_model()
    pipe = over_ranks(model)
    pipe.save_pretrained(f"{folder}/pipe")
    model.save_pretrained(f"{folder}/model")


def save_into_file(path: str) -> str:
    """The error of each rank if the first one cannot write."""
    pipe = over_ranks(language_model())
    try:
        pipe.save_pretrained(f"{path}/inside")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def wrap_in_ddp() -> None:
    DistributedDataParallel(over_ranks(language_model()))


class Counting(IterableDataset[Tensor]):
    """Rows that have no length, which accelerate reads on the first process and sends."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(11.0))


def streamed_rows() -> list[float]:
    import accelerate  # noqa: PLC0415 - an extra

    accelerate.state.AcceleratorState._reset_state(True)
    pipe = over_ranks(language_model())
    _, loader = accelerate.Accelerator(cpu=True).prepare(pipe, DataLoader(Counting(), 3))
    return torch.cat([*loader]).tolist()


def scaled_loss() -> None:
    import accelerate  # noqa: PLC0415 - an extra

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as for fp16, which accelerate has on GPUs only
    accelerator.prepare(over_ranks(language_model()))


def sampler_of_all_processes() -> None:
    import accelerate  # noqa: PLC0415 - an extra

    accelerate.state.AcceleratorState._reset_state(True)
    pipe = over_ranks(language_model())
    loader = DataLoader(sentences(4), 2, sampler=DistributedSampler(sentences(4)))
    accelerate.Accelerator(cpu=True).prepare(pipe, loader)


def loader_before_the_pipe() -> None:
    import accelerate  # noqa: PLC0415 - an extra

    hugging_face._pipes.clear()  # errors of earlier tests can keep pipes
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(DataLoader(sentences(4), 2))
    accelerator.prepare(over_ranks(language_model()))
