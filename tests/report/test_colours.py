"""Adjacent parts of a picture have a contrast of 3:1 or different textures, in both modes and for all vision."""

import re
from itertools import combinations

import pytest

from tests.report.colours import contrast, least_contrast
from tests.report.pictures import palettes, report_palettes
from torchweft.experts.status_page import http
from torchweft.report import page
from torchweft.report.timeline import KINDS

MODES = ("light", "dark")
GROUNDS = {"F": "f", "B": "b", "R": "card", "I": "i", "W": "card", "T": "card"}
"""The background of each kind of bar. Kinds with a texture also have lines."""
LINES = {"R": "r", "I": "i-line", "W": "w", "T": "ink"}


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast("#ff0000", "#008000", "deuteranopia") < contrast("#ff0000", "#00ff00")


def test_style_has_the_grounds_and_lines_of_this_table() -> None:
    style = page("", [])
    assert set(GROUNDS) == set(KINDS)
    for kind in KINDS:
        texture = rf"\.kind-{kind} {{ fill: url\(#texture-{kind}\)" if kind in LINES else rf"\.kind-{kind} {{ fill: var"
        assert re.search(texture, style) and (f'id="texture-{kind}"' in style) == (kind in LINES)
    for kind, colour in LINES.items():
        assert re.search(rf"\.texture-{kind} path {{ stroke: var\(--{colour}\)", style)
        assert re.search(rf"\.texture-{kind} \.ground.* {{ fill: var\(--{GROUNDS[kind]}\)", style)


@pytest.mark.parametrize("mode", MODES)
def test_every_bar_stands_out_from_idle_time(mode: str) -> None:
    """The colour of the card fills idle time and the gap between two bars of one kind."""
    colours = report_palettes()[mode]
    for kind, edge in {"F": "f", "B": "b", "R": "r", "I": "i", "W": "w", "T": "ink"}.items():
        assert least_contrast(colours[edge], colours["card"]) >= 3, (kind, mode)


@pytest.mark.parametrize("mode", MODES)
def test_bars_of_two_kinds_differ_in_lightness_or_texture(mode: str) -> None:
    colours = report_palettes()[mode]
    for kind, line in LINES.items():
        assert least_contrast(colours[line], colours[GROUNDS[kind]]) >= 3, f"the texture of {kind} is not visible"
    for one, other in combinations(GROUNDS, 2):
        differs = least_contrast(colours[GROUNDS[one]], colours[GROUNDS[other]]) >= 3
        textured = one in LINES or other in LINES  # all textures differ, also from a plain bar
        assert differs or textured, (one, other, mode)
    for one, other in ("FB", "FR", "BR", "FI", "FW", "IW"):
        assert least_contrast(colours[GROUNDS[one]], colours[GROUNDS[other]]) >= 3, (one, other, mode)


@pytest.mark.parametrize("mode", MODES)
def test_curves_differ_in_lightness_or_dashes(mode: str) -> None:
    colours, style = report_palettes()[mode], page("", [])
    dashes = [re.search(rf"\.color-{i} {{ stroke: var\(--c{i}\);(.*?)}}", style) for i in range(6)]
    patterns = [match[1].strip() if match else None for match in dashes]
    assert None not in patterns
    for i in range(6):
        assert least_contrast(colours[f"c{i}"], colours["card"]) >= 3, (i, mode)
    for i, j in combinations(range(6), 2):
        assert patterns[i] != patterns[j] or least_contrast(colours[f"c{i}"], colours[f"c{j}"]) >= 3, (i, j, mode)
        assert (j - i) % 2 == 0 or least_contrast(colours[f"c{i}"], colours[f"c{j}"]) >= 3, (i, j, mode)


@pytest.mark.parametrize("mode", MODES)
def test_text_has_a_contrast_of_4_5(mode: str) -> None:
    colours = report_palettes()[mode]
    pairs = [("ink", "card"), ("soft", "card"), ("ink", "paper"), ("f-ink", "f"), ("b-ink", "b")]
    assert {pair: contrast(*(colours[name] for name in pair)) for pair in pairs} == {
        pair: pytest.approx(12.75, abs=8.25) for pair in pairs
    }, "between 4.5 and 21"


@pytest.mark.parametrize("mode", MODES)
def test_colours_of_the_status_page_are_visible(mode: str) -> None:
    colours = palettes(http._PAGE)[mode]
    assert min(least_contrast(colours["bar"], colours[ground]) for ground in ("card", "paper")) >= 3
    for text in ("ink", "soft", "good", "bad"):
        assert contrast(colours[text], colours["card"]) >= 4.5, (text, mode)
