"""Only the owner of a replicated expert steps, and a mixture finds it, even within a mini-batch."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import WIDTH, adam, close, rows
from tests.experts.mixture.commit_cases import UIDS, Experts
from tests.experts.mixture.mixture_cases import WIDTH as GRID_WIDTH
from tests.experts.mixture.mixture_cases import numbers
from tests.experts.server.replica_cases import PATIENCE, HungTransport, backend_of, die, expert, hang, make, role
from torchweft.experts.client import NEVER, Connections, RemoteExpert, Retry
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import CommitError, NotOwnerError, TooFewAnswersError
from torchweft.experts.mixture import RemoteMixtureOfExperts
from torchweft.experts.server import Server
from torchweft.experts.wire import Kind
from torchweft.experts.wire.service import StepReceipt, read_receipt

UID = "fussy.0"


def mixture_of(connections: Connections, **options: Any) -> RemoteMixtureOfExperts:
    plain: dict[str, Any] = {"in_features": WIDTH, "grid_size": [1], "uid_prefix": "fussy", "k_best": 1}
    plain |= {"connections": connections, "dtype": torch.float64}
    plain |= {"forward_timeout": PATIENCE, "backward_timeout": PATIENCE}
    return RemoteMixtureOfExperts(**{**plain, **options})


def step(mixture: RemoteMixtureOfExperts, seed: int) -> None:
    mixture(rows(2, seed)).square().sum().backward()


@pytest.mark.parametrize("kind", [Kind.BACKWARD, Kind.COMMIT])
def test_stepping_calls_have_the_directory_s_token(experts: Experts, kind: Kind) -> None:
    mixture = experts.mixture(retry=NEVER)
    y = mixture(numbers(16, GRID_WIDTH))
    if kind is Kind.COMMIT:
        y.sum().backward()
    tokens = {uid: experts.directory.claim(uid, experts.leases[uid]).token for uid in UIDS}
    with pytest.raises((TooFewAnswersError, CommitError), match="fencing token 0"):  # no token: not the owner
        mixture.commit() if kind is Kind.COMMIT else y.sum().backward()
    seen = {header.uid: read_receipt(header.data).token for header in experts.headers if header.kind is kind}
    assert seen == tokens and min(tokens.values()) > 0


def test_answer_with_a_stale_token_is_rejected(directory: LocalDirectory) -> None:
    lease = directory.declare(UID, "elsewhere:1", 60.0)
    with Server([expert(UID)]) as stale, Connections(directory) as connections:
        mixture = mixture_of(connections, retry=NEVER, accumulate=True)
        connections._transports["elsewhere:1"] = connections.transport_to(stale.address)
        y = mixture(rows(2, 0))
        directory.claim(UID, lease)
        with pytest.raises(TooFewAnswersError, match="fencing token 0"):
            y.sum().backward()
        with pytest.raises(CommitError, match="fencing token 0"):
            mixture.commit()
        with pytest.raises(TooFewAnswersError, match="fencing token 0"):
            mixture(rows(2, 0))
        with pytest.raises(NotOwnerError, match="fencing token 0"):
            RemoteExpert(UID, connections, retry=NEVER)(rows(2, 0))


def test_stepping_calls_reach_the_new_owner(directory: LocalDirectory) -> None:
    with (
        make(directory, expert(UID)) as old,
        make(directory, expert(UID)) as new,
        Connections(directory) as connections,
    ):
        mixture = mixture_of(connections, accumulate=True)
        step(mixture, 0)
        assert mixture.commit() == {UID: True} and backend_of(old, UID).steps == 1
        wait_until(lambda: backend_of(new, UID).steps == 1)
        y = mixture(rows(2, 1))
        die(old)
        y.sum().backward()  # `new` answers as a follower until the lease of `old` has ended
        assert role(new, UID) == "owner"
        assert mixture.commit() == {UID: True} and backend_of(new, UID).steps == 2 == mixture.steps[UID]


@pytest.mark.parametrize("kind", ["expert", "mixture"])
def test_waiting_calls_leave_an_owner_that_hangs(directory: LocalDirectory, kind: str) -> None:
    """The next owner answers the waiting backward, which is one step."""
    with (
        make(directory, expert(UID)) as old,
        make(directory, expert(UID)) as new,
        Connections(directory, open_transport=HungTransport) as connections,
    ):
        remote = RemoteExpert(UID, connections) if kind == "expert" else mixture_of(connections)
        remote(rows(2, 0)).square().sum().backward()
        wait_until(lambda: backend_of(new, UID).steps == 1)
        y = remote(rows(2, 1))
        hang(old, connections)
        y.square().sum().backward()
        assert role(new, UID) == "owner" and backend_of(new, UID).steps == 2
        remote(rows(2, 2)).square().sum().backward()
        module = expert(UID).module
        optimizer = adam(module.parameters())
        for seed in range(3):
            optimizer.zero_grad()
            module(rows(2, seed)).square().sum().backward()
            optimizer.step()
        for name, weight in module.state_dict().items():
            assert close(backend_of(new, UID).module.state_dict()[name], weight)


def test_owner_change_makes_the_mini_batch_incomplete(directory: LocalDirectory) -> None:
    first = make(directory, expert(UID))
    first.start()
    with make(directory, expert(UID)) as second, Connections(directory) as connections:
        mixture = mixture_of(connections, accumulate=True)
        step(mixture, 0)
        first.shutdown()
        step(mixture, 1)
        with pytest.raises(CommitError, match="restarted"):
            mixture.commit()
        mixture.discard()
        step(mixture, 0)
        assert mixture.commit() == {UID: True} and backend_of(second, UID).steps == 1


def test_answer_of_a_follower_is_not_an_attempt(experts: Experts) -> None:
    mixture = experts.mixture(retry=Retry(attempts=2, first=0.001))
    for kind in (Kind.BACKWARD, Kind.COMMIT):
        experts.lose(kind, "ffn.1", *(NotOwnerError("follows", {"address": "ffn.1"}) for _ in range(5)))
    mixture(numbers(16, GRID_WIDTH)).sum().backward()
    assert mixture.commit() == dict.fromkeys(UIDS, True)


def test_durable_steps_are_reported_per_expert(experts: Experts) -> None:
    mixture = experts.mixture()
    assert mixture.steps == mixture.durable_steps == {}
    mixture(numbers(16, GRID_WIDTH)).sum().backward()
    assert mixture.steps == dict.fromkeys(UIDS, 0) and mixture.durable_steps == dict.fromkeys(UIDS)
    receipt = partial(StepReceipt, incarnation=9)
    mixture._client.stub("ffn.1").progress.update(7, receipt(5))
    assert mixture.durable_steps["ffn.1"] == 5 and mixture.steps["ffn.1"] == 7
