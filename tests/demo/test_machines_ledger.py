"""The ledger knows what was sent and acknowledged, and an answer that it throws away costs no second step."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import pytest
import torch

pytest.importorskip("grpc", reason="the act needs the extra `experts`")

from weft.demo.machines_ledger import Ledger, Noted
from weft.demo.machines_model import digit_expert
from weft.experts.client import LocalTransport, RemoteExpert
from weft.experts.client.retry import NEVER, Retry
from weft.experts.client.transport import TransportStatistics
from weft.experts.server import Server
from weft.experts.wire import Call, Header, Kind, LostError, Received


@contextmanager
def noted(ledger: Ledger, retry: Retry | None = None) -> Iterator[tuple[Server, RemoteExpert]]:
    """One expert, called through the ledger without a network."""
    expert = digit_expert(4, 0).backend("x", partial(torch.optim.SGD, lr=0.1))
    with Server([expert]) as server, LocalTransport(server.handler(), name="here:1") as inner:
        yield server, RemoteExpert("x", Noted(inner, ledger), retry=retry)


def steps(remote: RemoteExpert, count: int) -> None:
    for _ in range(count):
        remote(torch.ones(2, 4)).sum().backward()


def test_an_answer_that_is_thrown_away_is_asked_for_again_and_steps_once() -> None:
    ledger = Ledger(lose_every=3)
    with noted(ledger, Retry(first=0.0, longest=0.0)) as (server, remote):
        steps(remote, 6)
        records = server.statistics().experts["x"].records
        assert (records.keys, records.repeated, server.statistics().experts["x"].steps) == (6, 2, 6)
    told = ledger.told()
    assert told["accounts"] == {"here:1": {"x": {"sent": 6, "acknowledged": 6, "step": 6, "durable": None}}}
    assert told["lost"] == 2 and told["errors"] == {"LostError": 2}


def test_a_call_whose_answer_is_lost_for_good_is_sent_and_not_acknowledged() -> None:
    ledger = Ledger(lose_every=1)
    with noted(ledger, NEVER) as (server, remote):
        with pytest.raises(LostError, match="thrown away on purpose"):
            steps(remote, 1)
        assert server.statistics().experts["x"].steps == 1  # the case that books have to allow for
    account = ledger.told()["accounts"]["here:1"]["x"]
    assert (account["sent"], account["acknowledged"]) == (1, 0)


def test_a_forward_is_no_backward_but_tells_when_an_address_first_answered() -> None:
    times = iter([5.0, 6.0, 7.0])
    ledger = Ledger(clock=lambda: next(times))
    with noted(ledger) as (_, remote), torch.no_grad():
        remote(torch.ones(2, 4))
        remote(torch.ones(2, 4))
    assert ledger.first_answers() == {"here:1": 5.0}
    assert ledger.told()["accounts"]["here:1"]["x"]["sent"] == 0


def test_who_gives_a_call_up_frees_the_one_below() -> None:
    class Silent:
        address = "here:1"
        future: "Future[Received]" = Future()

        def submit(self, call: Call, timeout: float) -> "Future[Received]":
            return self.future

        def close(self) -> None: ...

        def statistics(self) -> TransportStatistics:
            return TransportStatistics("here:1", 0, 0, 0, {}, 0)

    ledger, silent = Ledger(), Silent()
    outer = Noted(silent, ledger).submit(Call(Header(kind=Kind.BACKWARD, call_id=0, uid="x", key="k")), 1.0)
    assert outer.cancel() and silent.future.cancelled()
    assert ledger.told()["accounts"]["here:1"]["x"]["sent"] == 1
