"""Act two, "across time": a cell that PyTorch does not have learns to spell, by a plan that was derived from it."""

from weft.demo import characters_page
from weft.demo.keeping import MEASURED, Curves, Planned, curves, engine_of
from weft.demo.learning import ROWS, STEPS, learn
from weft.demo.speeds import LIMIT, Speed, largest_difference, speeds
from weft.demo.speller import IntegratingCell, Speller, spell
from weft.demo.stage import ProofError, Stagehand
from weft.demo.text import load_text
from weft.report import Section
from weft.report.axes import show_time

WIDTH, HIDDEN = 64, 192
SPELLED = 600
PROMPT = "The "


def act(hand: Stagehand) -> list[Section]:
    """Train, spell, prove, compare; see the module."""
    text = load_text()
    model = Speller(len(text.alphabet), WIDTH, HIDDEN)
    cell = model.net.cell
    assert isinstance(cell, IntegratingCell)
    size = f"{len(text.train)} characters of Python's help topics, {STEPS} steps of {ROWS} rows"
    hand.say(f"time: a cell that PyTorch does not have learns to spell ({size})")
    learning = learn(model, text, hand)
    score = learning.held_out[-1][1]
    hand.say(f"  held-out text: {score:.2f} bits per character after {len(learning.losses)} steps")
    kind, chosen, why = model.net.why()[0]  # the first kind that was seen is that of training
    hand.say(f"  {kind} ran by backend {chosen!r}, because {why.splitlines()[0]}")
    backend: Planned = "c" if chosen == "c" else "python"
    difference = _proof(cell, backend, hand)
    sample = PROMPT + text.spell(spell(model, text.numbers(PROMPT), SPELLED))
    hand.say(f"  it writes: {' '.join(sample.split())[:90]} ...")
    plan = model.net.explain().partition("\n\nsteps of ")[0]
    timed = speeds(cell)
    for each in timed:
        hand.say(f"  {_compared(each)}")
    kept = curves(cell, backend, MEASURED[backend])
    hand.say(f"  memory: the same bits in all modes; {_off(kept)}")
    return [
        characters_page.learned(HIDDEN, learning, sample, difference, timed),
        characters_page.planned(engine_of(cell, backend).captured, f"{kind}: backend {chosen!r}, because {why}", plan),
        characters_page.speed(timed),
        characters_page.memory(kept),
    ]


def _proof(cell: IntegratingCell, backend: Planned, hand: Stagehand) -> float:
    """Raises ProofError when any number differs from the eager loop's by more than rounding."""
    difference = largest_difference(cell, backend)
    if not difference < LIMIT:
        raise ProofError(f"backend {backend!r} differs from the eager loop by {difference:.1e}, more than {LIMIT:g}")
    hand.say(f"  largest difference of any gradient from the eager loop, float64: {difference:.1e} (limit {LIMIT:g})")
    return difference


def _compared(each: Speed) -> str:
    return (
        f"{each.steps} steps, {each.rows} rows, forward and backward: {show_time(each.weft)}; "
        f"eager loop {show_time(each.loop)}, nn.LSTM of this width {show_time(each.lstm)}"
    )


def _off(kept: Curves) -> str:
    shares = [each.measured / each.predicted for each in kept.measured]
    return f"measured peaks are {min(shares):.2f} to {max(shares):.2f} times the predicted"
