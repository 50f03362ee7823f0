"""A report of a pipeline: when each action ran and its forecast, the live bytes, the crossing values, and the loss.

    python examples/report.py [--out torchweft-report] [--steps 80] [--seed 0]

    pipe.routes ──────────────> values that cross ───┐
    weft.Recorder ── events ──> timeline ──────────────┤
        │    └─────  bytes ───> memory curve ──────────┼──> report.html, one file that fetches nothing
        └── costs_from ──> forecast of other schedules ┘    trace.json, for https://ui.perfetto.dev

A classifier of scikit-learn's handwritten digits trains in four stages, with a thread for each. Then some steps are
recorded in three modes. GPipe keeps the activations of all micro-batches. 1F1B keeps those of at most one micro-batch
per remaining stage. With recomputation a stage keeps only its inputs and runs forward a second time.
"""

import argparse
import copy
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from torchweft import report
from torchweft.pipeline import Forecast, MemoryRecorder, costs_from

STAGES, CHUNKS, ROWS, WIDTH = 4, 8, 512, 384
SPLIT = ["hidden.2", "hidden.4", "hidden.6"]  # a stage begins at each of them
WAYS = {  # name in the report: schedule, checkpoint
    "gpipe": ("gpipe", "never"),
    "1f1b": ("1f1b", "never"),
    "gpipe, recomputed": ("gpipe", "always"),
}
WARM_UP, RECORDED = 3, 7


class Classifier(nn.Module):
    """Images N x 64 to scores N x 10, with a skip connection from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, WIDTH)
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(7)
        )
        self.leave = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = first = self.enter(images)
        for layer in self.hidden:
            x = layer(x)
        return self.leave(x + first)


def pipe_of(model: nn.Module, schedule: str, checkpoint: str) -> weft.Pipe:
    """Four stages, each in its own thread, so that stages overlap if there are enough cores."""
    settings = {"schedule": schedule, "checkpoint": checkpoint, "executor": "threads"}
    devices = ["cpu"] * STAGES
    return weft.Pipe(model, split=SPLIT, chunks=CHUNKS, devices=devices, loss=functional.cross_entropy, **settings)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, N x 64 from 0 to 1, and their digits: for training, and 297 held out."""
    bundled = load_digits()
    order = torch.randperm(len(bundled.target))
    images, digits = torch.tensor(bundled.images).float().flatten(1)[order] / 16, torch.tensor(bundled.target)[order]
    return images[297:], digits[297:], images[:297], digits[:297]


class Training(NamedTuple):
    """The loss of every step, and the accuracy on held-out digits, in percent, after every tenth step."""

    losses: list[float]
    accuracies: list[tuple[float, float]]


def train(pipe: weft.Pipe, steps: int, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> Training:
    images, digits, held_out, held_out_digits = data
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    training = Training([], [])
    for step in range(1, steps + 1):
        rows = torch.randint(len(images), (ROWS,))
        optimizer.zero_grad()
        loss = pipe(images[rows], target=digits[rows])
        loss.backward()
        optimizer.step()
        training.losses.append(loss.item())
        if step % 10 == 0 or step == steps:
            with torch.no_grad():
                right = (pipe.eval()(held_out).argmax(1) == held_out_digits).float().mean().item()
            pipe.train()
            training.accuracies.append((step, 100 * right))
    return training


class Recording(NamedTuple):
    """The fastest of several recorded steps, and the forecast that is derived from all of them."""

    step: weft.Recorder
    forecast: Forecast


def record(model: nn.Module, schedule: str, checkpoint: str, batch: tuple[Tensor, Tensor]) -> Recording:
    """Record several steps. Time and bytes are of the same step, so that timeline and memory curve share an axis."""
    pipe = pipe_of(copy.deepcopy(model), schedule, checkpoint)
    alive_anyway = [*pipe.parameters(), *batch]

    def run(observer) -> None:
        with pipe.observed_by(observer):
            pipe(batch[0], target=batch[1]).backward()
        pipe.zero_grad()

    recorders = [weft.Recorder(memory=True) for _ in range(WARM_UP + RECORDED)]
    for recorder in recorders:
        recorder.ignore(alive_anyway)
        run(recorder)
    sizes = MemoryRecorder(alive_anyway)
    run(sizes)
    costs = costs_from(recorders[WARM_UP:], sizes)
    return Recording(min(recorders[WARM_UP:], key=seconds), costs.forecast(pipe.schedule_for(len(batch[0]))))


def seconds(recorder: weft.Recorder) -> float:
    """Seconds from the first event to the end of the last one."""
    return max(event.end for event in recorder.events) - min(event.start for event in recorder.events)


def sections(training: Training, recordings: dict[str, Recording], pipe: weft.Pipe) -> list[report.Section]:
    accuracy = report.line_chart(
        {"held out": training.accuracies},
        title="Held-out digits over steps",
        x=report.Axis("step"),
        y=report.Axis("% right"),
    )
    learned = [report.figure(report.loss_curve(training.losses)), report.figure(accuracy)]
    # All timelines have the same end, so that their lengths can be compared.
    until = max(max(seconds(recording.step), recording.forecast.total) for recording in recordings.values())
    timelines: list[report.Markup] = []
    for name, recording in recordings.items():
        events, forecast = recording.step.events, recording.forecast
        caption = (
            f"{name}: measured {report.show_time(seconds(recording.step))}; forecast, with a core for each stage, "
            f"{report.show_time(forecast.total)}, of which stages are idle for {forecast.bubble:.0%}."
        )
        picture = report.timeline(events, forecast, title=f"Timeline of a step, {name}", until=until)
        timelines += [report.figure(picture, caption), report.action_table(events)]
    curves = {name: report.live_bytes(recording.step) for name, recording in recordings.items()}
    rows = [
        [name, report.show_bytes(recording.step.peak_bytes), report.show_bytes(recording.forecast.peak_bytes)]
        for name, recording in recordings.items()
    ]
    in_memory = [
        report.paragraph(
            "Bytes that stay alive for backward, without parameters and the mini-batch, in the steps of the timelines "
            "and on their time axis."
        ),
        report.figure(report.memory_curve(curves, until=until)),
        report.table(["", "peak, measured", "peak, forecast"], rows),
    ]
    crossing = [
        report.paragraph("Values of one micro-batch that go from stage to stage, from their source to their readers."),
        report.figure(report.routes(pipe.routes, STAGES, title="Crossing values")),
    ]
    return [
        report.summary({name: recording.step for name, recording in recordings.items()}),
        report.Section("Training", learned),
        report.Section("Values that cross between stages", crossing),
        report.Section("A step in time", timelines),
        report.Section("A step in memory", in_memory),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("torchweft-report"), help="folder of the report")
    parser.add_argument("--steps", type=int, default=80, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the stages run in parallel instead

    digits = data()
    model = Classifier()
    pipe = pipe_of(model, *WAYS["1f1b"])
    print(f"a report: {STAGES} stages of {CHUNKS} micro-batches, three modes")
    training = train(pipe, options.steps, digits)
    print(f"  {training.accuracies[-1][1]:.1f}% of held-out digits right after {len(training.losses)} steps")
    batch = digits[0][:ROWS], digits[1][:ROWS]
    recordings = {name: record(model, *way, batch) for name, way in WAYS.items()}
    for name, recording in recordings.items():
        measured, expected = map(report.show_bytes, (recording.step.peak_bytes, recording.forecast.peak_bytes))
        print(f"  {name}: live bytes at most {measured}, forecast {expected}")
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.out / "report.html"
    page.write_text(report.page("A pipeline in four stages", sections(training, recordings, pipe)), encoding="utf-8")
    trace = recordings["1f1b"].step.save(options.out / "trace.json", title="torchweft, 1f1b")
    print(f"  wrote {page.resolve()} (open it in a browser) and {trace.resolve()} (in ui.perfetto.dev)")


if __name__ == "__main__":
    main()
