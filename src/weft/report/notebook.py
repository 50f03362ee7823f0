"""A recording as a notebook shows it: as a page within the page, so that neither changes the looks of the other."""

from weft.core.events import Recorder
from weft.core.markup import Markup, tag
from weft.report.curves import memory_curve
from weft.report.measure import live_bytes
from weft.report.page import Section, figure, page
from weft.report.timeline import timeline

_STAGE, _REST, _CURVE = 48, 240, 420  # pixels of a lane, of all around the lanes, and of the curve


def recording(recorder: Recorder) -> Markup:
    """The timeline of a recorder's events, and its memory curve where bytes were counted."""
    stages = 1 + max((event.action.stage for event in recorder.events), default=0)
    pictures = [figure(timeline(recorder.events))]
    if recorder.bytes:
        pictures.append(figure(memory_curve({"alive for backward": live_bytes(recorder)})))
    height = _REST + _STAGE * stages + _CURVE * bool(recorder.bytes)
    title = f"{len(recorder.events)} recorded actions"
    style = f"width: 100%; height: {height}px; border: 0"
    return tag("iframe", srcdoc=page(title, [Section("Timeline", pictures)]), style=style)
