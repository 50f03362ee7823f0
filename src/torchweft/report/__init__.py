r"""Reports of a run: inline SVG, one self-contained HTML page, and a trace for Perfetto.

    Recorder ----> timeline, memory_curve, trace ----> page -> report.html
            \--> weft.pipeline.costs_from --/          write_trace -> trace.json

All functions but `record_script` map data to text, and none runs a model. Importing this package lets notebooks draw a
`weft.Recorder`, and lets it save itself.
"""

from torchweft.pipeline.tracing import Recorder
from torchweft.report.html import Markup, Section, figure, page, paragraph, table
from torchweft.report.plot import Axis, line_chart, loss_curve, memory_curve, show_bytes, show_time
from torchweft.report.recording import record_script, summary, write_recordings
from torchweft.report.timeline import action_table, live_bytes, notebook_frame, routes, timeline, trace, write_trace

__all__ = [
    "Axis", "Markup", "Section", "action_table", "figure", "line_chart", "live_bytes", "loss_curve", "memory_curve",
    "page", "paragraph", "record_script", "routes", "show_bytes", "show_time", "summary", "table", "timeline", "trace",
    "write_trace",
]  # fmt: skip

Recorder.show_by(notebook_frame, write_recordings)
