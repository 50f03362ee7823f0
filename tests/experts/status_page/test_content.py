"""The content of the page as data, and the page itself: complete, accessible, and without anything from outside."""

import base64
import hashlib
import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.status_page.panel_cases import NASTY, status
from weft.experts.status_page import http
from weft.experts.status_page.summary import content, summary

PLAIN = status()


def renamed(name: str, **changes: Any) -> dict[str, Any]:
    one = {field: {name: PLAIN[field]["a"]} for field in ("experts", "keeping")}
    return {**PLAIN, **one, **changes}


def table(found: dict[str, Any], key: str) -> dict[str, Any] | None:
    return next((each for each in found["tables"] if each["id"] == key), None)


def words(found: dict[str, Any], key: str) -> str:
    return json.dumps(table(found, key), ensure_ascii=False)


@given(st.text() | st.just(NASTY))
@settings(max_examples=40)
def test_any_name_is_plain_data(name: str) -> None:
    audit = [{"time": 0.0, "client": name, "peer": name, "expert": name, "what": name, "why": name}]
    servers = {name: {"experts": 1, "owns": 0}}
    directory = {"here": "", "away_seconds": 1.0, "servers": servers}
    found = renamed(name, audit=audit, directory=directory, failures={name: name}, draining=name, address=name)
    found |= {"refusals": {name: 1}, "errors": {name: 1}, "answered": {name: 1}}
    made = content(found)
    assert json.loads(json.dumps(made)) == made
    assert made["head"]["address"] == name and made["title"].endswith(f"{name} · weft")


def test_the_policy_knows_what_stands_in_the_page_and_nothing_comes_from_outside() -> None:
    policy = http._HEADERS["Content-Security-Policy"]
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", http._PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    linked = re.findall(r'(?:src|href)="([^"]*)"', http._PAGE)
    assert set(linked) == {"data:,", "/status.json", "/metrics"}
    assert "innerHTML" not in http._PAGE and "style=" not in http._PAGE


def test_a_histogram_says_in_words_what_it_draws() -> None:
    changed = status()
    changed["experts"]["a"]["pools"]["expert0.forward"]["merged"] = {1: 20, 4: 5}
    drawn = table(content(changed), "experts")
    assert drawn is not None
    bars = drawn["rows"][0][-1]
    assert bars["label"] == "batches by tasks: 20 of 1 task, 5 of 3 to 4 tasks"
    assert [(bar["size"], bar["count"]) for bar in bars["bars"]] == [("1", 20), ("2", 0), ("4", 5)]
    assert (table(content(PLAIN), "experts") or {})["rows"][0][-1]["bars"] == []


def test_what_fails_is_an_alert() -> None:
    found = content(status(failures={"lease": "no route"}, draining="bye"))
    assert found["alerts"] == ["lease: no route"]
    assert found["head"]["state"] == "draining" and found["head"]["rest"].startswith(": bye, up ")


def test_a_directory_shows_who_is_alive() -> None:
    directory = {"here": "a:1", "away_seconds": 0.0, "servers": {"b:2": {"experts": 3, "owns": 2}}}
    assert "b:2" in words(content(status(directory=directory)), "servers")
    assert table(content(status()), "servers") is None
    assert [line.here for line in summary(status(directory=directory)).servers] == [False]


def test_replicas_show_who_owns_what() -> None:
    one = {"role": "follower", "owner": "b:2", "token": 7, "behind": 3, "followers": {}, "failure": "no way"}
    told = words(content(status(replicas={"a": one})), "replicas")
    assert "b:2" in told and "no way" in told and "role here" in told
    assert table(content(status()), "replicas") is None


def test_of_a_thousand_experts_500_are_listed() -> None:
    one = PLAIN["experts"]["a"], PLAIN["keeping"]["a"]
    many = {**PLAIN, "experts": dict.fromkeys(map(str, range(1000)), one[0])}
    many["keeping"] = dict.fromkeys(map(str, range(1000)), one[1])
    found = table(content(many), "experts")
    assert found is not None and len(found["rows"]) == 500 and found["note"] == "and 500 more in /status.json"
