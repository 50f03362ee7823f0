"""Receives between GPUs are posted in the order of their headers, some ahead and the others when they are needed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweft.core.timing import LateNumber
from torchweft.pipeline.processes.device_lane import LOOK_AHEAD, ReceiveQueue, Transfer
from torchweft.pipeline.processes.frames import DEVICE_LANE, TensorShape


def shape_of(number: int) -> TensorShape:
    """The shape of the tensor with this number."""
    return TensorShape(torch.float32, (number,), (1,), False, DEVICE_LANE, True)


@given(st.lists(st.sampled_from(["header", "need", "end"]), max_size=40), st.randoms())
def test_receives_keep_the_order_of_headers(events: list[str], random) -> None:
    posted: list[int] = []

    def post(shape: TensorShape) -> Transfer:
        posted.append(shape.dims[0])
        return Transfer(None, torch.empty(0), 1)

    queue, arrivals, ended = ReceiveQueue(post), [], 0
    for event in events:
        if event == "header":
            arrivals.append(queue.add([shape_of(len(arrivals))]))
            assert len(posted) >= min(len(arrivals), ended + LOOK_AHEAD)
        elif event == "need" and arrivals:
            number = random.randrange(len(arrivals))
            before = len(posted)
            (transfer,) = queue.post(arrivals[number])
            assert transfer.rank == 1 and len(posted) == max(before, number + 1)
        elif event == "end" and ended < len(posted):
            ended += 1
            before = len(posted)
            queue.end_one()
            assert len(posted) <= max(before, ended + LOOK_AHEAD)
        assert posted == list(range(len(posted)))


def test_a_late_number_is_that_of_the_call_before() -> None:
    late = LateNumber()
    assert [late.exchange(torch.tensor(x)) for x in (1.0, 2.0, 3.0)] == [None, 1.0, 2.0]
