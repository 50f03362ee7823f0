"""A model with a recurrent network compiles as one graph, exports, and keeps its results."""

import copy
import gc
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, equal
from torchweft.core import pytree as tree
from torchweft.core.errors import BackwardTwiceError, UsageError
from torchweft.core.pytree import flatten
from torchweft.recurrent import GRU, LSTM, Caffe2LSTM, Recurrent, custom_op

pytestmark = pytest.mark.timeout(300)  # PyTorch's compilers take long on a busy machine
T, N, D, H = 5, 3, 3, 4


class Nested(nn.Module):
    """Nested values, an integer state, a buffer, an output that is a state, and optional dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(D, H)
        self.dropout = dropout
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: dict[str, Tensor], state: Any) -> Any:
        h, more = state
        h, c = self.cell(x["x"] * self.scale, (h, more["c"]))
        h = nn.functional.dropout(h, self.dropout)
        return {"y": (h, h.cos())}, (h, {"c": c, "n": more["n"] + 1})

    def initial_state(self, x: dict[str, Tensor]) -> Any:
        zeros = x["x"].new_zeros(x["x"].shape[0], H)
        return zeros, {"c": zeros.clone(), "n": torch.zeros(zeros.shape[0], dtype=torch.int64)}


class Model(nn.Module):
    """A network between two layers."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(H, 2)
        self.net = Recurrent(Nested(dropout), **{"backend": "python", **options})
        self.double()

    def forward(self, x: Tensor, **call: Any) -> Any:
        result = self.net({"x": self.before(x)}, **call)
        return self.after(result.outputs["y"][0]), result.outputs["y"][1], result.last, result.states


def results(model: Any, x: Tensor, **call: Any) -> list[Tensor]:
    """All results, and all gradients."""
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    leaves = [leaf for leaf in flatten(model(x, **call))[0] if leaf is not None]
    loss = sum(leaf.sin().sum() for leaf in leaves if leaf.is_floating_point())
    return [*(leaf.detach() for leaf in leaves), *torch.autograd.grad(loss, [x, *model.parameters()])]


def alike(model: Model, compiled: Any, x: Tensor, **call: Any) -> None:
    close(results(compiled, x, **call), results(model, x, **call))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the type checks around traced functions, because Dynamo cannot trace them. The operator keeps its own."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr(Recurrent, "forward", inspect.unwrap(Recurrent.forward))
    functions = [name for name, value in vars(tree).items() if inspect.isfunction(value)]
    for module, names in (
        (custom_op, ("traced_call", "_encode_none", "_decode_none", "_map_containers", "map_leaves")),
        (tree, functions),
    ):
        for name in names:
            monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))


CHECKED = hasattr(Recurrent.forward, "__wrapped__")
symbolic = pytest.mark.skipif(CHECKED, reason="a symbolic size is no int, so the checks of types must be off")


@pytest.mark.long
@pytest.mark.skipif(not CHECKED, reason="they run here")
def test_symbolic_sizes_without_runtime_type_checks() -> None:
    names = ("another_length_no_new_graph", "export_runs_without", "jit_trace", "layer_itself_is_exported")
    marked = " or ".join(names)
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-k", marked, __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout[-3000:]


def sequence(*shape: int) -> Tensor:
    return torch.randn(*(shape or (T, N, D)), dtype=torch.float64)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lengths, dropout": ({"dropout": 0.5}, {"lengths": torch.tensor([2, 5, 0])}),
    "mask, reset, truncated": ({"truncate": 2}, {"mask": torch.rand(T, N) > 0.4, "reset": torch.rand(T, N) > 0.6}),
    "batch first, list of lengths": ({"batch_first": True, "memory": "sqrt"}, {"lengths": [2, 5, 1]}),
    "eager loop": ({"backend": "eager"}, {"lengths": torch.tensor([2, 5, 0]), "start": 3}),
    "inductor": ({}, {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_gives_equal_results_and_gradients(name: str) -> None:
    options, call = CALLS[name]
    model = Model(**options)
    x = sequence(N, T, D) if "batch_first" in options else sequence()
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if name == "inductor" else "aot_eager")
    for _ in range(2):
        alike(model, compiled, x, **call)
    assert {used for _, used, _ in model.net.why()} == {options.get("backend", "python")}


@symbolic
def test_another_length_no_new_graph() -> None:
    net = Recurrent(nn.GRUCell(D, H).double(), backend="python")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    for steps in (5, 7, 9):
        with torch._dynamo.config.patch(error_on_recompile=steps > 5):
            x, state = sequence(steps, N, D), sequence(N, H).requires_grad_()
            gradients = [
                torch.autograd.grad(run(x, state).outputs.sin().sum(), [state, *net.parameters()])
                for run in (net, compiled)
            ]
        close(*gradients)


class Passing(nn.Module):
    """Returns its input as output, and passes a state through."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        return (x, x), (state[0], state[1] + x)


@pytest.mark.parametrize("loop", ["eager", "python"])
def test_results_do_not_share_memory(loop: Any) -> None:
    net = Recurrent(Passing(), backend=loop)
    x, state = sequence(), (sequence(N, D), sequence(N, D))
    result = torch.compile(net, fullgraph=True, backend="aot_eager")(x, state)
    assert equal(flatten(result)[0], flatten(net(x, state))[0])
    distinct = [result.outputs[0], *result.last, *result.states, x, *state]
    assert len({tensor.untyped_storage().data_ptr() for tensor in distinct}) == len(distinct)


class Pair(NamedTuple):
    one: Any
    two: Any


class Named(nn.Module):
    """Named tuples as state and output, nested in each other and in a dict."""

    def initial_state(self, x: Tensor) -> Any:
        return Pair(torch.zeros_like(x), {"in": Pair(torch.zeros_like(x), torch.zeros_like(x))})

    def forward(self, x: Tensor, state: Any) -> Any:
        inner = state.two["in"]
        return Pair(x, None), Pair(state.one + x, {"in": Pair(inner.one + state.one, inner.two * x)})


@pytest.mark.parametrize("given", [False, True])
def test_named_tuples_in_one_graph(given: bool) -> None:
    net, x = Recurrent(Named(), backend="python"), sequence()
    state = (net.cell.initial_state(x[0] + 1),) if given else ()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert equal(tuple(compiled(x, *state)), tuple(net(x, *state)))


@pytest.mark.long
def test_compiled_graph_sees_new_weights_not_those_of_copies() -> None:
    net = Recurrent(nn.GRUCell(D, H).double(), backend="python")
    other, x = copy.deepcopy(net), sequence()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    compiled(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    assert torch.equal(compiled(x).outputs, net(x).outputs) and len(net.why()) == 1
    again = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert torch.equal(again(x).outputs, other(x).outputs)
    assert not torch.equal(again(x).outputs, compiled(x).outputs)


@pytest.mark.long
def test_token_lives_until_backward_only() -> None:
    net = Recurrent(nn.GRUCell(D, H).double(), backend="python")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        held = compiled(sequence()).outputs
    assert not custom_op.live_sequences
    held = compiled(sequence()).outputs.sum()
    assert len(custom_op.live_sequences) == 1
    held.backward()
    del held
    gc.collect()
    assert not custom_op.live_sequences


def test_copied_token_is_rejected() -> None:
    net = Recurrent(nn.GRUCell(D, H).double(), backend="python")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = compiled(sequence()).outputs.sum()
    with pytest.raises(BackwardTwiceError, match="copied"):
        loss.backward()


@symbolic
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_records_the_eager_loop() -> None:
    net = Recurrent(nn.GRUCell(D, H).double(), backend="python")
    traced = torch.jit.trace(net, sequence().detach(), check_trace=False)
    x = sequence().detach()
    assert torch.allclose(traced(x)[0], net(x).outputs, atol=1e-12)
    assert [used for _, used, _ in net.why()] == ["eager", "python"]


@symbolic
@pytest.mark.filterwarnings("ignore:The tensor attribute")  # by torch's own layer
def test_export_runs_without_the_network(tmp_path: Path) -> None:
    """The loop is unrolled, so that programs load where torchweft is not even imported. N can be free, T cannot."""
    model, x = Model(), sequence()
    calls: list[dict[str, Any]] = [{}, {"lengths": torch.tensor([2, 5, 0])}]
    for number, call in enumerate(calls):
        dims = None if call else {"x": {1: torch.export.Dim("N", min=2)}}
        exported = torch.export.export(model, (sequence(),), call, dynamic_shapes=dims)
        torch.export.save(exported, tmp_path / f"{number}.pt2")
    torch.save((x, calls), tmp_path / "x.pt")
    code = """
import sys, torch
x, calls = torch.load("x.pt")
outs = [torch.export.load(f"{number}.pt2").module()(x, **call) for number, call in enumerate(calls)]
assert "torchweft" not in sys.modules
torch.save([torch.utils._pytree.tree_leaves(out) for out in outs], "y.pt")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, cwd=tmp_path)
    for out, call in zip(torch.load(tmp_path / "y.pt"), calls, strict=True):
        close(out, flatten(model(x, **call))[0])
    x = sequence(T, 2, D)
    close(flatten(torch.export.load(tmp_path / "0.pt2").module()(x))[0], flatten(model(x))[0])


@symbolic
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # PyTorch 2.11's own
@pytest.mark.parametrize(
    "make", [partial(LSTM, num_layers=2, bidirectional=True), partial(GRU, batch_first=True), Caffe2LSTM]
)
def test_layer_itself_is_exported(make: Any) -> None:
    layer = copy.deepcopy(make(D, H, dtype=torch.float64, backend="python", verify="never"))
    exported = torch.export.export(layer, (sequence(),)).module()
    x = sequence()
    close(flatten(exported(x))[0], flatten(layer(x))[0])
    assert dict(exported.named_parameters()).keys() == dict(layer.named_parameters()).keys()
    results = [torch.autograd.grad(net(x)[0].sum(), [*net.parameters()]) for net in (layer, exported)]
    close(*results)


def test_graph_of_a_deleted_network_raises() -> None:
    with pytest.raises(UsageError, match="keep the module"):
        custom_op.recurrent(10**9, [sequence()], [], [False], 0)


def test_function_that_closes_over_parameters_is_rejected() -> None:
    weight = torch.randn(D, D, dtype=torch.float64, requires_grad=True)

    def cell(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight, state + x

    net = Recurrent(cell, backend="python")
    with pytest.raises(UsageError, match="make the cell a module"):
        custom_op.traced_call(net, net._handle, sequence(), sequence(N, D), {}, 0)
