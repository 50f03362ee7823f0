"""The sections of the act "across time": what was learned, the plan, its speed, its memory."""

import inspect
from dataclasses import fields

import torch

from weft.demo.keeping import BUDGET, LOOP, Curves
from weft.demo.learning import ROWS, STEPS, Learning
from weft.demo.speeds import Speed
from weft.demo.speller import TEMPERATURE, IntegratingCell
from weft.recurrent.captured import Captured
from weft.recurrent.parts import cut
from weft.report import (
    Axis,
    Markup,
    Section,
    Tile,
    code,
    details,
    figure,
    line_chart,
    paragraph,
    running_mean,
    table,
    tiles,
)
from weft.report.axes import BYTES, show_bytes, show_time

TITLE = "Time: a cell of one's own learns to spell"
_WIDEST = 160  # characters of a line of the plan
_PARTS = {
    "once": "once a call: on parameters only",
    "before": "before the loop, for all steps at once",
    "loop": "in the loop, step by step",
    "after": "after the loop, for all steps at once",
    "before_back": "before the backward loop, for all steps at once",
    "loop_back": "in the backward loop, step by step",
    "after_back": "after the backward loop, for all steps at once",
}


def learned(hidden: int, learning: Learning, sample: str, difference: float, timed: list[Speed]) -> Section:
    """What the model is, how it did, and what it writes. `timed` begins with the shape of training."""
    return Section(TITLE, [*_about(hidden), _numbers(learning, difference, timed), *_seen(learning, sample)])


def _about(hidden: int) -> list[Markup]:
    model = (
        "A model reads the help topics of Python's standard library character by character, and learns to say "
        "which one comes next. Its recurrent cell is below, as a user writes it: plain PyTorch, one step, width "
        f"{hidden}. weft runs it over time: the backward pass is derived from the cell once, and only what carries "
        "the state is computed step by step."
    )
    source = code(inspect.getsource(IntegratingCell).rstrip())
    return [paragraph(model), source]


def _numbers(learning: Learning, difference: float, timed: list[Speed]) -> Markup:
    first = timed[0]
    rate = ROWS * STEPS / learning.seconds
    return tiles(
        [
            Tile(
                "Held-out text",
                f"{learning.held_out[-1][1]:.2f} bits",
                f"per character, at first {learning.losses[0]:.1f}",
            ),
            Tile("Largest difference", f"{difference:.1e}", "of any gradient from the eager loop, in float64"),
            Tile(
                "Times as fast as the eager loop",
                f"{first.loop / first.weft:.1f}",
                f"in shapes of training; nn.LSTM: {first.loop / first.lstm:.1f}",
            ),
            Tile("Steps", f"{len(learning.losses)}", f"of {ROWS * STEPS} characters, {rate:,.0f} a second"),
        ]
    )


def _seen(learning: Learning, sample: str) -> list[Markup]:
    training = list(running_mean([(float(i), loss) for i, loss in enumerate(learning.losses, 1)]))
    held_out = learning.held_out
    drawn = line_chart(
        {"training, running mean": training, "held out": held_out},
        title="Bits per character over steps",
        x=Axis("step"),
        y=Axis("bits per character"),
        measured={"held out": held_out},
    )
    words = f"What it writes, one net.step at a time, at temperature {TEMPERATURE:g}:"
    return [figure(drawn), paragraph(words), code(sample)]


def planned(captured: Captured, why: str, plan: str) -> Section:
    """The plan of a step: how many operators run when, who runs it and why, and all of it for those who open it."""
    words = (
        "The first sequence of each kind is run with a tracer beside it, which gives the graph of one step and of "
        "its backward. It is cut by what each operator depends on: only what leads from state to state has to "
        "wait for the step before."
    )
    parts = cut(captured)
    rows = [[_PARTS[field.name], str(len(getattr(parts, field.name)))] for field in fields(parts)]
    listed = table(["what runs when", "operators"], rows)
    whole = details("The whole plan, as net.explain() tells it", code(_short(plan)))
    return Section("Its plan", [paragraph(words), listed, paragraph(why), whole])


def _short(plan: str) -> str:
    lines = plan.splitlines()
    return "\n".join(line if len(line) <= _WIDEST else f"{line[:_WIDEST]} ..." for line in lines)


def speed(timed: list[Speed]) -> Section:
    """How long it takes, next to the eager loop and nn.LSTM."""
    words = (
        "Forward and backward of the recurrent layer alone, medians of runs by turns. nn.LSTM stands for what a "
        "hand-written layer takes at the same width: it has four products a step where this cell has three, and "
        "neither a layer norm nor multiplied products. No layer of PyTorch runs this cell itself, but for the "
        f"eager loop. Other programs on this machine move these figures. Operators had {torch.get_num_threads()} "
        "CPU thread(s)."
    )
    rows = [
        [f"{each.steps} steps, {each.rows} rows"]
        + [show_time(one) for one in (each.weft, each.loop, each.lstm)]
        + [f"{each.weft / each.loop:.2f}", f"{each.weft / each.lstm:.2f}"]
        for each in timed
    ]
    listed = table(["", "weft", "eager loop", "nn.LSTM", "weft / eager loop", "weft / nn.LSTM"], rows)
    return Section("Its speed", [paragraph(words), listed])


def memory(kept: Curves) -> Section:
    """Peak bytes by the length of a sequence, in all modes."""
    words = (
        "The most bytes that are alive at a time in a forward with its backward, outputs and returned gradients "
        "included, inputs and parameters not. Lines are predicted from the plan, dots are measured. full keeps "
        "every value that backward reads; states only the states, from which the rest is made again; sqrt only "
        f"some states. With a number of bytes, here {show_bytes(BUDGET)}, the plan takes the fastest of these that "
        "fits, until none does. All modes gave the same gradients to the last bit, or this page would not be "
        "here. The eager loop keeps all that autograd saves."
    )
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in kept.predicted}
    for each in kept.measured:
        measured[each.mode].append((float(each.steps), float(each.measured)))
    drawn = line_chart(
        {**kept.predicted, LOOP: kept.loop},
        title="Peak bytes over the length of a sequence",
        x=Axis("steps of the sequence", log=True),
        y=Axis(BYTES[1].name, BYTES[1], log=True),
        measured={**measured, LOOP: kept.loop},
    )
    longest = max(each.steps for each in kept.measured)
    rows = [
        [each.mode, each.way, show_bytes(each.predicted), show_bytes(each.measured), show_time(each.seconds)]
        for each in kept.measured
        if each.steps == longest
    ]
    listed = table([f"{longest} steps", "what is kept", "predicted", "measured", "time"], rows)
    return Section("Its memory", [paragraph(words), figure(drawn), listed])
