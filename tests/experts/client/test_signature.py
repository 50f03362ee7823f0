"""Checks of a call before it is sent, and of an answer before it is used."""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.experts.expert_cases import NESTED_SCHEMAS, Nested, fussy_backend, rows, seeded
from torchweft.core.errors import SpecError
from torchweft.experts import ExpertBackend
from torchweft.experts.client.calls import Steps
from torchweft.experts.client.remote import ExpertCall, RemoteFunction
from torchweft.experts.client.stub import ExpertStub, IdempotencyKey, Signature
from torchweft.experts.errors import MalformedError
from torchweft.experts.wire import Call, Header, Kind, Received, decode, encode
from torchweft.experts.wire.service import describe, read_description

CPU = torch.device("cpu")


def signature(backend: ExpertBackend) -> Signature:
    return Signature(read_description(describe(backend.get_info(), None, 1)))


FUSSY = signature(fussy_backend())
NESTED = signature(ExpertBackend("nested", seeded(Nested), **NESTED_SCHEMAS))


def answer(*tensors: Tensor) -> Received:
    (received,) = decode(encode([Call(Header(kind=Kind.RESULT, call_id=1), tensors)]))
    return received


def nested_call(pair: Any, **options: Any) -> list[Tensor]:
    return NESTED.flatten_call((rows(3, 0), pair), {"options": {"scale": rows(3, 2, 1), "mode": "plain", **options}})


def test_a_tuple_is_accepted_for_a_list() -> None:
    both = namedtuple("both", ["_0", "_1"], rename=True)
    pair = (torch.tensor([0, 1, 2]), rows(3, 1, 2))
    expected = nested_call(list(pair))
    assert all(torch.equal(a, b) for a, b in zip(nested_call(pair), expected, strict=True))
    with pytest.raises(SpecError, match=r"\(args, kwargs\)"):  # it has fields instead of list indices
        nested_call(both(*pair))


@pytest.mark.parametrize(
    ("pair", "more", "words"),
    [
        ([rows(3, 0, 1)[:, 0], rows(3, 1, 2)], {}, r"args\[1\]\[0\] has dtype torch.float64, wanted torch.int64"),
        ([torch.tensor([0, 1, 2]), rows(3, 1, 2)], {"extra": 1}, "extra"),
        ([torch.tensor([0, 1]), rows(3, 1, 2)], {}, "one size everywhere"),
    ],
)
def test_faults_name_their_place(pair: Any, more: dict[str, int], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        nested_call(pair, **more)


@pytest.mark.parametrize("wrong", [(), (rows(2, 0), rows(2, 0)), (rows(2, 0, 5),), (rows(2, 0).float(),)])
def test_answer_of_another_signature_is_malformed(wrong: tuple[Tensor, ...]) -> None:
    with pytest.raises(MalformedError, match="fussy"):
        FUSSY.read_outputs(answer(*wrong), CPU)
    with pytest.raises(MalformedError, match="fussy"):
        FUSSY.read_input_gradients(answer(*wrong), [rows(2, 0)])


def test_gradients_have_the_rows_and_dtype_of_their_inputs() -> None:
    with pytest.raises(MalformedError, match="gradients of shapes"):
        FUSSY.read_input_gradients(answer(rows(3, 0)), [rows(2, 0)])
    (gradient,) = FUSSY.read_input_gradients(answer(rows(2, 0)), [rows(2, 0).float()])
    assert gradient.dtype == torch.float32


def test_only_outputs_that_can_have_a_gradient_are_tracked() -> None:
    assert FUSSY.tracked == [True] and NESTED.tracked == [True, True, False]


def test_missing_output_gradient_is_sent_as_zeros() -> None:
    outputs, sent = [rows(3, 1), rows(3, 2), torch.tensor([1, 2, 3])], list[Tensor]()

    class Fake(ExpertStub):
        def __init__(self) -> None: ...

        def forward(self, inputs: Sequence[Tensor], key: IdempotencyKey, deadline: float) -> Steps[list[Tensor]]:
            yield []
            return outputs

        def backward(
            self, inputs: Sequence[Tensor], gradients: Sequence[Tensor], key: IdempotencyKey
        ) -> Steps[list[Tensor]]:
            yield []
            sent.extend(gradients)
            return list(inputs)

    inputs = [torch.empty(0) for _ in NESTED.inputs.names]
    call = ExpertCall(Fake(), NESTED, inputs, torch.empty(0, requires_grad=True), IdempotencyKey(), 0.0)
    function = RemoteFunction([call], [call.anchor])
    assert function.forward() == (outputs, NESTED.tracked)
    assert function.backward([None, rows(3, 0), None], retain=False)[-1] is not None, "the gradient of the anchor"
    assert torch.equal(sent[0], torch.zeros_like(outputs[0])) and torch.equal(sent[1], rows(3, 0))
    assert sent[2].dtype == torch.int64
