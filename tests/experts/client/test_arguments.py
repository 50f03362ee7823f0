"""Invalid tokens and options of a client: every fault is reported at once, before anything is sent."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.core.errors import UsageError
from torchweft.core.validation import Validator, token_fault
from torchweft.experts.client import ClientTls, Connections, GrpcTransport, LocalTransport, RemoteExpert, Retry
from torchweft.experts.client.expert_group import create_remote_experts
from torchweft.experts.client.remote import check_remote_expert
from torchweft.experts.compression import Policy
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.replication import ReplicaOptions

HERE = "127.0.0.1:1"
INVALID_TOKENS = ["", " ", "s3cret\n", "\ts3cret", "s3\ncret", "s3cret\0", "s3crät", "s3cret\x7f"]


TOKEN_USERS: list[Callable[[str], object]] = [
    lambda token: GrpcTransport(HERE, token=token),
    lambda token: RemoteExpert("x", HERE, token=token),
    lambda token: Connections(token=token),
    lambda token: ReplicaOptions(token=token),
]


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1))
def test_invalid_token_is_refused_and_not_shown(token: str) -> None:
    assert token_fault(token) == [] == token_fault(None) == token_fault(f"{token} {token}")
    for make in TOKEN_USERS:
        for wrong in INVALID_TOKENS:
            with pytest.raises(UsageError, match="token ") as caught:
                make(wrong)
            assert "s3" not in str(caught.value)


GOOD: dict[str, list[Any]] = {
    "uid": ["ffn.0"],
    "timeout": [1, 0.5],
    "retry": [None, Retry(attempts=2)],
    "compression": [None, Policy(inputs="fp16")],
    "client": ["", "me"],
    "accumulate": [False, True],
    "keep_graph": [False, True],
    "tls": [None, ClientTls()],
    "token": [None, "s3cret"],
}

BAD: dict[str, list[Any]] = {
    "uid": ["", None, 5, b"ffn.0"],
    "where": ["nowhere", None, b"a:80", ("a", 80), 5, LocalDirectory(), object()],
    "timeout": [0, -1.0, float("nan"), float("inf"), "3", None, True],
    "retry": [3, False, 0, "never"],
    "compression": ["fp16", 0, ""],
    "client": [None, 5, b"me"],
    "accumulate": [None, 1, "yes"],
    "keep_graph": [None, 0, "no"],
    "tls": [True, "tls.pem"],
    "token": [5, b"s3cret", "s3cret\n"],
    "timout": [1.0],
}


def faults_of(uid: Any, where: Any, **options: Any) -> list[str]:
    check = Validator("invalid")
    check_remote_expert(check, uid, where, options)
    return check.faults


def test_each_fault_names_its_argument(subtests: pytest.Subtests) -> None:
    for name, value in [(name, value) for name, values in BAD.items() for value in values]:
        with subtests.test(name=name, value=value):
            good = {option: values[0] for option, values in GOOD.items()}
            (fault,) = faults_of(**{"where": HERE, **good, name: value})
            assert fault.startswith((name, f"there is no option '{name}'"))


@given(st.data())
def test_exactly_the_invalid_arguments_are_reported(data: st.DataObject) -> None:
    wrong = data.draw(st.sets(st.sampled_from(list(BAD))))
    with LocalTransport(lambda *_: None) as transport, Connections() as connections:
        good = {**GOOD, "where": [HERE] if wrong & {"tls", "token"} else [HERE, transport, connections]}
        drawn = {
            name: data.draw(st.sampled_from((BAD if name in wrong else good)[name]))
            for name in {**good, **dict.fromkeys(wrong)}
        }
        if not isinstance(drawn["where"], str):
            drawn.update({name: None for name in ("tls", "token") if name not in wrong})
        faults = faults_of(**drawn)
    about = {name for name in BAD for fault in faults if fault.startswith((name, f"there is no option '{name}'"))}
    assert about - {"tls"} == wrong - {"tls"} and (wrong <= about)
    assert "s3cret" not in "".join(faults)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RemoteExpert("", "nowhere", timeout=0.0, token="a\n"), ["uid", "where", "timeout", "token"]),
        (lambda: Connections(token=" "), ["token"]),
        (lambda: create_remote_experts("x", LocalDirectory()), ["list of names"]),
        (lambda: create_remote_experts(["", "x"], LocalDirectory(), timout=3), ["uid is ''", "no option 'timout'"]),
        (lambda: create_remote_experts(["x"], LocalDirectory(), token="a"), ["tls= and token="]),
        (lambda: create_remote_experts([""], {"x": "x"}), ["uid is ''", "the address of 'x' is 'x', wanted host:port"]),
        (
            lambda: Connections(cast(Any, {"": "x", "b": 5, "c": HERE}), token=" "),
            ["token", "uid is ''", "the address of '' is 'x'", "the address of 'b' is 5"],
        ),
    ],
)
def test_constructors_report_all_faults_at_once(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert all(word in str(caught.value) for word in words)
