"""Layers in a compiled model: those made of networks join its graph, drop-ins for torch's layers stay outside.

Each program runs in a separate process, because the type checks of the tests would be compiled too.
"""

import pytest

from tests.processes import python

NETWORKS = """
import torch
from torch import nn
from torchweft.recurrent import Recurrent
from torchweft.recurrent.layers import Bidirectional, Stack

def network():
    return Recurrent(nn.GRUCell(4, 4), backend="python").double()

x = torch.randn(5, 3, 4, dtype=torch.float64)
for net, call in (
    (Bidirectional(network()), {}),
    (Bidirectional(network()), {"lengths": torch.tensor([5, 0, 3])}),
    (Stack([network(), network()], residual=True), {}),
):
    result = torch.compile(net, fullgraph=True, backend="aot_eager")(x, **call)
    assert torch.equal(result.outputs, net(x, **call).outputs)
    result.outputs.sum().backward()
"""

LAYERS = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torchweft.recurrent.layers import LSTM

graphs = []

def kept(graph, _):
    graphs.append(graph)
    return graph

layer, x = LSTM(4, 4, 2, bidirectional=True, backend="python"), torch.randn(5, 3, 4)
for value in (x, pack_padded_sequence(x, torch.tensor([5, 2, 4]), enforce_sorted=False)):
    _, last = torch.compile(nn.Sequential(layer), backend=kept)(value)
    assert torch.equal(last[0], layer(value)[1][0])
assert graphs == [], [graph.code for graph in graphs]

torch._dynamo.config.allow_rnn = True
compiled = torch.compile(layer, backend=kept, fullgraph=True)
assert torch.equal(compiled(x)[0], layer(x)[0]) and len(graphs) == 1
"""


@pytest.mark.long
@pytest.mark.timeout(300)  # PyTorch's compiler takes long on a busy machine
@pytest.mark.parametrize("program", [NETWORKS, LAYERS], ids=["networks in one graph", "drop-ins only on request"])
def test_compiled_layers(program: str) -> None:
    done = python(program)
    assert done.returncode == 0, done.stderr
