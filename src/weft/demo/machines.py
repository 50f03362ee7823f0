"""Act three, "across machines": experts that two trainers share, and a server that is killed while they train.

Experts need packages that the rest of weft does not, so the act is only imported when it is played; where they are
not installed it says so, and the demo goes on without it.
"""

from importlib import import_module
from typing import Any

from weft.demo.stage import Stagehand
from weft.report import Section

INSTALL = "pip install 'weft[experts]'"


def act(hand: Stagehand) -> list[Section]:
    """Train, kill, go on, prove; see machines_play.py. No section if packages are missing.

    Raises ProofError when a claim does not hold, UsageError without scikit-learn.
    """
    try:
        play: Any = import_module("weft.demo.machines_play")
        page: Any = import_module("weft.demo.machines_page")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "weft":
            raise
        hand.say(f"machines: left out, for there is no module {error.name!r}; to see it: {INSTALL}")
        return []
    hand.say("machines: two server processes with four experts, and two trainer processes that share them")
    story = play.play(hand)
    page.say(story, hand)
    return page.sections(story)
