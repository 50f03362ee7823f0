"""The page as text: escaped, complete, accessible, and without anything from outside."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.panel.panel_cases import NASTY, status
from weft.experts.panel.answer import POLICY
from weft.experts.panel.histogram import histogram
from weft.experts.panel.page import page, parts, still
from weft.experts.panel.summary import summary

VOID = {"meta", "link"}
PLAIN = status()


class Reader(HTMLParser):
    """Reads strictly: every element is closed in its turn."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(document)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.seen if tag == name]


def renamed(name: str, **changes: Any) -> dict[str, Any]:
    one = {field: {name: PLAIN[field]["a"]} for field in ("experts", "keeping")}
    return {**PLAIN, **one, **changes}


@given(st.text() | st.just(NASTY))
@settings(max_examples=40)
def test_no_name_makes_an_element(name: str) -> None:
    audit = [{"time": 0.0, "client": name, "peer": name, "expert": name, "what": name, "why": name}]
    servers = {name: {"experts": 1, "owns": 0}}
    directory = {"here": "", "away_seconds": 1.0, "servers": servers}
    found = renamed(name, audit=audit, directory=directory, failures={name: name}, draining=name, address=name)
    found |= {"refusals": {name: 1}, "errors": {name: 1}, "answered": {name: 1}}
    tags = {tag for tag, _ in Reader(page(found)).seen}
    assert tags <= {
        *("html", "head", "body", "meta", "link", "noscript", "title", "style", "script", "main", "header", "footer"),
        *("h1", "h2", "small", "p", "b", "code", "div", "section", "dl", "dt", "dd", "bdi", "span", "a"),
        *("table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "text"),
    }
    assert len(Reader(page(found)).tags("script")) == 1
    page(found).encode()  # also lone surrogates


def test_the_policy_knows_what_stands_in_the_page_and_nothing_comes_from_outside() -> None:
    document = page(PLAIN)
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in POLICY
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY
    assert "//" not in document.replace("<!DOCTYPE", "") and "style=" not in document and " on" not in document[:200]


def test_a_still_shows_the_same_and_does_nothing() -> None:
    document = still(PLAIN)
    assert str(parts(PLAIN)) in document
    assert not {"script", "link", "noscript", "a"} & {tag for tag, _ in Reader(document).seen} and "//" not in document


def test_without_scripts_it_loads_itself_again() -> None:
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in page(PLAIN)


def test_tables_are_tables_for_those_who_listen() -> None:
    found = Reader(page(PLAIN))
    tables = found.tags("table")
    assert tables and all(table["role"] == "table" for table in tables)
    titles = {attributes["id"] for attributes in found.tags("h2") if "id" in attributes}
    assert {table["aria-labelledby"] for table in tables} <= titles
    assert all(th["scope"] in ("col", "row") for th in found.tags("th"))
    assert all(td["data-column"] for td in found.tags("td"))
    assert found.tags("html")[0]["lang"] == "en"
    ids = [attributes["id"] for _, attributes in found.seen if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_histogram_says_in_words_what_it_draws() -> None:
    drawn = histogram({1: 20, 4: 5})
    assert 'aria-label="batches by tasks: 20 of 1 task, 5 of 3 to 4 tasks"' in drawn
    heights = [int(each) for each in re.findall(r'height="(\d+)" rx', drawn)]
    assert heights == [26, 0, 6]
    assert histogram({}) == "–"
    assert re.findall(r'height="(\d+)" rx', histogram({1: 10**6, 2: 1}))[1] == "2"  # what was there is seen


def test_what_goes_wrong_is_said_first() -> None:
    found = status(failures={"lease": "no route"}, draining="bye")
    text = Reader(parts(found)).text
    assert "lease: no route" in text and "draining: bye" in text and "serving" not in text
    assert text.index("no route") < text.index("Experts")


def test_a_directory_shows_who_is_alive() -> None:
    directory = {"here": "a:1", "away_seconds": 0.0, "servers": {"b:2": {"experts": 3, "owns": 2}}}
    assert "b:2" in Reader(parts(status(directory=directory))).text
    assert "Alive" not in Reader(parts(status())).text
    assert [line.here for line in summary(status(directory=directory)).servers] == [False]


def test_replicas_show_who_owns_what() -> None:
    one = {"role": "follower", "owner": "b:2", "token": 7, "behind": 3, "followers": {}, "failure": "no way"}
    text = Reader(parts(status(replicas={"a": one}))).text
    assert "b:2" in text and "no way" in text and "role here" in text
    assert "role here" not in Reader(parts(status())).text


def test_a_thousand_experts_are_not_all_drawn() -> None:
    one = PLAIN["experts"]["a"], PLAIN["keeping"]["a"]
    many = {**PLAIN, "experts": dict.fromkeys(map(str, range(1000)), one[0])}
    many["keeping"] = dict.fromkeys(map(str, range(1000)), one[1])
    assert "and 500 more in /status.json" in parts(many)
