"""Mailboxes: a local queue for one worker, a shared mailbox for several."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.pipeline.executor import LocalQueue, Mailbox, WalkAborted
from torchweft.pipeline.routing import Address

addresses = st.builds(Address, st.integers(0, 2), st.integers(0, 2), st.integers(-2, 2))


@pytest.mark.parametrize("box", [LocalQueue, Mailbox])
@given(st.data(), st.lists(addresses, unique=True))
def test_value_is_found_by_its_address_in_any_order(box: Any, data: st.DataObject, sent: list[Address]) -> None:
    mailbox = box()
    for turn in range(2):  # a received value is dropped, so its address is free again
        for address in sent:
            mailbox.put(address, f"value {turn} of {address}")
        for address in data.draw(st.permutations(sent)):
            assert mailbox.receive(address) == f"value {turn} of {address}"


def test_a_local_queue_never_waits() -> None:
    with pytest.raises(KeyError):
        LocalQueue().receive(Address(0, 0, 0))


def test_a_mailbox_waits_for_the_sender() -> None:
    box, taken = Mailbox(), []
    worker = threading.Thread(target=lambda: taken.append(box.receive(Address(0, 0, 1))))
    worker.start()
    box.put(Address(0, 0, 0), "another")
    box.put(Address(0, 0, 1), "mine")
    worker.join(10)
    assert taken == ["mine"]


def test_closing_a_mailbox_wakes_its_worker_and_it_stays_closed() -> None:
    box, ends = Mailbox(), []

    def wait() -> None:
        for _ in range(2):
            try:
                box.receive(Address(0, 0, 0))
            except WalkAborted:
                ends.append("closed")

    worker = threading.Thread(target=wait, daemon=True)
    worker.start()
    box.close()
    worker.join(10)
    assert ends == ["closed", "closed"]


def test_value_from_before_the_end_can_still_be_received() -> None:
    box = Mailbox()
    box.put(Address(0, 0, 0), "early")
    box.close()
    assert box.receive(Address(0, 0, 0)) == "early"
    with pytest.raises(WalkAborted):
        box.receive(Address(0, 0, 1))
