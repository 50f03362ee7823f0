#!/usr/bin/env python3
"""Write the computed pictures of README and docs/.

    python tools/pictures.py [FOLDER]      FOLDER is docs by default

schedules.svg, schedules_dark.svg       a step under gpipe that turns into the same step under 1F1B
three_cuts_dark.svg, three_cuts_narrow.svg, three_cuts_narrow_dark.svg
                                        docs/three_cuts.svg, which is drawn by hand, for dark pages and for phones

A video of the step would have megabytes, and GitHub does not run scripts inside a picture. The picture is therefore an
SVG whose bars are moved by CSS. Without animation, or with reduced motion, it shows 1F1B, with the memory of gpipe as a
dashed line. The times are those of `weft.pipeline.simulate.forecast`, which ``torchweft plan`` prints too. Each picture
has a dark variant, because colours inside a picture follow the theme of the system and not that of the page.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torchweft as weft
from torchweft.pipeline.simulate import Forecast, Span, StageCost, forecast

DOCS = Path(__file__).resolve().parents[1] / "docs"
DEVICES, CHUNKS = 4, 8
COST = StageCost(forward=1.0, backward=2.0, saved_bytes=1)  # a backward takes twice as long as a forward

WIDTH, HEIGHT = 760, 424
LEFT, RIGHT, TOP = 108, 16, 88  # margins of the bars
LANE, BAR = 42, 36
BASE, LEVEL = 366, 10  # memory curve: y of its zero, and height of one micro-batch
SECONDS = 12  # one cycle of the animation: gpipe, 1F1B, and back


class Palette(NamedTuple):
    """Colours of one theme. Forward, backward and the page differ in lightness by 3:1 at least."""

    page: str
    rule: str
    ink: str
    soft: str
    forward: str
    backward: str


LIGHT = Palette("#ffffff", "#d9d5cc", "#1f2328", "#5d6570", "#5a96d2", "#6a2c00")
DARK = Palette("#15181c", "#343a42", "#e8e6e1", "#a2a8b0", "#a9d2fb", "#a3581a")
FORWARD_INK, BACKWARD_INK = "#0b1a2b", "#ffffff"

CUTS_IN_DARK = {
    "#ffffff": "#15181c", "#fdfcfa": "#1d2126", "#d9d5cc": "#343a42", "#1f2328": "#e8e6e1", "#5d6570": "#a2a8b0",
    "#e7eef6": "#1c2b3b", "#2f6fb0": "#6aa5de", "#eaf3ec": "#1b2f22", "#2f7a48": "#7cc48b", "#b0433f": "#ff8d86",
    "#b06a1f": "#f0b45c",
}  # fmt: skip
NARROW = {
    "devices": (0, 0),
    "time": (-314, 350),
    "machines": (-628, 700),
    "tensor": (-32, 698),
    "gradient": (-264, 732),
    "cut": (-598, 766),
}
"""Groups of three_cuts.svg and their offsets in the narrow form, which stacks the cards vertically."""


def schedules(colors: Palette) -> str:
    """The step under both schedules, in one animated picture."""
    costs = [COST] * DEVICES
    before = forecast(weft.pipeline.gpipe(DEVICES, CHUNKS), costs)
    after = forecast(weft.pipeline.one_f_one_b(DEVICES, CHUNKS), costs)
    assert before.total == after.total, "the picture says that both take the same time"
    most, least = before.stage_peaks[0], after.stage_peaks[0]
    scale = (WIDTH - LEFT - RIGHT) / after.total
    summary = (
        f"{DEVICES} devices and {CHUNKS} micro-batches. Under gpipe each device runs all forwards and then all "
        f"backwards, and device 0 keeps the activations of {most} micro-batches. Under 1F1B a backward runs as soon as "
        f"it can. The step takes the same time, and device 0 keeps {least}."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d" '
        'font-family="system-ui, sans-serif" font-size="20">',
        '  <title id="t">One step under gpipe and under 1F1B</title>',
        f'  <desc id="d">{summary}</desc>',
        style(colors),
        f'  <rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>',
        *headings("before", "gpipe: all forwards, then all backwards", f"device 0 keeps {most} micro-batches"),
        *headings("after", "1f1b: each backward as soon as it can run", f"the same time, and device 0 keeps {least}"),
        *(f'  <text x="14" y="{TOP + device * LANE + 25}">device {device}</text>' for device in range(DEVICES)),
        *bars(before, after, scale),
        f'  <text class="soft" x="14" y="{BASE - 46}">kept on</text>',
        f'  <text class="soft" x="14" y="{BASE - 22}">device 0</text>',
        f'  <path class="before area" d="{curve(before, scale)}"/>',
        f'  <path class="after area" d="{curve(after, scale)}"/>',
        f'  <path class="outline" d="{curve(before, scale)}"/>',
        f'  <path class="axis" d="M{LEFT} {BASE}H{WIDTH - RIGHT}"/>',
        f'  <rect class="F" x="{LEFT}" y="388" width="22" height="20" rx="3"/><text x="138" y="405">forward</text>',
        '  <rect class="B" x="234" y="388" width="22" height="20" rx="3"/><text x="264" y="405">backward</text>',
        '  <path class="outline" d="M380 398H412"/><text x="420" y="405">kept under gpipe</text>',
        '  <text class="soft end" x="744" y="405">time →</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def style(colors: Palette) -> str:
    """The style of the picture. Bars are placed as under 1F1B, and the animation starts them at their gpipe places."""
    return f"""  <style>
    .page {{ fill: {colors.page}; stroke: {colors.rule}; }}
    .F {{ fill: {colors.forward}; }}
    .B {{ fill: {colors.backward}; }}
    .area {{ fill: {colors.soft}; fill-opacity: 0.45; }}
    .outline {{ fill: none; stroke: {colors.ink}; stroke-width: 2; stroke-dasharray: 6 4; }}
    .axis {{ stroke: {colors.soft}; stroke-width: 1.5; }}
    text {{ fill: {colors.ink}; }}
    text.soft {{ fill: {colors.soft}; }}
    text.title {{ font-size: 26px; font-weight: 600; }}
    text.n {{ font-size: 15px; text-anchor: middle; fill: {FORWARD_INK}; }}
    text.w {{ fill: {BACKWARD_INK}; }}
    text.end {{ text-anchor: end; }}
    .before {{ opacity: 0; animation: before {SECONDS}s ease-in-out infinite; }}
    .after {{ animation: after {SECONDS}s ease-in-out infinite; }}
    .m {{ animation: move {SECONDS}s ease-in-out infinite; }}
    @keyframes move {{ 0%, 30% {{ transform: translateX(var(--d)); }} 45%, 92% {{ transform: none; }}
      100% {{ transform: translateX(var(--d)); }} }}
    @keyframes before {{ 0%, 30% {{ opacity: 1; }} 36%, 95% {{ opacity: 0; }} 100% {{ opacity: 1; }} }}
    @keyframes after {{ 0%, 38% {{ opacity: 0; }} 45%, 92% {{ opacity: 1; }} 96%, 100% {{ opacity: 0; }} }}
    @media (prefers-reduced-motion: reduce) {{ .before, .after, .m {{ animation: none; }} }}
  </style>"""


def headings(when: str, title: str, finding: str) -> Iterator[str]:
    """The title and the finding of one schedule."""
    yield f'  <text class="{when} title" x="14" y="38">{title}</text>'
    yield f'  <text class="{when} soft" x="14" y="68">{finding}</text>'


def bars(before: Forecast, after: Forecast, scale: float) -> Iterator[str]:
    """A bar for each action at its place under 1F1B, with the distance to its place under gpipe."""
    starts = {span.action: span.start for span in before.spans}
    for span in after.spans:
        distance = (starts[span.action] - span.start) * scale
        moved = f'<g class="m" style="--d:{distance:.1f}px">' if distance else "<g>"
        yield f"  {moved}{bar(span, scale)}</g>"


def bar(span: Span, scale: float) -> str:
    """One bar, with the number of its micro-batch."""
    left, right, top = LEFT + span.start * scale, LEFT + span.end * scale, TOP + span.worker * LANE
    kind = span.action.kind
    text = f'<text class="n{" w" if kind == "B" else ""}" x="{(left + right) / 2:.1f}" y="{top + 23}">'
    box = f'x="{left + 0.75:.1f}" y="{top}" width="{right - left - 1.5:.1f}" height="{BAR}" rx="3"'
    return f'<rect class="{kind}" {box}/>{text}{span.action.micro_batch}</text>'


def curve(expected: Forecast, scale: float) -> str:
    """The number of micro-batches that device 0 keeps over time, as a path that ends on the axis."""
    path = [f"M{LEFT} {BASE}"]
    for time, level in expected.stage_bytes[0]:
        path.append(f"H{LEFT + time * scale:.1f}V{BASE - level * LEVEL}")
    return "".join(path) + "Z"


def in_dark(picture: str) -> str:
    """three_cuts.svg in the colours of a dark page."""
    return re.sub(r"#[0-9a-f]{6}", lambda color: CUTS_IN_DARK[color.group()], picture)


def narrow(picture: str) -> str:
    """three_cuts.svg with its cards stacked vertically."""
    for group, (x, y) in NARROW.items():
        picture = picture.replace(f'<g id="{group}">', f'<g id="{group}" transform="translate({x} {y})">')
    picture = picture.replace('viewBox="0 0 960 430"', 'viewBox="-12 0 356 1184"')
    return picture.replace('<rect width="960" height="430"', '<rect x="-12" width="356" height="1184"')


def pictures() -> Iterable[tuple[str, str]]:
    """All pictures, as file name and text."""
    cuts = (DOCS / "three_cuts.svg").read_text("utf-8")
    yield "schedules.svg", schedules(LIGHT)
    yield "schedules_dark.svg", schedules(DARK)
    yield "three_cuts_dark.svg", in_dark(cuts)
    yield "three_cuts_narrow.svg", narrow(cuts)
    yield "three_cuts_narrow_dark.svg", narrow(in_dark(cuts))


def main() -> None:
    """Write all pictures into the folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for name, text in pictures():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
