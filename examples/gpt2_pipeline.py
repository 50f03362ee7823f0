"""Across devices: a GPT-2 of Hugging Face is trained in stages, and transformers loads its checkpoint.

    pip install "torchweft[hf]"
    python examples/gpt2_pipeline.py [--steps 60] [--stages 3] [--seed 0]

    ids ──> stage 0: wte, wpe, h.0 ──> stage 1: h.1, h.2 ──> stage 2: h.3, ln_f, lm_head ──> loss
              └───────────────── the tied weight of wte and lm_head ─────────────┘

The model stays unchanged: `weft.Pipe` cuts its own forward(). On a machine with GPUs, devices are "cuda:0", "cuda:1"
and so on. The text is that of Python's own help topics, so nothing is downloaded, and the model is tiny and untrained.
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import torchweft as weft

ROWS, LENGTH, CHUNKS = 16, 48, 4


def tokens() -> torch.Tensor:
    """The text as numbers of its characters, in rows of `LENGTH`."""
    text = "".join(topics.values())[:120_000]
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[letter] for letter in text])
    return numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)


def train(steps: int, stages: int, seed: int) -> tuple[GPT2LMHeadModel, weft.Pipe, list[float]]:
    """The trained model, its pipe, and the loss of every step."""
    torch.manual_seed(seed)
    rows = tokens()
    size = {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "vocab_size": int(rows.max()) + 1}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, use_cache=False))

    sample = {"input_ids": rows[: ROWS // CHUNKS], "labels": rows[: ROWS // CHUNKS]}
    pipe = weft.Pipe(model, chunks=CHUNKS, devices=["cpu"] * stages, split="auto", sample=sample)
    print(f"cut before {', '.join(pipe.split)}")

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses: list[float] = []
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (ROWS,))]
        loss = pipe(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:4d}   loss {losses[-1]:.3f}")
    for route in pipe.routes:
        print(f"  {route.bytes:8d} bytes per micro-batch, stage {route.source} -> {route.readers}: {route.name}")
    return model, pipe, losses


def main(steps: int, stages: int, seed: int) -> tuple[float, float]:
    """Train, save and reload. Returns the loss of the first step, and the mean loss of the last five."""
    model, pipe, losses = train(steps, stages, seed)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        batch = tokens()[:ROWS]
        one, other = pipe.eval()(input_ids=batch, labels=batch).loss, again.eval()(input_ids=batch, labels=batch).loss
    print(f"loss of the pipe {one:.6f}, of the checkpoint in transformers {other:.6f}")
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return losses[0], sum(losses[-5:]) / 5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.stages, arguments.seed)
