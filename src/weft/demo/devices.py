"""Act one, "devices": a U-Net with long skips trains in four stages, and its gradients are those of plain PyTorch."""

from torch import Tensor, nn
from torch.nn import functional

from weft.demo.exactness import LIMIT, largest_differences
from weft.demo.recording import WAYS, Recording, record
from weft.demo.stage import ProofError, Stagehand
from weft.demo.training import Training, plain_seconds, psnr, restored, train
from weft.demo.unet import BALANCE, Digits, load_digits, unet, with_noise
from weft.pipeline.pipe import Pipe
from weft.report import (
    Markup,
    Section,
    Tile,
    figure,
    gallery,
    loss_curve,
    memory_curve,
    paragraph,
    table,
    tiles,
    timeline,
    write_trace,
)
from weft.report.axes import show_bytes, show_time

TITLE = "Devices: a U-Net with long skips, in four stages"
CHUNKS = 8
ROWS = 128
_CHECKED = 19  # rows of the batch that gradients are compared on: eight micro-batches of unequal size
_SHOWN = 10
_CHOICES = {"uncut": "one thread", "serial": "one thread", "threads": "a thread per stage"}

Differences = dict[tuple[str, str], float]
Recordings = dict[str, Recording]


def act(hand: Stagehand) -> list[Section]:
    """Train, prove, record; see the module."""
    hand.say(f"devices: a U-Net with long skips, in {len(BALANCE)} stages of {CHUNKS} micro-batches")
    digits = load_digits()
    model = unet()
    differences = _compare(model, digits, hand)
    pipe = Pipe(
        model,
        chunks=CHUNKS,
        balance=BALANCE,
        devices=["cpu"] * len(BALANCE),
        schedule="1f1b",
        checkpoint="never",
        loss=nn.functional.mse_loss,
    )
    training = train(pipe, digits, ROWS, hand)
    images = restored(pipe, digits.noisy)
    score, before = psnr(images, digits.held_out), psnr(digits.noisy, digits.held_out)
    hand.say(f"  held-out PSNR {score:.2f} dB after {len(training.losses)} steps; noisy images have {before:.2f} dB")
    batch = digits.train[:ROWS]
    plain = plain_seconds(model, batch)
    chosen = " and ".join(_CHOICES[each] for each in {*pipe.statistics()["chosen"].values()}) or "nothing yet"
    speed = f"{show_time(training.seconds)} a step, {ROWS / training.seconds:.0f} images a second"
    hand.say(f"  speed: {speed} (executor auto chose {chosen}); the same step in plain PyTorch: {show_time(plain)}")
    recordings = _record(model, digits, hand)
    where = write_trace(hand.options.out / "trace.json", recordings["1f1b"].events, name="weft, 1f1b")
    hand.wrote(where, "open it in ui.perfetto.dev")
    numbers = _numbers(score, before, differences, training, plain)
    return [
        Section(TITLE, [*_words(chosen), numbers, *_seen(digits, images, training)]),
        _in_time(recordings),
        _in_memory(recordings),
        _exactness(differences),
    ]


def _compare(model: nn.Sequential, digits: Digits, hand: Stagehand) -> Differences:
    """Raises ProofError when any gradient differs by more than rounding."""
    clean = digits.train[:_CHECKED]
    found = largest_differences(model, BALANCE, with_noise(clean), clean, functional.mse_loss, CHUNKS)
    worst = max(found.values())
    if not worst < LIMIT:
        where = ", ".join(f"{schedule} with checkpoint {mode}: {d:.1e}" for (schedule, mode), d in found.items())
        raise ProofError(f"a gradient differs from plain PyTorch's by {worst:.1e}, more than {LIMIT:g}: {where}")
    hand.say(f"  largest difference of any gradient from plain PyTorch, float64: {worst:.1e} (limit {LIMIT:g})")
    return found


def _record(model: nn.Sequential, digits: Digits, hand: Stagehand) -> Recordings:
    clean = digits.train[:ROWS]
    batch = with_noise(clean), clean
    recordings = {way.name: record(model, way, BALANCE, CHUNKS, batch) for way in WAYS}
    peaks = ", ".join(f"{name} {show_bytes(each.peak_bytes)}" for name, each in recordings.items())
    hand.say(f"  live activations at most: {peaks}")
    return recordings


def _words(chosen: str) -> list[Markup]:
    net = (
        f"A U-Net learns to take noise away from handwritten digits. It is cut into {len(BALANCE)} stages. Two of its "
        "skip connections go from the first stage straight to the last; the stages in between never hold them."
    )
    speed = (
        'All stages share one CPU here. executor="auto" tried one thread and one thread per stage on the first steps, '
        f"and chose {chosen}. On one CPU plain PyTorch, with more threads for each operator, gains as much: there "
        "stages bring less memory; speed comes with a device for each of them."
    )
    return [paragraph(net), paragraph(speed)]


def _numbers(score: float, before: float, differences: Differences, training: Training, plain: float) -> Markup:
    return tiles(
        [
            Tile("Held-out PSNR", f"{score:.2f} dB", f"the noisy images have {before:.2f} dB"),
            Tile("Largest gradient difference", f"{max(differences.values()):.1e}", "from plain PyTorch, in float64"),
            Tile("One training step", show_time(training.seconds), f"in plain PyTorch {show_time(plain)}"),
            Tile("Steps", f"{len(training.losses)}", f"of {ROWS} images, in {CHUNKS} micro-batches"),
        ]
    )


def _seen(digits: Digits, images: Tensor, training: Training) -> list[Markup]:
    rows = {"noisy": digits.noisy, "restored": images, "clean": digits.held_out}
    first = {name: each[:_SHOWN].squeeze(1) for name, each in rows.items()}
    return [
        figure(gallery(first, title="Held-out digits: noisy, restored, clean"), "Digits not seen in training."),
        figure(loss_curve(training.losses, label="mean squared error")),
    ]


def _in_time(recordings: Recordings) -> Section:
    words = (
        "The quickest of some steps. Each row is a stage with a thread of its own, and each bar the work on one "
        "micro-batch, with its number. The outlines below are the forecast from the median time of each kind of "
        "work; it knows the order of the work and who waits for whom, and not that threads share the cores here."
    )
    drawn = [
        figure(timeline(each.events, each.forecast, title=f"Timeline of a step, {name}"), _caption(name, each))
        for name, each in recordings.items()
        if name != "gpipe"
    ]
    return Section("A step in time", [paragraph(words), *drawn])


def _caption(name: str, each: Recording) -> str:
    return (
        f"{name}: measured {show_time(each.seconds)}; forecast, with a core for each stage, "
        f"{show_time(each.forecast.total)}, in which stages are idle for {each.forecast.bubble:.0%} of the time."
    )


def _in_memory(recordings: Recordings) -> Section:
    words = (
        "Bytes that stay alive for backward, without parameters and the mini-batch: what autograd saves, and values "
        "on their way between stages. gpipe keeps all micro-batches, 1f1b at most one for each stage from there to "
        "the end; recomputation keeps the inputs of stages only, and pays with a second forward."
    )
    rows = [
        [name, show_bytes(each.peak_bytes), show_bytes(each.forecast.peak_bytes), show_time(each.seconds)]
        for name, each in recordings.items()
    ]
    curves = {name: each.live for name, each in recordings.items()}
    listed = table(["", "peak, measured", "peak, forecast", "step, measured"], rows)
    return Section("A step in memory", [paragraph(words), figure(memory_curve(curves)), listed])


def _exactness(differences: Differences) -> Section:
    words = (
        f"The largest absolute difference of any gradient, of all parameters and of the input, between the stages and "
        f"plain PyTorch on the undivided batch of {_CHECKED} images, in float64. Cutting the batch changes the order "
        f"of sums, so the last digits may differ; the limit is {LIMIT:g}."
    )
    rows = [[schedule, mode, f"{d:.1e}"] for (schedule, mode), d in differences.items()]
    listed = table(["schedule", "checkpoint", "difference"], rows)
    return Section("The gradients are those of plain PyTorch", [paragraph(words), listed])
