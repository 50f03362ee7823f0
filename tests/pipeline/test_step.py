"""`StepState` without a Pipe, on chains and on recurrent wirings that carry states from chunk to chunk."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchweft.core.context import ExecutionContext
from torchweft.core.errors import BackwardTwiceError
from torchweft.core.segment import Keep, MicroBatchContext, Segment, detach_leaves
from torchweft.pipeline.executor import SerialExecutor, ThreadExecutor
from torchweft.pipeline.routing import OUTSIDE, Address, Message, Route, Wiring
from torchweft.pipeline.schedule import gpipe
from torchweft.pipeline.step import StepState

WIDTH = 3
Given = dict[int, dict[Address, Message]]


def recurrent_wiring(layers: int, delay: int) -> Wiring:
    """Stacked layers, each with a state that is read `delay` chunks later. With delay 1:

    out ^        ^        ^
    [layer 1] -> [layer 1] -> [layer 1] -> last state
        ^            ^            ^
    [layer 0] -> [layer 0] -> [layer 0] -> last state
        ^ x0         ^ x1         ^ x2
    """
    routes = [Route("x", OUTSIDE, (0,))]
    routes += [Route(f"up {j}", j, (j + 1 if j + 1 < layers else OUTSIDE,)) for j in range(layers)]
    routes += [Route(f"state {j}", j, (j,), delay=delay) for j in range(layers)]
    return Wiring(tuple(routes), layers)


def cell(weights: tuple[Tensor, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, h: (x @ weights[0] + h @ weights[1]).tanh()


def over_chunk(step: Callable[[Tensor, Tensor], Tensor], xs: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a cell to the steps of one chunk. Return all outputs and the last state."""
    outputs: list[Tensor] = []
    for x in xs:
        h = step(x, h)
        outputs.append(h)
    return torch.stack(outputs), h


def drawn_weights(layers: int) -> list[tuple[Tensor, Tensor]]:
    """Two random matrices per layer."""
    matrices = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2 * layers)]
    return list(zip(matrices[::2], matrices[1::2], strict=True))


def recurrent_run(weights: list[tuple[Tensor, Tensor]], delay: int, chunks: int, keeps: Any) -> StepState:
    """A run with one segment per layer. A chunk of time is a micro-batch."""

    def function(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Any, ...]]:
        return lambda context, xs, h: over_chunk(step, xs, h)

    segments = {layer: Segment(function(cell(pair)), list(pair)) for layer, pair in enumerate(weights)}
    ambient = ExecutionContext.capture(["cpu"])
    contexts = [MicroBatchContext(i, ambient) for i in range(chunks)]
    return StepState(recurrent_wiring(len(weights), delay), segments, contexts, keeps, [None] * len(weights))


@pytest.mark.parametrize("threads", [False, True])
@given(
    layers=st.integers(1, 3),
    chunks=st.integers(1, 5),
    delay=st.integers(1, 3),
    steps=st.integers(1, 2),
    recomputed=st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 4))),
    seed=st.integers(0, 100),
)
def test_wavefront_has_the_gradients_of_the_unrolled_net(
    threads: bool, layers: int, chunks: int, delay: int, steps: int, recomputed: frozenset[tuple[int, int]], seed: int
) -> None:
    torch.manual_seed(seed)
    weights = drawn_weights(layers)
    xs = [torch.randn(steps, 2, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(chunks)]
    # Each of the first `delay` chunks has a separate start state.
    starts = [
        [torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(min(delay, chunks))]
        for _ in range(layers)
    ]

    # The unrolled net.
    outputs, states = list(xs), [list(start) for start in starts]
    for layer, pair in enumerate(weights):
        for i in range(chunks):
            outputs[i], last = over_chunk(cell(pair), outputs[i], states[layer][i])
            states[layer].append(last)
    ends = [state[chunks:] for state in states]
    leaves = [*xs, *(h for start in starts for h in start), *(w for pair in weights for w in pair)]
    roots = [*outputs, *(h for end in ends for h in end)]
    seeds = [torch.randn_like(root) for root in roots]
    expected = torch.autograd.grad(roots, leaves, seeds)

    # The same net as a pipeline run.
    keeps = [["inputs" if (s, i) in recomputed else "graph" for i in range(chunks)] for s in range(layers)]

    run, executor = recurrent_run(weights, delay, chunks, keeps), (ThreadExecutor() if threads else SerialExecutor())
    up, state = range(1, layers + 1), range(layers + 1, 2 * layers + 1)
    given: Given = {layer: {} for layer in range(layers)}
    for i, x in enumerate(xs):
        given[0][Address(0, 0, i)] = Message(detach_leaves(x))
    for layer in range(layers):
        for i, h in enumerate(starts[layer]):
            given[layer][Address(state[layer], layer, i - delay)] = Message(detach_leaves(h))
    schedule, ambient = gpipe(layers, chunks), ExecutionContext.capture(["cpu"])
    left = executor.walk(schedule.forward_only, run.perform, given, ambient)
    out_at = [Address(up[-1], OUTSIDE, i) for i in range(chunks)]
    ends_at = [
        Address(state[layer], OUTSIDE, i) for layer in range(layers) for i in range(max(0, chunks - delay), chunks)
    ]
    assert left.keys() == {*out_at, *ends_at}
    for at, root in zip([*out_at, *ends_at], roots, strict=True):
        assert torch.equal(left[at].value, root)
        assert left[at].value.is_leaf

    back: Given = {layer: {} for layer in range(layers)}
    for at, gradient in zip([*out_at, *ends_at], seeds, strict=True):
        back[run.messages.wiring.routes[at.route].source][at] = Message([gradient])
    home = executor.walk(schedule.backward_only, run.perform, back, ambient)
    gradients = [home[Address(0, 0, i)].value[0] for i in range(chunks)]
    for layer in range(layers):
        addresses = [Address(state[layer], layer, i - delay) for i in range(len(starts[layer]))]
        gradients += [home[at].value[0] for at in addresses]
    sums = run.parameter_gradients()
    gradients += [sums[id(w)] for pair in weights for w in pair]
    torch.testing.assert_close(gradients, list(expected), rtol=1e-10, atol=1e-10)
    assert len(home) == chunks + sum(map(len, starts))
    assert not run.parameter_gradients(), "the sums must be cleared when they are returned"


def chain_run(functions: list[Any], routes: list[Route], micro_batches: int, keep: Keep, **more: Any) -> StepState:
    """A run of stage functions over custom routes."""
    ambient = ExecutionContext.capture(["cpu"])
    return StepState(
        Wiring(tuple(routes), len(functions)),
        {stage: Segment(function, more.get("parameters", ())) for stage, function in enumerate(functions)},
        [MicroBatchContext(i, ambient) for i in range(micro_batches)],
        [[keep] * micro_batches] * len(functions),
        [None] * len(functions),
    )


@pytest.mark.parametrize("keep", ["graph", "inputs"])
@pytest.mark.parametrize("executor", [SerialExecutor(), ThreadExecutor()], ids=["serial", "threads"])
def test_gradients_of_readers_add_up_and_idle_ones_add_nothing(executor: Any, keep: Keep) -> None:
    # Stage 0 makes two values. The skip has three readers: stage 1 ignores it, stages 2 and 3 use it.
    run = chain_run(
        [
            lambda context, x: (x * 2, x * 3),
            lambda context, y, skip: (y + 1,),
            lambda context, y, skip: (y * skip,),
            lambda context, y, skip: (y + 5 * skip,),
        ],
        [Route("x", OUTSIDE, (0,))]
        + [Route(f"main {j}", j, (j + 1 if j < 3 else OUTSIDE,)) for j in range(4)]
        + [Route("skip", 0, (1, 2, 3))],
        1,
        keep,
    )
    x = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    schedule, ambient = gpipe(4, 1), ExecutionContext.capture(["cpu"])
    forward = executor.walk(
        schedule.forward_only, run.perform, {0: {Address(0, 0, 0): Message(detach_leaves(x))}}, ambient
    )
    out = Address(4, OUTSIDE, 0)
    y = (2 * x + 1) * (3 * x) + 15 * x
    torch.testing.assert_close(forward[out].value, y, rtol=0, atol=0)
    home = executor.walk(schedule.backward_only, run.perform, {3: {out: Message([torch.ones_like(x)])}}, ambient)
    torch.testing.assert_close(home[Address(0, 0, 0)].value[0], 12 * x.detach() + 18)
    if isinstance(executor, ThreadExecutor):
        executor.close()


def test_a_retained_run_repeats_backward_and_a_freed_one_raises() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    run = chain_run(
        [lambda context, x: (x * weight,)],
        [Route("x", OUTSIDE, (0,)), Route("y", 0, (OUTSIDE,))],
        1,
        "graph",
        parameters=(weight,),
    )
    x = torch.tensor(2.0, requires_grad=True)
    schedule, ambient, executor = gpipe(1, 1), ExecutionContext.capture(["cpu"]), SerialExecutor()
    given = {0: {Address(0, 0, 0): Message(detach_leaves(x))}}
    executor.walk(schedule.forward_only, run.perform, given, ambient)
    back = {0: {Address(1, OUTSIDE, 0): Message([torch.tensor(10.0)])}}
    for retain in (True, True, False):
        run.prepare_backward(retain=retain)
        home = executor.walk(schedule.backward_only, run.perform, back, ambient)
        assert home[Address(0, 0, 0)].value[0] == 30
        assert run.parameter_gradients() == {id(weight): torch.tensor(20.0)}
    with pytest.raises(BackwardTwiceError, match="retain_graph=True"):
        executor.walk(schedule.backward_only, run.perform, back, ambient)


def test_failed_backward_leaves_no_partial_sums() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    routes = [Route("x", OUTSIDE, (0,)), Route("y", 0, (OUTSIDE,))]
    run = chain_run([lambda context, x: (x * weight,)], routes, 2, "graph", parameters=(weight,))
    schedule, ambient, executor = gpipe(1, 2), ExecutionContext.capture(["cpu"]), SerialExecutor()
    given = {0: {Address(0, 0, i): Message(torch.full((2,), 2.0)) for i in range(2)}}
    executor.walk(schedule.forward_only, run.perform, given, ambient)
    ones: dict[Address, Message] = {Address(1, OUTSIDE, i): Message([torch.ones(2)]) for i in range(2)}
    last = schedule.backward_only.workers[0][-1].micro_batch
    run.prepare_backward(retain=True)
    with pytest.raises(RuntimeError):  # after the first micro-batch, in the second
        executor.walk(
            schedule.backward_only,
            run.perform,
            {0: {**ones, Address(1, OUTSIDE, last): Message([torch.ones(5)])}},
            ambient,
        )
    run.prepare_backward(retain=False)
    executor.walk(schedule.backward_only, run.perform, {0: ones}, ambient)
    assert run.parameter_gradients() == {id(weight): torch.tensor(8.0)}


@pytest.mark.parametrize("kind", ["F", "B"])
def test_an_exception_has_a_note_with_its_place(kind: str) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if kind == "F" and x.item() == 1:
                raise KeyError("mine")
            ctx.bad = x.item() == 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if ctx.bad:
                raise KeyError("mine")
            return gradient * 2

    run = chain_run(
        [lambda context, x: (x + 0,), lambda context, x: (Failing.apply(x),)],
        [Route("x", OUTSIDE, (0,)), Route("m", 0, (1,)), Route("y", 1, (OUTSIDE,))],
        2,
        "graph",
    )
    given: Given = {
        0: {Address(0, 0, i): Message(torch.tensor(float(i), requires_grad=True)) for i in range(2)},
        1: {Address(2, OUTSIDE, i): Message([torch.tensor(1.0)]) for i in range(2)},
    }
    with pytest.raises(KeyError, match="mine") as caught:
        SerialExecutor().walk(gpipe(2, 2), run.perform, given, ExecutionContext.capture(["cpu"]))
    word = "forward" if kind == "F" else "backward"
    assert caught.value.__notes__ == [f"torchweft: in {word} of stage 1, micro-batch 1 (1{kind}1)"]
