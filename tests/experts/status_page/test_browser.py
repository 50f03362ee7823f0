"""The page in a real browser: headless Chromium. The tests are skipped if it is not installed."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.experts.status_page.panel_cases import NASTY, layer, status, train
from torchweft.experts.server import Server
from torchweft.experts.status_page import http
from torchweft.experts.status_page.metrics import page_status
from torchweft.experts.status_page.recent import RecentCounters

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, and there is no chromium on the PATH"),
]
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"),
    *("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
]
NAMES = ["ffn.0", "ffn.1", "<img src=x onerror=console.log('x')>"]


def browse(url: str, profile: Path, *words: str) -> tuple[str, list[str]]:
    assert CHROMIUM is not None
    argv = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", *words, url]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=80, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def watched(monkeypatch: pytest.MonkeyPatch, server: Server, between: Callable[[int], None]) -> list[int]:
    """Call ``between`` with the number of each status request, before the status is returned."""
    count: list[int] = []
    statistics = server.statistics

    def counted() -> Any:
        between(len(count))
        count.append(1)
        return statistics()

    monkeypatch.setattr(server, "statistics", counted)
    monkeypatch.setattr(http, "STATUS_SECONDS", 0.0)  # the browser's clock runs ahead of ours
    return count


def test_page_shows_changes_without_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([layer(name) for name in NAMES], panel="127.0.0.1:0") as server:
        url = server.panel_url or ""
        # The third expert steps after the page was loaded and drawn: only asking again can show it.
        count = watched(monkeypatch, server, lambda number: train(server, NAMES[2], 7) if number == 2 else None)
        document, said = browse(url, tmp_path / "a", "--virtual-time-budget=9000", "--dump-dom")
    assert said == []
    assert len(count) >= 3
    assert "ffn.0" in document and "ffn.1" in document and "&lt;img src=x" in document and "<img" not in document
    assert document.count("<svg") == 1 and 'aria-label="batches by tasks: 14 of 1 task"' in document
    assert re.findall(r'data-column="steps total"><bdi>(\d+)<', document) == ["7", "0", "0"]
    assert 'data-state="live">live<' in document


def test_page_reports_a_lost_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([layer("a")], panel="127.0.0.1:0") as server:

        def fail(number: int) -> None:
            if number >= 2:
                raise RuntimeError("gone")

        watched(monkeypatch, server, fail)
        document, _ = browse(server.panel_url or "", tmp_path / "a", "--virtual-time-budget=9000", "--dump-dom")
    assert 'data-state="lost">no answer since' in document and 'role="rowheader"' in document


@pytest.mark.parametrize("width", [360, 400, 820, 980, 1200])
def test_page_is_not_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    wide = "an.expert.with.a.name.that.does.not.want.to.end." * 4
    with Server([layer(wide), layer("b")], panel="127.0.0.1:0") as server:
        train(server, "b")
        # In a frame, because a window of the browser cannot be narrower than 500 pixels. The panel forbids frames, so
        # the frame shows its page as a file.
        (tmp_path / "page.html").write_text(_measured(server.status()), "utf-8")
        frame = tmp_path / "frame.html"
        frame.write_text(f'<iframe src="page.html" width="{width}" height="900"></iframe><p id="said"></p>' + LISTEN)
        document, _ = browse(frame.as_uri(), tmp_path / "p", "--virtual-time-budget=3000", "--dump-dom")
    inner, outer = map(int, re.findall(r'id="said">(\d+) (\d+)<', document)[0])
    assert inner <= outer <= width


LISTEN = "<script>onmessage = e => document.getElementById('said').textContent = e.data</script>"


def _page_with(status: dict[str, Any]) -> str:
    answer = json.dumps(page_status(status, RecentCounters())).replace("</", "<\\/")
    fetch = f"<script>fetch = async () => ({{ ok: true, json: async () => ({answer}) }})</script>"
    return http._PAGE.replace("<head>", f"<head>{fetch}")


def _measured(status: dict[str, Any]) -> str:
    root = "document.documentElement"
    tell = f"parent.postMessage({root}.scrollWidth + ' ' + {root}.clientWidth, '*')"
    return _page_with(status).replace("</body>", f"<script>setTimeout(() => {tell}, 1500)</script></body>")


def drawn(current: dict[str, Any], folder: Path, script: str = "") -> str:
    """Document of the page for a status, after running ``script`` in the page."""
    page = folder / "page.html"
    later = f"<script>setTimeout(() => {{ {script} }}, 500)</script></body>"
    page.write_text(_page_with(current).replace("</body>", later), "utf-8")
    document, said = browse(page.as_uri(), folder / "p", "--virtual-time-budget=1000", "--dump-dom")
    assert said == [] and 'data-state="live">live<' in document
    return re.sub("<script>.*?</script>", "", document, flags=re.DOTALL)


def experts_in(document: str) -> list[str]:
    """Names of the experts in the order of the table."""
    table = document.partition('<section id="experts">')[2].partition("</section>")[0]
    return re.findall(r'<th role="rowheader" scope="row"><bdi>([^<]*)<', table)


def five_experts() -> dict[str, Any]:
    current = status(["ffn.0", "ffn.1", "gate", "Gate", "z"])
    for name, steps in (("ffn.1", 7), ("gate", 12), ("z", 100)):
        current["experts"][name]["steps"] = steps
    current["keeping"]["gate"]["durable"] = 3
    return current


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("", ["Gate", "ffn.0", "ffn.1", "gate", "z"]),
        ("press(0)", ["z", "gate", "ffn.1", "ffn.0", "Gate"]),
        ("press(1)", ["z", "gate", "ffn.1", "Gate", "ffn.0"]),
        ("press(1); press(1)", ["ffn.0", "Gate", "ffn.1", "gate", "z"]),
        ("press(2)", ["gate", "Gate", "ffn.0", "ffn.1", "z"]),
        ("choose(1)", ["z", "gate", "ffn.1", "Gate", "ffn.0"]),
        ("filter('GATE')", ["Gate", "gate"]),
        ("press(1); filter('f')", ["ffn.1", "ffn.0"]),
        ("filter('none')", []),
    ],
)
def test_experts_are_sorted_and_filtered(tmp_path: Path, script: str, names: list[str]) -> None:
    helpers = """
    const fire = (thing, event) => thing.dispatchEvent(new Event(event));
    const press = (column) => document.querySelector(`[data-sort="${column}"]`).click();
    const choose = (column) => { const s = document.querySelector("select"); s.value = column; fire(s, "change"); };
    const filter = (words) => { const s = document.querySelector("input"); s.value = words; fire(s, "input"); };
    """
    document = drawn(five_experts(), tmp_path, helpers + script)
    assert experts_in(document) == names
    assert names or "No name of an expert has these letters." in document
    if script == "press(1); press(1)":
        assert re.findall(r'aria-sort="(\w+)"', document) == ["ascending"]


def test_filter_keeps_words_and_focus_through_a_redraw(tmp_path: Path) -> None:
    """The next status replaces only the table below the filter."""
    script = """
    const input = document.querySelector("input");
    input.focus();
    input.value = "gate";
    input.dispatchEvent(new Event("input"));
    document.dispatchEvent(new Event("visibilitychange"));
    const tell = () => { document.title = `${document.activeElement === input} ${input.value}`; };
    setTimeout(tell, 200);
    """
    document = drawn(five_experts(), tmp_path, script)
    assert "<title>true gate</title>" in document and experts_in(document) == ["Gate", "gate"]


def test_six_experts_fit_on_the_screen_of_a_phone(tmp_path: Path) -> None:
    current = status([f"layer.{i}.expert" for i in range(8)])
    for expert in current["experts"].values():
        next(iter(expert["pools"].values())).update(merged={1: 20, 4: 5}, answered=12345, answer_seconds=321.0)
    tell = """
    const rows = document.querySelectorAll("#experts tbody tr"), root = document.documentElement;
    const bottom = Math.ceil(rows[5].getBoundingClientRect().bottom);
    parent.postMessage(`${bottom} ${root.scrollWidth - root.clientWidth}`, "*");
    """
    page = _page_with({**current, "seconds": 50.0, "address": "10.20.30.40:7070"})
    (tmp_path / "page.html").write_text(
        page.replace("</body>", f"<script>setTimeout(() => {{ {tell} }}, 1500)</script></body>"), "utf-8"
    )
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe src="page.html" width="390" height="844"></iframe><p id="said"></p>{LISTEN}')
    document, _ = browse(frame.as_uri(), tmp_path / "p", "--virtual-time-budget=3000", "--dump-dom")
    bottom, overflow = map(int, re.findall(r'id="said">(\d+) (\d+)<', document)[0])
    assert bottom <= 844 and overflow == 0


def test_every_column_of_numbers_has_a_unit(tmp_path: Path) -> None:
    replica = {"role": "follower", "owner": "b:2", "token": 7, "behind": 3, "followers": {"c": 1}, "failure": None}
    device = {"alive": True, "working_on": None, "seconds": 10.0, "busy": 5.0, "batches": 20}
    current = status(
        turned_away=2,
        replicas={"a": replica},
        runtimes={"cpu": device},
        directory={"here": "a:1", "away_seconds": 0, "servers": {"a:1": {"experts": 1, "owns": 0}}},
    )
    document = drawn({**current, "seconds": 20.0}, tmp_path)
    bare = {"expert", "role here", "owner", "failure", "reason", "of what", "device", "thread", "works on", "server"}
    for cell in re.findall(r'data-column="([^"]*)"', document):
        assert cell in bare or cell.count(" ") or cell == "when UTC", cell
    for name, value in (("busy % of the last minute", "50"), ("batches /s", "2"), ("behind steps", "3")):
        assert f'data-column="{name}"><bdi>{value}<' in document


def test_event_is_shown_once(tmp_path: Path) -> None:
    """A refused gradient also counts as a failed task and as an error answer."""
    current = status()
    expert = current["experts"]["a"]
    expert["refused_gradients"] = {"gradient": 3}
    forward, backward, *_ = expert["pools"].values()
    backward["failed"], forward["refused"], forward["expired"] = {"gradient": 3, "module": 2}, {"overload": 5}, 1
    errors = {"gradient": 3, "module": 2, "overload": 5, "expired": 1, "unknown": 4, "forbidden": 6, "wire": 7}
    current |= {"errors": errors, "refusals": {"FORWARD": 6}, "broken": 7, "turned_away": 8}
    words = re.sub("<[^>]*>", "|", drawn({**current, "seconds": 30.0}, tmp_path))
    table = words.partition("|Refused or failed|")[2].partition("|Devices|")[0]
    counts = [int(word) for word in table.split("|") if word.isdigit()]
    assert sorted(counts) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "Answered errors" not in words and "Clients rejected" not in words


def test_page_draws_every_part_and_escapes_names(tmp_path: Path) -> None:
    name = NASTY.replace("\ud800", "").replace("\x00", "")
    replica = {"role": "follower", "owner": "b:2", "token": 7, "behind": 3, "followers": {name: 1}, "failure": "no way"}
    servers = {"a:1": {"experts": 1, "owns": 0}, "b:2": {"experts": 3, "owns": 2}}
    current = status(
        [name],
        directory={"here": "a:1", "away_seconds": 1.5, "servers": servers},
        audit=[{"time": 0.0, "client": name, "peer": name, "expert": name, "what": "TRAIN", "why": name}],
        failures={"lease": "no route"},
        draining="bye",
        address=name,
        replicas={name: replica},
        refusals={"INFO": 3, name: 1},
        errors={name: 1},
        answered={name: 1},
        turned_away=1234,
    )
    next(iter(current["experts"][name]["pools"].values()))["merged"] = {1: 20, 4: 5}
    seen = drawn(current, tmp_path)
    words = re.sub("<[^>]*>", "|", seen)
    assert "alert(1)" in words and "<script" not in seen and "<title>draining: &lt;/title" in seen
    assert 'aria-label="batches by tasks: 20 of 1 task, 5 of 3 to 4 tasks"' in seen
    assert (
        "lease: no route" in words and "directory: away for 1.5 s" in words and "|draining|: bye, up 00:00:0" in words
    )
    assert "a:1 (this one)" in words and "|b:2|" in words and "no way" in words and "|00:00:00|" in words
    assert words.index("|server full|") < words.index("|INFO|") and "1\u202f234" in words


def test_page_lists_500_of_a_thousand_experts(tmp_path: Path) -> None:
    plain = status()
    many = {field: dict.fromkeys(map(str, range(1000)), plain[field]["a"]) for field in ("experts", "keeping")}
    seen = drawn({**plain, **many}, tmp_path)
    assert "and 500 more in /status.json" in seen and len(re.findall('data-column="saved step"', seen)) == 500
    assert (
        'id="servers"' not in seen
        and 'id="replicas"' not in seen
        and "Nothing was refused, and nothing failed." in seen
    )


def test_content_security_policy_matches_the_page() -> None:
    policy = http._HEADERS["Content-Security-Policy"]
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", http._PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    linked = re.findall(r'(?:src|href)="([^"]*)"', http._PAGE)
    assert set(linked) == {"data:,", "/status.json", "/metrics"}
    assert "innerHTML" not in http._PAGE and "style=" not in http._PAGE
