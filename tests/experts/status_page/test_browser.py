"""The page in a real browser: Chromium, without a window. Skipped by name where there is none."""

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

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, and there is no chromium on the PATH")
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
    """Call ``between`` with the number of each status that is asked for, before it is told."""
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
        # The third expert steps after the page was drawn first: only asking again can show it.
        count = watched(monkeypatch, server, lambda number: train(server, NAMES[2], 7) if number == 1 else None)
        document, said = browse(url, tmp_path / "a", "--virtual-time-budget=9000", "--dump-dom")
    assert said == []
    assert len(count) >= 2
    assert "ffn.0" in document and "ffn.1" in document and "&lt;img src=x" in document and "<img" not in document
    assert document.count("<svg") == 1 and 'aria-label="batches by tasks: 14 of 1 task"' in document
    assert re.findall(r'data-column="steps"><bdi>(\d+)<', document) == ["7", "0", "0"]
    assert 'data-state="live">live<' in document


def test_page_reports_a_lost_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([layer("a")], panel="127.0.0.1:0") as server:

        def fail(number: int) -> None:
            if number >= 1:
                raise RuntimeError("gone")

        watched(monkeypatch, server, fail)
        document, _ = browse(server.panel_url or "", tmp_path / "a", "--virtual-time-budget=9000", "--dump-dom")
    assert 'data-state="lost">no answer since' in document and 'role="rowheader"' in document


@pytest.mark.parametrize("width", [400, 1200])
def test_page_is_not_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    wide = "an.expert.with.a.name.that.does.not.want.to.end." * 4
    with Server([layer(wide), layer("b")], panel="127.0.0.1:0") as server:
        train(server, "b")
        # A frame of that width, since a browser's own window may not be narrower than 500: the panel forbids frames,
        # so its page is looked at as a file.
        (tmp_path / "page.html").write_text(_measured(server.status()), "utf-8")
        frame = tmp_path / "frame.html"
        frame.write_text(f'<iframe src="page.html" width="{width}" height="900"></iframe><p id="said"></p>' + LISTEN)
        document, _ = browse(frame.as_uri(), tmp_path / "p", "--virtual-time-budget=3000", "--dump-dom")
    inner, outer = map(int, re.findall(r'id="said">(\d+) (\d+)<', document)[0])
    assert inner <= outer <= width


LISTEN = "<script>onmessage = e => document.getElementById('said').textContent = e.data</script>"


def _page_with(status: dict[str, Any]) -> str:
    answer = json.dumps(page_status(status)).replace("</", "<\\/")
    fetch = f"<script>fetch = async () => ({{ ok: true, json: async () => ({answer}) }})</script>"
    return http._PAGE.replace("<head>", f"<head>{fetch}")


def _measured(status: dict[str, Any]) -> str:
    root = "document.documentElement"
    tell = f"parent.postMessage({root}.scrollWidth + ' ' + {root}.clientWidth, '*')"
    return _page_with(status).replace("</body>", f"<script>setTimeout(() => {tell}, 1500)</script></body>")


def drawn(found: dict[str, Any], folder: Path) -> str:
    page = folder / "page.html"
    page.write_text(_page_with(found), "utf-8")
    document, said = browse(page.as_uri(), folder / "p", "--virtual-time-budget=1000", "--dump-dom")
    assert said == [] and 'data-state="live">live<' in document
    return re.sub("<script>.*?</script>", "", document, flags=re.DOTALL)


def test_page_draws_every_part_and_escapes_names(tmp_path: Path) -> None:
    name = NASTY.replace("\ud800", "").replace("\x00", "")
    replica = {"role": "follower", "owner": "b:2", "token": 7, "behind": 3, "followers": {name: 1}, "failure": "no way"}
    servers = {"a:1": {"experts": 1, "owns": 0}, "b:2": {"experts": 3, "owns": 2}}
    found = status(
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
    next(iter(found["experts"][name]["pools"].values()))["merged"] = {1: 20, 4: 5}
    seen = drawn(found, tmp_path)
    words = re.sub("<[^>]*>", "|", seen)
    assert "alert(1)" in words and "<script" not in seen and "<title>draining: &lt;/title" in seen
    assert 'aria-label="batches by tasks: 20 of 1 task, 5 of 3 to 4 tasks"' in seen
    assert (
        "lease: no route" in words and "directory: away for 1.5 s" in words and "|draining|: bye, up 00:00:0" in words
    )
    assert "a:1 (this one)" in words and "|b:2|" in words and "no way" in words and "00:00:00 UTC" in words
    assert words.index("|server full|") < words.index("|INFO|") and "1\u202f234" in words


def test_of_a_thousand_experts_500_are_listed(tmp_path: Path) -> None:
    plain = status()
    many = {field: dict.fromkeys(map(str, range(1000)), plain[field]["a"]) for field in ("experts", "keeping")}
    seen = drawn({**plain, **many}, tmp_path)
    assert "and 500 more in /status.json" in seen and len(re.findall('data-column="durable step"', seen)) == 500
    assert 'id="servers"' not in seen and 'id="replicas"' not in seen and "Nothing was refused." in seen


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
