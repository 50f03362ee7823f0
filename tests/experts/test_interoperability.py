"""Clients without torchweft: one in Python from gRPC's reflection, one in Node from experts.proto."""

import json
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.processes import ROOT, python, run
from torchweft.experts import ExpertBackend, TensorSpec
from torchweft.experts.server import Server

CLIENT = """
import json, sys
import grpc, numpy
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

with grpc.insecure_channel(sys.argv[1]) as channel:
    database = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(database)
    service = pool.FindServiceByName("torchweft.Experts")
    assert sorted(database.get_services())[-1] == "torchweft.Experts", database.get_services()

    def method(name):
        method = service.methods_by_name[name]
        kind = channel.stream_stream if method.client_streaming else channel.unary_unary
        request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        return kind(f"/torchweft.Experts/{name}", request.SerializeToString, answer.FromString), request

    def frame(Frame, kind, *arrays, **fields):
        frame = Frame(body=b"".join(array.tobytes() + bytes(-array.nbytes % 16) for array in arrays))
        call = frame.header.calls.add(kind=kind, call_id=1, uid="ffn.0", **fields)
        for array in arrays:
            call.tensors.add(dtype=str(array.dtype), shape=array.shape)
        return frame

    def results(answers):
        # A server packs all answers that wait into one frame.
        for answer in answers:
            place = 0
            for call in answer.header.calls:
                kinds = call.DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number
                assert kinds[call.kind].name == "RESULT", call
                size = int(numpy.prod(call.tensors[0].shape))
                yield call, numpy.frombuffer(answer.body, numpy.float32, size, place)
                place += 4 * size + -4 * size % 16

    ask, Frame = method("Info")
    schema = json.loads(ask(frame(Frame, "INFO")).header.calls[0].data)["args"]["tuple"][0]["spec"]
    x = (numpy.arange(2 * schema[0][1], dtype=schema[1]) / 10).reshape(2, -1)
    stream, _ = method("Stream")
    ones = numpy.ones((2, 3), x.dtype)
    answers = stream(iter([frame(Frame, "FORWARD", x, key="k"), frame(Frame, "BACKWARD", x, ones, key="k")]))
    (_, outputs), (call, gradients) = results(answers)
    receipt = GetMessageClass(pool.FindMessageTypeByName("torchweft.StepReceipt")).FromString(call.data)
    assert receipt.incarnation and not any(name == "torchweft" or name.startswith("torchweft.") for name in sys.modules)
    print(json.dumps([outputs.tolist(), gradients.tolist(), call.step]))
"""
X = (torch.arange(8.0) / 10).view(2, 4)


@pytest.fixture
def module() -> nn.Linear:
    return nn.Linear(4, 3)


@pytest.fixture
def server(module: nn.Linear) -> Iterator[Server]:
    rows = (TensorSpec((None, 4), torch.float32),)
    with Server([ExpertBackend("ffn.0", module, torch.optim.Adam, args_schema=rows)]) as server:
        yield server


def compute_locally(module: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the input gradients for output gradients of ones."""
    x = X.clone().requires_grad_()
    outputs = module(x)
    outputs.sum().backward()
    assert x.grad is not None
    module.zero_grad()
    return outputs.detach().flatten(), x.grad.flatten()


def test_client_needs_only_reflection(module: nn.Linear, server: Server) -> None:
    expected = compute_locally(module)
    done = python(CLIENT, server.address)
    assert done.returncode == 0, done.stderr
    outputs, gradients, steps = json.loads(done.stdout)
    torch.testing.assert_close((torch.tensor(outputs), torch.tensor(gradients)), expected)
    assert steps == 1


@pytest.mark.skipif(
    shutil.which("node") is None or not (ROOT / "examples/node/node_modules").exists(),
    reason="wants Node, and `npm install` in examples/node",
)
def test_node_client_calls_and_trains(module: nn.Linear, server: Server) -> None:
    expected = compute_locally(module)
    done = run(["node", "examples/node/client.mjs", server.address, "ffn.0"])
    assert done.returncode == 0, done.stderr
    printed = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    seen = torch.tensor(json.loads(printed["outputs"])), torch.tensor(json.loads(printed["gradients"]))
    torch.testing.assert_close(seen, expected)
    assert (printed["steps"], printed["refused"]) == ("1", "UnknownExpertError")
