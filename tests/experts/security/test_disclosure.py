"""Messages disclose only permitted facts, foreign text cannot forge logs, and no server is open by default."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.experts.expert_cases import fussy_backend
from tests.experts.server.server_cases import access_of
from torchweft.cli import main
from torchweft.core.errors import UsageError, escape
from torchweft.experts.client import GrpcTransport
from torchweft.experts.client import status as client_status
from torchweft.experts.errors import ForbiddenError, UnknownExpertError
from torchweft.experts.server import Access, Audit, Caller, Grant, Role, Server
from torchweft.experts.server.config import build, parse_expert, read_config
from torchweft.experts.wire import Call, Header, Kind

HOSTILE = "\x1b]0;owned\x07\n\u202e2026-01-01 accepted: client='root'"


def table(**more: Any) -> dict[str, Any]:
    return {"experts": [parse_expert("f=ffn:hidden=8")], **more}


def test_error_lists_only_permitted_experts() -> None:
    access = Access([Grant("me", "mine.*", Role.TRAIN)], {"s3cret": "me"})
    experts = build({"experts": [parse_expert(f"{name}=ffn:hidden=8") for name in ("mine.0", "theirs.0")]})
    backends = [served.backend for served in experts._dispatcher.experts().values()]
    with Server(backends, access=access) as server, GrpcTransport(server.address, token="s3cret") as transport:
        for uid, kind in (("mine.1", UnknownExpertError), ("theirs.0", ForbiddenError), ("theirs.1", ForbiddenError)):
            error = transport.submit(Call(Header(kind=Kind.INFO, call_id=0, uid=uid)), 5.0).exception(5.0)
            assert type(error) is kind
            assert "theirs" not in str(error).replace(uid, "")
            if kind is UnknownExpertError:
                assert "there are 1: mine.0" in str(error)


def test_a_grant_without_a_client_is_for_named_ones() -> None:
    access = Access([Grant(expert="ffn.*", role=Role.TRAIN)], {"s3cret": "me"})
    assert access.role("me", "ffn.0") is Role.TRAIN
    assert access.role("", "ffn.0") is Role.NONE and not access.admits("")
    assert Access([Grant("*", "ffn.*")]).role("", "ffn.0") is Role.TRAIN  # explicitly for all clients
    served = build(table(tokens={"s3cret": "me"}, grants=[{"expert": "*", "role": "train"}]))
    assert not access_of(served).admits("") and access_of(served).admits("me")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:7070", "10.0.0.7:7070", "host.example:7070"])
@pytest.mark.parametrize("more", [{}, {"tls": {"key": "k", "certificate": "c"}}])
def test_open_server_on_a_network_is_refused(address: str, more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--insecure"):
        build(table(address=address, **more))
    for mine in ("127.0.0.1:0", "127.8.8.8:0", "[::1]:0", "localhost:0"):  # reachable from this machine only
        build(table(address=mine))
    if not more:
        build(table(address=address, insecure=True))
        build(table(address=address, grants=[]))


def test_the_command_line_says_insecure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("torchweft.experts.server.command.serve", lambda table, **_: seen.append(table))
    words = ["serve", "--expert", "f=ffn:hidden=8", "--address", "0.0.0.0:0"]
    main([*words, "--insecure"])
    assert seen[0]["insecure"] is True
    monkeypatch.undo()
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and "--insecure" in capsys.readouterr().err


def test_open_server_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchweft.experts.server"):
        with Server(address="0.0.0.0:0", access=Access([])):
            pass
        assert not caplog.text
        with Server(address="0.0.0.0:0"):
            pass
    assert "anybody who reaches 0.0.0.0:0 can" in caplog.text


def test_a_stranger_cannot_fill_the_audit_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    audit = Audit(lambda: now[0])
    with caplog.at_level(logging.WARNING, "torchweft.experts.audit"):
        for number in range(3000):  # 1000 a second
            now[0] = number / 1000
            audit.refused(Caller(HOSTILE * 20, "1.2.3.4:5"), "x\0" * 500, "INFO", "why " * 500)
        written = len(caplog.text.encode())
        assert written < 32 << 10 and max(map(len, caplog.messages)) < 1000
        assert len(caplog.messages) < 40  # including the counts of suppressed lines
        now[0] += 60.0
        caplog.clear()
        audit.refused(Caller("", "1.2.3.4:5"), "x", "INFO", "why")
        assert len(caplog.messages) == 2 and "more, too many to log each" in caplog.messages[0]
    assert audit.counts() == {"INFO": 3001}  # suppressed lines are counted too
    assert max(len(entry.expert) + len(entry.why) + len(entry.client) for entry in audit.last()) < 1000


def test_foreign_text_cannot_control_a_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = Audit()
    with caplog.at_level(logging.WARNING, "torchweft.experts.audit"):
        audit.refused(Caller(HOSTILE, HOSTILE), HOSTILE, "INFO", HOSTILE)
    assert len(caplog.messages) == 1 and caplog.messages[0].isprintable()
    with Server([fussy_backend()]) as server:
        report = server.status()
    report["address"] = report["draining"] = HOSTILE
    report["failures"] = {HOSTILE: HOSTILE}
    report["refusals"] = {HOSTILE: 1}
    monkeypatch.setattr(GrpcTransport, "status", lambda self, timeout: json.dumps(report, ensure_ascii=False).encode())
    for words in (["status", "127.0.0.1:1"], ["status", "127.0.0.1:1", "--json"]):
        main(words)
        text = capsys.readouterr().out
        assert all(line.isprintable() for line in text.split("\n"))

    def refuse(self: GrpcTransport, timeout: float) -> bytes:
        raise ForbiddenError(HOSTILE)

    monkeypatch.setattr(GrpcTransport, "status", refuse)
    with pytest.raises(SystemExit):
        main(["status", "127.0.0.1:1"])
    assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))


def test_escaped_text_can_be_read_and_is_cut() -> None:
    assert escape("Größe\x1b[2J\n", 100) == "Größe\\x1b[2J\\n" and escape("a\nb\tc", lines=True) == "a\nb\\tc"
    assert escape("\n" * 100, 10) == "\\n\\n\\n\\..."


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": "s3cret"},
        {"tokens": ["s3cret"]},
        {"tokens": {"s3cret": 5}, "grants": []},
        {"replicas": [{"token": "s3cret"}], "directory": "local"},
        {"replicas": {"token": ["s3cret"]}, "directory": "local"},
        {"replicas": {"token": "s3cret\n"}, "directory": "local"},
    ],
)
def test_a_mistyped_token_is_not_printed(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        build(table(**more))
    assert "s3cret" not in str(caught.value)


def test_invalid_toml_is_reported_without_tokens(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    for text in (
        'tokens = { s3cret = "a", s3cret = "b" }',
        'tokens = { s3cret = "a", s3cret.x = "b" }',
        "[tokens.s3cret]\n[tokens.s3cret]\n",
        "tokens = {}\n[tokens.s3cret]\n",
        "a = = b",
    ):
        file.write_text(text, "utf-8")
        with pytest.raises(UsageError, match=r"is not TOML: .*\(at line") as caught:
            read_config(file)
        assert "s3cret" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n", "utf-8")
    seen: list[str | None] = []
    monkeypatch.setattr(client_status, "status", lambda address, **more: seen.append(more["token"]))
    main(["status", "127.0.0.1:1", "--token-file", str(file)])
    monkeypatch.setenv("TORCHWEFT_TOKEN", "other")
    main(["status", "127.0.0.1:1"])
    main(["status", "127.0.0.1:1", "--token", "third"])
    assert seen == ["s3cret", "other", "third"]
    for words in (["--token", "x", "--token-file", str(file)], ["--token-file", str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as stop:
            main(["status", "127.0.0.1:1", *words])
        assert stop.value.code == 2
