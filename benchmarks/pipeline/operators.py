"""Operator duration above which threads are faster, and whether "auto" chooses accordingly.

Threads that launch operators of a few microseconds compete for the interpreter's lock. Long operators run in parallel.
The model is a chain of linear layers of varying width. Every layer counts as eight operators per micro-batch: addmm and
gelu, their backward (gelu, two products, a sum over rows), and two additions of gradients.
"""

import torch
from torch import nn

from benchmarks.harness import progress, race
from benchmarks.pipeline.work import PEER, agree, decide, in_one_graph, in_two_threads, peer_of, pipe_of, step
from benchmarks.table import Row, Table, at_least

STAGES, CHUNKS, LAYERS = 2, 8, 8
OPERATORS_PER_LAYER = 8
REQUIRED = 0.95
PLAIN = "one thread"
PLAIN_BY_TWO = "two threads"
SIZES = [(8, 16), (16, 96), (24, 128), (32, 160), (64, 192), (64, 320), (128, 448), (256, 640)]
"""Rows of a micro-batch, and width."""


def run(quick: bool) -> Table:
    """Speed relative to one thread without torchweft, by mean operator time."""
    rows = [_row(*size, quick=quick) for size in (SIZES[:2] if quick else SIZES)]
    title = f"speed over the same {CHUNKS} micro-batches in one thread without torchweft, {STAGES} stages"
    notes = ["  one thread is 1; more is faster; only auto is judged; two threads: two intra-op threads"]
    return Table(title, rows, notes)


def _row(rows: int, width: int, *, quick: bool) -> Row:
    progress(f"{rows} rows, width {width}")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)])
    x, parameters = torch.randn(rows * CHUNKS, width), list(model.parameters())
    pipes = {executor: pipe_of(model, STAGES, CHUNKS, "never", executor) for executor in ("auto", "threads")}
    models = {PLAIN: in_one_graph(model, CHUNKS), **pipes}
    if (peer := peer_of(model, STAGES, CHUNKS, "never")) is not None:
        models[PEER] = peer
    candidates = {name: step(forward, parameters, x, torch.mean) for name, forward in models.items()}
    candidates[PLAIN_BY_TWO] = in_two_threads(candidates[PLAIN])
    agree(candidates)
    choice = decide(pipes["auto"], candidates["auto"])
    result = race(candidates, rounds=2 if quick else 9, sample=0.02 if quick else 0.2)
    operator = result.median(PLAIN) / (CHUNKS * LAYERS * OPERATORS_PER_LAYER)
    speed = {name: 1 / result.ratio(name, PLAIN) for name in candidates}
    return {
        "rows x width": f"{rows} x {width}",
        "us per operator": f"{operator * 1e6:.1f}",
        **{name: f"{speed[name]:.2f}" for name in candidates if name != PLAIN},
        "auto chose": choice,
        **at_least(speed["auto"], REQUIRED),
        "rounds": result.note(),
    }
