"""What crosses between stages, drawn: a column for each stage, a line from its source to its readers for each value.

stage 0    stage 1    stage 2
   o─────────>                  transformer.h.3, 36.9 kB
   o────────────────────>       input labels, 1.5 kB
"""

from collections.abc import Sequence

from weft.pipeline.split.program import CrossingValue
from weft.report.html import Markup, tag
from weft.report.plot import show_bytes, svg

_COLUMN, _LINE, _LEFT, _TOP = 90.0, 22.0, 20.0, 26.0


def routes(values: Sequence[CrossingValue], stages: int, *, title: str) -> Markup:
    """Draw ``pipe.routes`` of a pipe with so many stages.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2)))
        >>> pipe = weft.Pipe(model, chunks=2, devices=["cpu", "cpu"], split=["1"])
        >>> pipe(torch.randn(4, 2)).sum().backward()
        >>> svg = weft.report.routes(pipe.routes, 2, title="What crosses")
    """
    parts: list[str] = []
    for stage in range(stages):
        parts.append(tag("text", f"stage {stage}", x=_at(stage), y=10, class_="tick middle"))
        parts.append(tag("line", x1=_at(stage), y1=16, x2=_at(stage), y2=_TOP + _LINE * len(values), class_="grid"))
    for row, value in enumerate(values):
        y = _TOP + row * _LINE + 8
        tip = tag("title", f"{value.name}: stage {value.source} to {', '.join(map(str, value.readers))}")
        parts.append(tag("line", tip, x1=_at(value.source), y1=y, x2=_at(max(value.readers)), y2=y, class_="axis"))
        parts.append(tag("circle", cx=_at(value.source), cy=y, r=4, class_="axis"))
        parts += [tag("path", d=f"M{_at(each) - 7} {y - 4} l7 4 l-7 4 z", class_="axis") for each in value.readers]
        words = f"{value.name}, {show_bytes(value.bytes)}"
        parts.append(tag("text", words, x=_at(stages - 1) + 16, y=y + 4, class_="tick"))
    return svg(title, _TOP + _LINE * len(values), *parts)


def _at(stage: int) -> float:
    return _LEFT + 20 + stage * _COLUMN
