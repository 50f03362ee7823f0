"""A wavefront gives the numbers of one layer after the other, forward and back, in threads or not."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.recurrent.layers.layer_cases import WIDTH, agree, everything, layers
from tests.recurrent.recurrent_cases import Awkward, close
from weft.core.errors import BackwardTwiceError, DoubleBackwardError
from weft.core.schedule import Schedule
from weft.recurrent import Recurrent
from weft.recurrent.layers import Stack
from weft.recurrent.layers.wavefront import table


def plain(stack: Stack) -> Stack:
    """The same layers, one after the other."""
    again = Stack(list(stack.layers), residual=stack.residual, dropout=stack.dropout, wavefront=None)
    return again.train(stack.training)


@settings(max_examples=20)
@given(st.data())
def test_it_gives_the_numbers_and_gradients_of_the_plain_stack(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    count, steps, rows = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 7)), data.draw(st.integers(1, 3))
    batch_first = data.draw(st.booleans())
    nets = layers(count, batch_first=batch_first, truncate=data.draw(st.sampled_from([None, 2])))
    wave = Stack(nets, residual=data.draw(st.booleans()), wavefront=data.draw(st.integers(1, steps)))
    nets[0].cell.weight_hh.requires_grad_(data.draw(st.booleans()))
    x = torch.randn(steps, rows, WIDTH).double()
    tables: dict[str, Any] = {"start": data.draw(st.integers(0, 2))}
    if data.draw(st.booleans()):
        tables["lengths"] = data.draw(st.lists(st.integers(0, steps), min_size=rows, max_size=rows))
    if data.draw(st.booleans()):
        tables["mask"] = torch.rand((rows, steps) if batch_first else (steps, rows)) < 0.7
    x = (x.transpose(0, 1) if batch_first else x).requires_grad_(data.draw(st.booleans()))
    state = None
    if data.draw(st.booleans()):
        state = [s if i % 2 else None for i, s in enumerate(plain(wave)(x).last)]
        state = [s if s is None or isinstance(s, tuple) else s.detach().requires_grad_() for s in state]
    learns = [each for each in (*nets[-1].parameters(), x, *filter(torch.is_tensor, state or [])) if each.requires_grad]
    wanted = plain(wave)(x, state, **tables)
    for _ in range(2):  # in the caller's thread, then in threads
        seen = wave(x, state, **tables)
        close(list(seen), list(wanted))
        parts = [(r.outputs, r.last[0], r.states[1]) for r in (seen, wanted)]
        found = [torch.autograd.grad(total(part), learns, retain_graph=True, allow_unused=True) for part in parts]
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                agree([one], [other])


def total(value: Any) -> Tensor:
    outputs, last, states = value
    last = last[0] if isinstance(last, tuple) else last
    return outputs.sin().sum() + (2 * last).sin().sum() + states.cos().sum()


def nested() -> list[Recurrent]:
    """A cell with nested values and a state that is an integer, below one that takes a part of its output."""

    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 4).double()

        def forward(self, x: Any, s: Tensor) -> Any:
            s = self.mix(torch.cat([x["h"], s], -1)).tanh()
            return {"s": s, "n": x["n"], "nothing": None}, s

    return [Recurrent(Awkward(), backend="eager"), Recurrent(Above(), initial=torch.zeros(4).double(), backend="eager")]


def test_values_may_be_nested() -> None:
    wave = Stack(nested(), wavefront=2)
    x = {"x": torch.randn(5, 2, 3).double() + 3, "gate": torch.rand(5, 2).double()}
    state = [(torch.zeros(2, 4).double(), {"n": torch.tensor([3, 4])}), None]
    wrt = [leaf.requires_grad_() for leaf in x.values()]
    for _ in range(2):
        agree(everything(wave, tuple(wave(x, state)), wrt), everything(wave, tuple(plain(wave)(x, state)), wrt))
        close(wave(x, state).outputs["n"], plain(wave)(x, state).outputs["n"])


@pytest.mark.parametrize("backend", ["python", "eager"])
def test_backends_work_in_threads(backend: str) -> None:
    wave = Stack(layers(2, backend=backend), wavefront=3)
    for _ in range(3):
        x = torch.randn(8, 2, WIDTH).double().requires_grad_()
        agree(everything(wave, tuple(wave(x)), [x]), everything(wave, tuple(plain(wave)(x)), [x]))


def test_random_numbers_belong_to_layer_and_chunk_whoever_runs_first() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor, s: Tensor) -> Any:
            s = s + x * torch.rand_like(x)
            return s, s

    nets = [Recurrent(Noisy(), initial=torch.zeros(1), backend="eager") for _ in range(3)]
    wave = Stack(nets, dropout=0.5, wavefront=2)
    x = torch.randn(7, 2, WIDTH, requires_grad=True)
    found = []
    for _ in range(4):  # the first one in the caller's thread
        torch.manual_seed(4)
        result = wave(x)
        found.append([result.outputs.detach(), *torch.autograd.grad(result.outputs.sum(), [x])])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert not torch.equal(found[0][0], wave(x).outputs)


def test_without_gradients_nothing_is_kept_and_nothing_is_tracked() -> None:
    wave = Stack(layers(2), wavefront=2)
    x = torch.randn(5, 2, WIDTH).double()
    with torch.no_grad():
        assert not wave(x).outputs.requires_grad
    with torch.inference_mode():
        assert wave(x).outputs.is_inference()


def test_a_graph_goes_back_once_unless_it_is_retained() -> None:
    wave = Stack(layers(2), wavefront=2)
    x = torch.randn(5, 2, WIDTH).double().requires_grad_()
    loss = wave(x).outputs.sum()
    one = torch.autograd.grad(loss, x, retain_graph=True)
    agree(list(torch.autograd.grad(loss, x)), list(one))
    with pytest.raises(BackwardTwiceError):
        torch.autograd.grad(loss, x)
    with pytest.raises(DoubleBackwardError):
        torch.autograd.grad(wave(x).outputs.sum(), x, create_graph=True)


def test_hooks_of_parameters_fire_once_with_the_whole_gradient() -> None:
    wave = Stack(layers(2), wavefront=2)
    seen: list[Tensor] = []
    weight = wave.layers[0].cell.weight_hh
    weight.register_hook(seen.append)
    wave(torch.randn(6, 2, WIDTH).double()).outputs.sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_error_names_layer_and_chunk(direction: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("back")

    class Picky(nn.Module):
        def forward(self, x: Tensor, s: Tensor, t: int) -> Any:
            if t == 5 and direction == "forward":
                raise ArithmeticError("there")
            s = s + (Fails.apply(x) if t == 5 else x)
            return s, s

    picky = Recurrent(Picky(), initial=torch.zeros(1).double(), time_step=True, backend="eager")
    wave = Stack([layers(1)[0], picky], wavefront=2)
    for _ in range(2):
        with pytest.raises(ArithmeticError) as caught:
            wave(torch.randn(8, 2, WIDTH).double()).outputs.sum().backward()
        notes = "\n".join(caught.value.__notes__)
        assert "layer 1, chunk 2, steps 4 to 5" in notes
        assert ("in layer 1 (Recurrent) of a Stack" in notes) == (direction == "forward")


def test_the_table_is_a_valid_schedule() -> None:
    made = table(3, 4)
    made.check(stages=3, micro_batches=4)
    assert made.splits and isinstance(made, Schedule)
    assert [str(action) for action in made.workers[1]] == ["1F0", "1F1", "1F2", "1F3", "1B3", "1B2", "1B1", "1B0"]
