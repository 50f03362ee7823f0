"""Computed pictures are up to date, their colours differ in lightness, and their animation can be turned off."""

import importlib.util
import re
from itertools import combinations
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.processes import ROOT


def load_pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = load_pictures()
TEXTS = dict(PICTURES.pictures())


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", TEXTS)
def test_picture_is_the_one_in_docs(name: str) -> None:
    """After a change of a schedule or of three_cuts.svg, run ``python tools/pictures.py``."""
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == TEXTS[name]


@pytest.mark.parametrize("colors", [PICTURES.LIGHT, PICTURES.DARK], ids=["light", "dark"])
def test_bars_differ_in_lightness_and_texts_can_be_read(colors: "PICTURES.Palette") -> None:
    shapes = (colors.page, colors.forward, colors.backward)
    assert all(contrast(*pair) >= 3 for pair in combinations(shapes, 2))
    texts = [(colors.ink, colors.page), (colors.soft, colors.page)]
    texts += [(PICTURES.FORWARD_INK, colors.forward), (PICTURES.BACKWARD_INK, colors.backward)]
    assert all(contrast(*pair) >= 4.5 for pair in texts)


@pytest.mark.parametrize("name", [*TEXTS, "three_cuts.svg"])
def test_picture_is_described_and_loads_nothing(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert root.find("{http://www.w3.org/2000/svg}desc") is not None
    assert not re.search(r"<script|href=|url\((?!#)", text)


@pytest.mark.parametrize("name", ["schedules.svg", "schedules_dark.svg"])
def test_animation_stops_under_reduced_motion(name: str) -> None:
    still = re.search(r"prefers-reduced-motion: reduce\) \{(.*)\}", TEXTS[name])
    moving = set(re.findall(r"\.(\w+) \{[^}]*animation: (?!none)", TEXTS[name]))
    assert still and moving == set(re.findall(r"\.(\w+)", still.group(1)))
