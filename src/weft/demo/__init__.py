"""The demo: acts that train something real, prove a claim with a number, and leave a report.

    run ──> Stagehand ──> act "devices"    ──> sections ──┐
                   |────> act "characters" ──> sections ──┼──> report.html, and traces
                   └────> act "machines"   ──> sections ──┘

An act is a function from a `Stagehand` to the sections that it adds to the page. A new one is a file here with
its `act`, and an entry in `acts`. They need more of weft than anything else, and are imported when they are played:
the other commands start without.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from weft.demo.stage import Options, Stagehand
from weft.report import Section, page

Act = Callable[[Stagehand], list[Section]]

__all__ = ["Act", "Options", "Stagehand", "acts", "run"]


def acts() -> tuple[Act, ...]:
    """All of them, in order."""
    from weft.demo import characters, devices, machines  # noqa: PLC0415 (only who plays them pays for them)

    return (devices.act, characters.act, machines.act)


def run(options: Options, played: Sequence[Act] | None = None) -> Path:
    """Play these acts, or all, write the page, and return where it is.

    Raises UsageError when something that an act needs is not installed, ProofError when a claim does not hold.
    The caller's random numbers and number of threads stay as they were.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    hand = Stagehand(options)
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        try:
            sections = [section for act in (acts() if played is None else played) for section in act(hand)]
        finally:
            torch.set_num_threads(before)
    report = options.out / "report.html"
    report.write_text(page("weft: a model trained in parts", sections), encoding="utf-8")
    hand.wrote(report, "open it in a browser")
    return report
