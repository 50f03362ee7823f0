r"""Pictures of a run: inline SVG, one self-contained HTML page, and a trace for Perfetto.

    core.events.Recorder ----> timeline, memory_curve, trace -----> page -> report.html
                         \--> costs_from -> core.forecast --/        write_trace -> trace.json

Everything here is a pure function from data to text; nothing here runs a model.
"""

from weft.core.markup import Markup
from weft.report.curves import loss_curve, memory_curve, running_mean
from weft.report.lines import Axis, line_chart
from weft.report.measure import Costs, Sizes, costs_from, live_bytes
from weft.report.page import Section, Tile, code, details, figure, page, paragraph, table, tiles
from weft.report.pictures import gallery
from weft.report.timeline import timeline
from weft.report.trace import trace, write_trace

__all__ = [
    "Axis",
    "Costs",
    "Markup",
    "Section",
    "Sizes",
    "Tile",
    "code",
    "costs_from",
    "details",
    "figure",
    "gallery",
    "line_chart",
    "live_bytes",
    "loss_curve",
    "memory_curve",
    "page",
    "paragraph",
    "running_mean",
    "table",
    "tiles",
    "timeline",
    "trace",
    "write_trace",
]
