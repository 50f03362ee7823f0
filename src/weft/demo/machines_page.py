"""The sections of the act "across machines": how the training went, what the death of a server cost, and the books."""

from statistics import fmean
from typing import Any

from weft.demo.machines_story import Points, Stay, Story
from weft.demo.stage import Stagehand
from weft.experts.panel.summary import summary
from weft.report import (
    Axis,
    Markup,
    Section,
    Tile,
    figure,
    line_chart,
    paragraph,
    running_mean,
    table,
    tiles,
)
from weft.report.axes import show_time

TITLE = "Machines: a server dies, and the training goes on"
_SMALLEST = 1e-6  # of a loss on a logarithmic axis


def sections(story: Story) -> list[Section]:
    """All of it."""
    return [_learned(story), _cost(story), _books(story), _servers(story)]


def say(story: Story, hand: Stagehand) -> None:
    """The numbers in lines."""
    away, steps = story.seconds_away, sum(len(trainer.losses) for trainer in story.trainers)
    shares = " and ".join(f"{share:.1%}" for share in story.accuracies())
    losses = " and ".join(f"{_last_loss(trainer.losses):.3f}" for trainer in story.trainers)
    lost = ", ".join(f"{each.uid} {each.lost}" for each in story.returns())
    applied, acknowledged = (sum(getattr(each, name) for each in story.books()) for name in ("applied", "acknowledged"))
    hand.say(f"  held-out digits: {shares} right after {steps} steps of both trainers; loss {losses}")
    hand.say(f"  steps lost, those after the last durable checkpoint: {lost}; the experts were away for {away:.1f} s")
    hand.say(
        f"  calls that failed in a trainer: 0; of {story.calls}, {story.given_up} had no answer, and every one of "
        "their samples had that of another expert"
    )
    hand.say(
        f"  exactly once: backwards applied {applied}, acknowledged {acknowledged}, since each server listens; "
        f"{story.thrown_away} answers were thrown away on purpose, and those calls sent again"
    )


def _learned(story: Story) -> Section:
    words = (
        "Two processes learn to read handwritten digits, each from half of them. Between their own layers stand four "
        "experts that they share; those live, with their optimizers, in two server processes, and each image goes to "
        "two of them, over gRPC. Half-way one server is killed with SIGKILL. The demo starts another one, at another "
        "port, which goes on from the checkpoints on the disk by itself. The trainers do not stop meanwhile: the "
        "experts are placed so that every image has one expert left."
    )
    losses = {trainer.name: _means(story, trainer.losses) for trainer in story.trainers}
    shares = {trainer.name: _since(story, trainer.checks) for trainer in story.trainers}
    time = Axis("seconds of training")
    loss = line_chart(
        losses,
        title="Loss of both trainers over time",
        x=time,
        y=Axis("cross-entropy", log=True),
        marks=_marks(story),
    )
    right = line_chart(
        shares,
        title="Share of the held-out digits that is right, over time",
        x=time,
        y=Axis("share that is right"),
        marks=_marks(story),
    )
    return Section(TITLE, [paragraph(words), _numbers(story), figure(loss, "Running means."), figure(right)])


def _numbers(story: Story) -> Markup:
    shares, lost = story.accuracies(), [each.lost for each in story.returns()]
    steps = [each for points in story.steps.values() for each in points[-1:]]
    least, most = (int(pick(value for _, value in steps)) for pick in (min, max))
    return tiles(
        [
            Tile("Held-out digits", " · ".join(f"{share:.1%}" for share in shares), "right, for each trainer"),
            Tile("Steps of an expert", f"{least} to {most}", f"trainers: {_counts(story)}"),
            Tile("Time to come back", f"{story.seconds_away:.1f} s", "from SIGKILL to the first answer"),
            Tile("Steps lost", " · ".join(map(str, lost)), "of each expert that died"),
            Tile("Failed in a trainer", "0", f"of {story.calls} calls; {story.given_up} were left unanswered"),
            Tile("Largest gradient difference", f"{story.difference:.1e}", "from the same mixture here, in float64"),
        ]
    )


def _counts(story: Story) -> str:
    return " and ".join(str(len(trainer.losses)) for trainer in story.trainers)


def _cost(story: Story) -> Section:
    words = (
        "A server saves what has stepped every second, and tells with every answer up to which step that is durable. "
        "What came after it is lost with the process: the lines fall back to where the new process goes on."
    )
    steps = {uid: _since(story, points) for uid, points in sorted(story.steps.items())}
    drawn = line_chart(
        steps,
        title="Optimizer steps of each expert over time",
        x=Axis("seconds of training"),
        y=Axis("steps"),
        marks=_marks(story),
    )
    header = ["", "last step acknowledged", "durable, as told before", "went on from", "steps lost"]
    rows = [[r.uid, str(r.reached), str(r.reported), str(r.restored), str(r.lost)] for r in story.returns()]
    return Section("What it cost", [paragraph(words), figure(drawn), _course(story), table(header, rows)])


def _course(story: Story) -> Markup:
    """What happened when, and what a step of a trainer took before, meanwhile and after."""
    back = story.killed + story.seconds_away
    spans = [
        ("with all four experts", story.began, story.killed),
        ("with two of them", story.killed, back),
        ("with all four again", back, story.ended),
    ]
    rows = [
        [f"{story.dead.name} is killed", _at(story, story.killed), ""],
        ["its end is noticed, and another server started", _at(story, story.noticed), ""],
        ["that one listens", _at(story, story.back.since), ""],
        ["a trainer has its first answer", _at(story, back), ""],
    ]
    for name, start, end in spans:
        seconds = story.step_seconds(start, end)
        taken = "no step" if seconds is None else f"{show_time(seconds)} a step"
        rows.append([name, f"{end - start:.1f} s", taken])
    return table(["", "when, or how long", "median of both trainers"], rows)


def _books(story: Story) -> Section:
    words = (
        "Every backward carries a key of its own, and a server that has applied it does not apply it again. To see "
        f"that, the trainers threw {story.thrown_away} answers away, as a bad network does, and so sent those calls "
        "again. The servers count different keys that they have applied; the trainers what they sent and what was "
        "acknowledged. Nothing that was acknowledged is missing, and nothing was applied that was not sent, or this "
        "page would not be here. Backwards that wait at the same time are one batch and one step, so there may be "
        "fewer steps."
    )
    header = ["", "at", "sent", "acknowledged", "applied", "asked again", "steps"]
    rows = [
        [each.uid, each.server, *map(str, (each.sent, each.acknowledged, each.applied, each.repeated, each.steps))]
        for each in story.books()
    ]
    return Section("Every backward exactly once, since each server listens", [paragraph(words), table(header, rows)])


def _servers(story: Story) -> Section:
    words = (
        "The numbers of the servers' own status pages, and of weft status, at the end. While a server runs, its page "
        "is live."
    )
    header = ["", "server", "steps", "durable", "forward batches", "backward batches", "refused", "failed"]
    rows = [row for stay in (story.other, story.back) for row in _status(stay)]
    return Section("What the servers say of themselves", [paragraph(words), table(header, rows)])


def _status(stay: Stay) -> list[list[str]]:
    told: dict[str, Any] | None = stay.last
    if told is None:
        return []
    return [
        [
            each.name,
            stay.name,
            *map(str, (each.steps, each.durable, each.forward, each.backward, each.refused, each.failed)),
        ]
        for each in summary(told).experts
    ]


def _marks(story: Story) -> dict[str, float]:
    """The kill, and the return."""
    times = {
        f"{story.dead.name} is killed": story.killed,
        "its experts answer again": story.killed + story.seconds_away,
    }
    return {name: at - story.began for name, at in times.items()}


def _since(story: Story, points: Points) -> Points:
    return [(at - story.began, value) for at, value in points]


def _means(story: Story, losses: Points) -> Points:
    return list(running_mean([(at, max(value, _SMALLEST)) for at, value in _since(story, losses)], log=True))


def _last_loss(losses: Points) -> float:
    return fmean(value for _, value in losses[-10:])


def _at(story: Story, when: float) -> str:
    return f"after {when - story.began:.2f} s"
