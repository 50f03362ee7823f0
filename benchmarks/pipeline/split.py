"""Any model in stages, compared with torch's tracer: which models run exactly, and the cost of a program.

    torchweft    weft.Pipe(model, split=[name])    loss and gradients against a plain loop, with 8 and then 5 rows
    torch        pipelining.pipeline(...)          traced stages, run one after the other with 2 and then 3 rows

Costs are measured with one micro-batch of a GPT-2 with 12 layers in 4 stages. The recorded program is compared with
forward(), both with backward and in the caller's thread. A recording is measured in plain forwards. A step of 8
micro-batches with labels is compared with a loop over them. The choice of its programs, and the call of forward() on
all rows up to the stages, are shares of the step.

Dynamic padding consists of training steps with random rows and lengths, so that most micro-batches have a new shape.
Each batch goes through the pipe and the plain model in turn. The processor time of all steps is compared.
"""

import copy
import io
import logging
import random
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.harness import progress, race
from benchmarks.table import Row, Table, at_most
from torchweft.core.pytree import flatten, unflatten
from torchweft.pipeline.microbatch import micro_sizes, plan_split
from torchweft.pipeline.split.program import InterBlockParameters
from torchweft.pipeline.split.program_cache import Trials

_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
_LLAMA = {**_SMALL, "num_key_value_heads": 1, "use_cache": False}
_GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64, "use_cache": False}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "use_cache": False}
_MIXTRAL = {**_LLAMA, "num_local_experts": 4, "experts_implementation": "eager"}
_VIT = {**_SMALL, "image_size": 16, "patch_size": 4, "num_labels": 5}
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "GPT-2, tied": ("GPT2Config", "GPT2LMHeadModel", _GPT2, ("transformer.h.2",)),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA, ("model.layers.2",)),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8}, ("model.layers.2",)),
    "BERT, tied": ("BertConfig", "BertForMaskedLM", _SMALL, ("bert.encoder.layer.2",)),
    "T5, tied": ("T5Config", "T5ForConditionalGeneration", _T5, ("encoder.block.2", "decoder.block.1")),
    "ViT": ("ViTConfig", "ViTForImageClassification", _VIT, ("vit.layers.2",)),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", _MIXTRAL, ("model.layers.2",)),
}


class UNet(nn.Module):
    """Model with long skips in local variables."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        fine = self.down(pixel_values).relu()
        coarse = self.middle(nn.functional.max_pool2d(fine, 2)).relu()
        return self.up(torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=2.0)], 1))


def run(quick: bool) -> Table:
    """One row for each model, and one for each cost."""
    logging.disable(logging.WARNING)
    try:
        return _table(quick)
    finally:
        logging.disable(logging.NOTSET)


def _table(quick: bool) -> Table:
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError:
        transformers = None
    rows: list[Row] = []
    makers: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {"U-Net": (UNet, ("middle", "up"))}
    if transformers is not None:
        for name, (config, kind, options, split) in list(MODELS.items())[: 1 if quick else None]:
            settings = getattr(transformers, config)(**options, vocab_size=50, pad_token_id=0)
            makers[name] = (lambda kind=kind, settings=settings: getattr(transformers, kind)(settings)), split
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (make, split) in makers.items():
            progress(name)
            torch.manual_seed(0)
            model = make().eval()  # no dropout, so that results can be compared
            ours = _ours(model, split)
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # the tracer prints whole graphs
                theirs = _theirs(model, split)
            rows.append({"model": name, "torchweft": ours, "torch's tracer": theirs})
        if transformers is not None:
            for width in (64,) if quick else (64, 256):
                rows += _costs(transformers, width, rounds=2 if quick else 25)
            progress("dynamic padding")
            rows += _dynamic_padding(transformers, steps=12 if quick else 401)
            progress("new lengths")
            rows += _new_lengths(
                transformers, rounds=1 if quick else 5, lengths=range(20, 24) if quick else range(20, 50)
            )
    notes = [] if transformers is not None else ["transformers is not installed; the extra `hf` contains it"]
    return Table("any model in stages: comparison with the tracer of torch.distributed, and costs", rows, notes)


def _inputs(model: nn.Module, rows: int) -> dict[str, Tensor]:
    if isinstance(model, UNet) or "ViT" in type(model).__name__:
        return {"pixel_values": torch.randn(rows, 3, 16, 16)}
    tokens = torch.randint(3, 50, (rows, 12))
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if "T5" in type(model).__name__ else {})


def _main(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else getattr(output, "logits", flatten(output)[0][0])


def _ours(model: nn.Module, split: tuple[str, ...]) -> str:
    """Largest difference of outputs and gradients from a plain loop over the same micro-batches."""
    plain = copy.deepcopy(model)
    model = copy.deepcopy(model)
    pipe = weft.Pipe(model, chunks=4, split=split, devices=["cpu"] * (len(split) + 1))
    worst = 0.0
    for rows in (8, 5):
        inputs = _inputs(model, rows)
        plan, leaves = plan_split(inputs, 4)
        expected = torch.cat([_main(plain(**unflatten(plan.structure, piece))) for piece in plan.split(leaves)])
        actual = _main(pipe(**inputs))
        for trained, output in ((plain, expected), (model, actual)):
            trained.zero_grad()
            output.square().mean().backward()
        pairs = [
            (expected, actual),
            *((p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True)),
        ]
        worst = max(worst, *(float((a - b).abs().max().detach()) for a, b in pairs if a is not None and b is not None))
    return f"differs by {worst:.0e}" if worst > 1e-5 else f"exact ({worst:.0e})"


def _theirs(model: nn.Module, split: tuple[str, ...]) -> str:
    """Result of torch's tracer for the same model and split points."""
    from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: PLC0415 - the import takes a second

    traced = copy.deepcopy(model)
    example = _inputs(model, 2)
    try:
        pipe = pipeline(traced, (), mb_kwargs=example, split_spec={name: SplitPoint.BEGINNING for name in split})
        faults: list[str] = []
        if not torch.allclose(_main(pipe(**example)), _main(model(**example)), atol=1e-5):
            faults.append("other numbers")
        names = {name for name, _ in pipe.split_gm.named_parameters(remove_duplicate=False)}
        originals = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if len({id(p) for p in pipe.split_gm.parameters()}) != len({id(p) for p in model.parameters()}):
            faults.append("ties lost")
        if not originals <= {name.partition(".")[2] for name in names}:
            faults.append("keys change")
        try:
            other = _inputs(model, 3)
            torch.testing.assert_close(_main(pipe(**other)), _main(model(**other)), rtol=1e-4, atol=1e-5)
        except Exception:
            faults.append("rows fixed")
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:60] if str(error) else ''}"
    return ", ".join(faults) or "exact"


def _gpt2(transformers: Any, width: int) -> nn.Module:
    """A GPT-2 with 12 layers, without dropout."""
    settings = {"n_embd": width, "n_layer": 12, "n_head": 4, "n_positions": 64, "vocab_size": 500, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)).eval()


def _costs(transformers: Any, width: int, rounds: int) -> list[Row]:
    model = _gpt2(transformers, width)
    tokens = torch.randint(0, 500, (4, 32))
    split = ["transformer.h.3", "transformer.h.6", "transformer.h.9"]
    options = {"split": split, "devices": ["cpu"] * 4, "executor": "serial"}
    pipe = weft.Pipe(model, chunks=8, sample={"input_ids": tokens}, **options)
    cut = pipe._layout._current_model(pipe)
    program, code = cut.latest, InterBlockParameters(model, set().union(*cut.members.owned))  # as in the stages
    leaves = [tokens if value.key == "input_ids" else False for value in program.recording.inputs]  # and use_cache

    def trained(call: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            call().logits.sum().backward()
            model.zero_grad()

        return both

    batch = {"input_ids": tokens.repeat(2, 1), "attention_mask": torch.ones(8, 32, dtype=torch.long)}
    choose = partial(cut.choose, (), batch, 8, 0, check=True, graph=False, outputs=True)
    choose(Trials())
    labels = batch["input_ids"]

    def in_parts() -> None:
        for ids, mask, goal in zip(*(x.split(1) for x in (*batch.values(), labels)), strict=True):
            (model(input_ids=ids, attention_mask=mask, labels=goal).loss / 8).backward()
        model.zero_grad()

    def step() -> None:
        pipe(**batch, labels=labels).loss.backward()
        model.zero_grad()

    for _ in range(3):
        step()
    chosen = choose(Trials())
    result = race(
        {
            "plain": trained(lambda: model(input_ids=tokens)),
            "program": trained(lambda: program.replay(leaves, code.get, {})),
            "forward": lambda: model(input_ids=tokens),
            "record": lambda: cut._recorder.record((), {"input_ids": tokens}),
            "choose": lambda: choose(Trials()),
            "calls": lambda: _calls_until_the_stages(cut, chosen),
            "in parts": in_parts,
            "step": step,
        },
        rounds=rounds,
        sample=0.01 if rounds < 5 else 0.1,
    )
    program_cost = result.ratio("program", "plain")
    figures = {
        "program / plain, forward and backward": (program_cost, 1.02),
        "a recording, in plain forwards": (result.ratio("record", "forward"), 4.0),
        "choosing programs of a step, ms": (result.median("choose") * 1e3, 0.5),
        "forward() on all rows before the stages, share of a step": (result.ratio("calls", "step"), 0.02),
        "choosing programs, share of a step": (result.ratio("choose", "step"), 0.02),
        "step with labels / micro-batches in a loop": (result.ratio("step", "in parts"), 1.05),
    }
    return [
        {"model": f"GPT-2, 12 layers, d {width}", "figure": name, "measured": f"{value:.3f}", **at_most(value, limit)}
        for name, (value, limit) in figures.items()
    ]


def _calls_until_the_stages(cut: Any, chosen: Any) -> None:
    """Call forward() on all rows until its end begins, without the stages."""

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        cut.run(chosen, stop)


def _dynamic_padding(transformers: Any, steps: int) -> list[Row]:
    """Compare the processor time of steps with 1 to 12 rows of 4 to 40 tokens, 4 micro-batches, 2 stages."""
    model, chunks, draw = _gpt2(transformers, 64), 4, random.Random(0)
    pipe = weft.Pipe(model, chunks=chunks, split=["transformer.h.6"], devices=["cpu"] * 2, executor="serial")

    def in_parts(**batch: Tensor) -> None:
        for ids, mask in zip(*(x.split(micro_sizes(len(x), chunks)) for x in batch.values()), strict=True):
            model(input_ids=ids, attention_mask=mask).logits.sum().backward()

    works: dict[str, Callable[..., Any]] = {
        "plain": lambda **batch: model(**batch).logits.sum().backward(),
        "in parts": in_parts,
        "pipe": lambda **batch: pipe(**batch).logits.sum().backward(),
    }
    seconds = dict.fromkeys(works, 0.0)
    for _ in range(steps):
        count, length = draw.randint(1, 12), draw.randint(4, 40)
        mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (count, 1))).long()
        batch = {"input_ids": torch.randint(0, 500, (count, length)), "attention_mask": mask}
        for name, work in works.items():
            start = time.process_time()
            work(**batch)
            seconds[name] += time.process_time() - start
            model.zero_grad()
    recordings = pipe.statistics()["recordings"]
    ratio, in_micro_batches = (seconds["pipe"] / seconds[name] for name in ("plain", "in parts"))
    label = f"dynamic padding, {steps} steps, {recordings} recordings"
    return [
        {"model": label, "figure": "pipe / plain", "measured": f"{ratio:.2f}", **at_most(ratio, 3.0)},
        {"model": label, "figure": "pipe / plain in micro-batches", "measured": f"{in_micro_batches:.2f}"},
    ]


def _new_lengths(transformers: Any, rounds: int, lengths: range) -> list[Row]:
    """Compare the processor time of steps whose length is new, and known, with a loop over micro-batches."""
    model, chunks = _gpt2(transformers, 64), 4
    ratios: dict[str, list[float]] = {"new": [], "known": []}
    forwards: list[float] = []

    def batch(length: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 500, (8, length))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    def in_parts(**batch: Tensor) -> None:
        for ids, mask, labels in zip(*(x.split(2) for x in batch.values()), strict=True):
            (model(input_ids=ids, attention_mask=mask, labels=labels).loss / chunks).backward()

    def seconds(work: Callable[..., Any], **arguments: Tensor) -> float:
        start = time.process_time()
        work(**arguments)
        return time.process_time() - start

    for _ in range(rounds):
        pipe: Any = weft.Pipe(model, chunks=chunks, split=["transformer.h.6"], devices=["cpu"] * 2, executor="serial")

        def step(pipe: Any = pipe, **batch: Tensor) -> None:
            pipe(**batch).loss.backward()

        for length in range(10, 15):  # two recordings, and the three programs that are compared
            step(**batch(length))
        in_pipe: list[float] = []
        for of_name in ratios.values():
            times = {"pipe": 0.0, "parts": 0.0, "forward": 0.0}
            for length in random.Random(0).sample(lengths, len(lengths)):
                arguments = batch(length)
                times["pipe"] += seconds(step, **arguments)
                times["parts"] += seconds(in_parts, **arguments)
                times["forward"] += seconds(model, **{key: x[:2] for key, x in arguments.items()})
                model.zero_grad()
            of_name.append(times["pipe"] / times["parts"])
            in_pipe.append(times["pipe"])
        forwards.append((in_pipe[0] - in_pipe[1]) / times["forward"])
    figures = {
        "steps of new lengths / micro-batches in a loop": (median(ratios["new"]), 1.3),
        "steps of known lengths / micro-batches in a loop": (median(ratios["known"]), 1.05),
        "a new length, in forwards of a micro-batch": (median(forwards), 3.0),
    }
    label = f"{len(lengths)} lengths, {pipe.statistics()['recordings']} recordings"
    return [
        {"model": label, "figure": name, "measured": f"{value:.2f}", **at_most(value, limit)}
        for name, (value, limit) in figures.items()
    ]
