"""Step nets over named values: links, windows, references."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.recurrent.recurrent_cases import close, eagerly, equal, fault_lines, gradients
from torchweft.core.errors import SpecError, UsageError
from torchweft.recurrent import Window, recurrent_net
from torchweft.recurrent import recurrent as network

Named = dict[str, Any]


def drive(inputs: Named, states: Named) -> Named:
    """Two sequences, states of two dtypes, a state that is not an output and an output that is not a state."""
    hidden = torch.tanh(inputs["x"] + 0.5 * states["h"] + inputs["u"][:, None])
    return {"hidden": hidden, "count": states["n"] + 1, "score": hidden.sum(-1)}


def start(rows: int) -> Named:
    return {"h": torch.randn(rows, 3).double().requires_grad_(), "n": torch.zeros(rows, dtype=torch.int64)}


@given(st.integers(0, 4), st.integers(1, 3))
def test_links_feed_outputs_back_by_name(steps: int, rows: int) -> None:
    torch.manual_seed(steps)
    x, u = torch.randn(steps, rows, 3).double().requires_grad_(), torch.randn(steps, rows).double()
    states = start(rows)
    seen = recurrent_net(drive, {"x": x, "u": u}, states, {"h": "hidden", "n": "count"})
    h, hs = states["h"], []
    for t in range(steps):
        h = torch.tanh(x[t] + 0.5 * h + u[t][:, None])
        hs.append(h)
    expected = torch.stack(hs) if hs else torch.zeros(0, rows, 3).double() + 0 * h
    close(seen.outputs["hidden"], expected)
    close(seen.outputs["score"], expected.sum(-1))
    close((seen.all["h"], seen.last["h"]), (expected, h))
    assert seen.last["n"].tolist() == [steps] * rows
    assert list(seen.outputs) == ["hidden", "count", "score"]
    close(gradients(seen.outputs, [x, states["h"]]), gradients((expected, 0, expected.sum(-1)), [x, states["h"]]))


def remember(inputs: Named, states: Named) -> Named:
    past = states["past"]  # k x N
    return {"y": inputs["x"] + past[0] - 2 * past[-1], "seen": past.clone()}


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_a_window_holds_the_last_values_oldest_first(steps: int, rows: int, k: int, broadcast: bool) -> None:
    torch.manual_seed(steps)
    x = torch.randn(steps, rows, 1).double()
    first = torch.randn(k, 1 if broadcast else rows, 1).double().requires_grad_()
    seen = recurrent_net(remember, {"x": x}, {"past": first}, {"past": Window("y", k)})
    values = list(first.expand(k, rows, 1))
    for t in range(steps):
        close(seen.outputs["seen"][t], torch.stack(values[-k:]))
        values.append(x[t] + values[-k] - 2 * values[-1])
        close(seen.all["past"][t], torch.stack(values[-k:]))
    close(seen.last["past"], torch.stack(values[-k:]))
    if steps:
        close(gradients(seen.outputs["y"], [first]), gradients(torch.stack(values[k:]), [first]))


def test_windows_continue_across_chunks_and_steps() -> None:
    net = eagerly(remember, links={"past": Window("y", 3)}, initial={"past": torch.zeros(3, 1, 1)})
    x = torch.randn(6, 2, 1)
    whole = net({"x": x})
    first = net({"x": x[:2]})
    second = net({"x": x[2:]}, first.last)
    assert equal(second.last, whole.last)
    assert equal(second.states["past"], whole.states["past"][2:])
    state = first.last
    for t in range(2, 6):
        y, state = net.step({"x": x[t]}, state)
        assert equal(y["y"], whole.outputs["y"][t])
    assert equal(state, whole.last)


def test_hole_in_the_mask_keeps_the_window() -> None:
    x = torch.arange(1.0, 5)[:, None].expand(4, 2)
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
    seen = recurrent_net(
        lambda i, s: {"y": i["x"] + 0 * s["past"][0]},
        {"x": x},
        {"past": torch.zeros(2, 2)},
        {"past": Window("y", 2)},
        mask=mask,
    )
    assert seen.last["past"].tolist() == [[3, 1], [4, 4]]


def test_batch_first_windows_follow_the_time_axis() -> None:
    net = eagerly(remember, links={"past": Window("y", 3)}, batch_first=True)
    x, past = torch.randn(2, 5, 1), torch.randn(3, 2, 1)
    turned = eagerly(remember, links={"past": Window("y", 3)})({"x": x.transpose(0, 1)}, {"past": past})
    seen = net({"x": x}, {"past": past})
    assert seen.states["past"].shape == (2, 5, 3, 1)
    assert equal(seen.last, turned.last)
    assert torch.equal(seen.states["past"][1, :, 2], turned.states["past"][:, 2, 1])


def test_gradients_of_references_are_summed_over_time() -> None:
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def step(inputs: Named, states: Named, references: Named, t: int) -> Named:
        return {"h": torch.tanh(inputs["x"] @ references["w"] + states["h"]) * (t + 1)}

    x, h = torch.randn(4, 2, 3).double(), torch.zeros(2, 3).double()
    seen = recurrent_net(
        step, {"x": x}, {"h": h}, {"h": "h"}, references={"w": weight}, time_step=True, start=2, truncate=3
    )
    hs = []
    for t in range(4):
        h = torch.tanh(x[t] @ weight + (h.detach() if t == 1 else h)) * (t + 3)
        hs.append(h)
    close(gradients(seen.outputs, [weight]), gradients(torch.stack(hs), [weight]))


def test_faults_of_arguments_and_links_are_listed_together() -> None:
    links = {"past": Window("y", 0), "h": Window("y", -1)}
    windows = [f"links[{name!r}] is a window over {link.k} steps, wanted at least 1" for name, link in links.items()]
    with pytest.raises(UsageError) as caught:
        recurrent_net(remember, {"x": torch.ones(3, 2, 1)}, {}, links, truncate=0)
    assert fault_lines(caught) == [*windows, "truncate is 0, wanted at least 1 step, or None"]
    with pytest.raises(UsageError) as caught:
        eagerly(remember, links=links)
    assert fault_lines(caught) == windows
    with pytest.raises(UsageError) as caught:
        network.check_arguments(3, {"h": 2}, None, False, None, "full", "auto", "first")
    assert fault_lines(caught) == [
        "cell is 3, wanted a module or a function of one time step",
        "links['h'] is of type int, wanted the name of an output, or a Window over it",
    ]
    with pytest.raises(SpecError) as mixed:
        inspect.unwrap(network.recurrent_net)(None, torch.ones(3, 2, 1), {}, "h")
    assert fault_lines(mixed) == [
        "cell is None, wanted a module or a function of one time step",
        "links is of type str, wanted a dict: for every state the output that feeds it",
        "inputs is of type Tensor, wanted a dict of sequences by name",
    ]


def test_states_that_do_not_fit_links_are_listed() -> None:
    x, links = {"x": torch.ones(3, 2, 1)}, {"past": Window("y", 3), "h": "y", "gone": "y"}
    with pytest.raises(SpecError) as caught:
        recurrent_net(remember, x, {"past": {"a": torch.ones(2, 2), "b": 3}, "h": torch.ones(2), "more": 1}, links)
    assert fault_lines(caught) == [
        "state['gone'] is missing: links have it",
        "state['more'] is too much: no link feeds it",
        "state['past']['a'] has shape (2, 2), wanted 3 values first: it is a window over 3 steps",
        "state['past']['b'] is of type int, wanted a tensor of 3 values",
    ]
    with pytest.raises(SpecError, match=r"state is of type Tensor, wanted a dict with keys \['h'\]"):
        eagerly(remember, links={"h": "y"})(x, torch.ones(2))


def test_missing_outputs_of_a_step_net_are_listed() -> None:
    x, state = {"x": torch.ones(3, 2, 1)}, {"past": torch.ones(1, 2, 1), "h": torch.ones(2, 1)}
    with pytest.raises(SpecError, match=r"returned \['y', 'seen'\] at step 0, but") as caught:
        recurrent_net(remember, x, state, {"past": Window("hidden", 1), "h": "z"})
    assert fault_lines(caught) == ["links['past'] wants 'hidden'", "links['h'] wants 'z'"]
    with pytest.raises(SpecError, match="the step net <lambda> returned a Tensor at step 0, wanted a dict"):
        recurrent_net(lambda i, s: torch.ones(1), x, {"h": torch.ones(2, 1)}, {"h": "y"})


def test_nested_states_of_a_step_net() -> None:
    def step(inputs: Named, states: Named) -> Named:
        a, b = states["pair"]
        return {"pair": (b, a + inputs["x"]), "y": states["past"][0][0] + a}

    pair: tuple[Tensor, Tensor] = (torch.zeros(2), torch.ones(2))
    window = (torch.zeros(2, 2), torch.zeros(2, 2))
    seen = recurrent_net(
        step, {"x": torch.ones(3, 2)}, {"pair": pair, "past": window}, {"pair": "pair", "past": Window("pair", 2)}
    )
    assert [leaf.tolist() for leaf in seen.last["past"]] == [[[1, 1], [2, 2]], [[2, 2], [2, 2]]]
    assert equal(seen.last["pair"], (torch.full((2,), 2.0), torch.full((2,), 2.0)))
