"""Checks of a pipe with split=: models that it refuses, and side effects that it avoids."""

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, assert_gradients_equal, rows
from tests.pipeline.split.test_split_pipe import Chain, cut
from tests.pipeline.test_pipe_modes import LinearCounter
from torchweft.core.errors import UsageError
from torchweft.pipeline.split import lengths, program_cache

pytestmark = pytest.mark.usefixtures("double")


class Ends(nn.Module):
    """Linear layers around a layer with a known batch axis. `pick` selects the part of its result that is used."""

    def __init__(self, inner: nn.Module, pick: bool = False, outer: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.outer = nn.Linear(8, 8), nn.Linear(8, 8), outer or nn.Identity()
        self.inner, self.pick = inner, pick

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.second(self.first(x)) + x)
        y = self.inner(x)
        return self.outer(y[0]) if self.pick else y


def _attends(first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=first)


@pytest.mark.parametrize(
    "make",
    [
        lambda first: Ends(nn.LSTM(8, 8, batch_first=first)),
        lambda first: Ends(nn.GRU(8, 8, batch_first=first), pick=True),
        lambda first: Ends(weft.LSTM(8, 8, batch_first=first), pick=True),
        lambda first: Ends(weft.Recurrent(nn.GRUCell(8, 8), batch_first=first), pick=True, outer=nn.Linear(8, 8)),
        lambda first: Ends(nn.Sequential(nn.Dropout(), _attends(first))),
        lambda first: nn.Sequential(nn.Linear(8, 8), Ends(nn.Identity()).second, _attends(first)),
    ],
)
def test_modules_with_the_batch_on_another_axis_are_refused(make: Any) -> None:
    """The error is raised when rows reach the module."""
    for axis in (0, 1):
        model = make(axis == 1)
        split = "second" if isinstance(model, Ends) else "1"
        with pytest.raises(UsageError, match=rf"has its batch on axis {1 - axis}, but it gets.* axis {axis}"):
            cut(model, split, batch_dim=axis)(torch.randn(4, 4, 8))
    with pytest.raises(UsageError, match="batch_first=True"):  # without batch_dim
        cut(make(False), split)


def test_code_around_a_module_may_swap_axes() -> None:
    class Swapping(Ends):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.transpose(0, 1))[0].transpose(0, 1)

    model = Swapping(nn.LSTM(8, 8))
    assert_close(cut(model, "second", batch_dim=0, chunks=2)(x := torch.randn(4, 3, 8)), model(x))


def test_states_with_the_batch_on_another_axis_are_refused() -> None:
    """They are refused even if they could be joined."""
    states = Ends(nn.LSTM(8, 8, num_layers=2, batch_first=True))
    with pytest.raises(UsageError, match=r"inner \(LSTM\).*output_batch_dim=\(0, 1\)"):
        cut(states, "second", chunks=2)(torch.randn(4, 3, 8))
    for model, settings in ((states, {"output_batch_dim": (0, 1)}), (Ends(states.inner, pick=True), {})):
        assert_close(cut(model, "second", chunks=2, **settings)(x := torch.randn(4, 3, 8)), model(x))


@pytest.mark.long
def test_states_of_torchweft_lstm_have_the_batch_axis_of_pytorch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), weft.LSTM(8, 8))
    for settings in ({"balance": [1, 1]}, {"split": ["1"]}):
        pipe = weft.Pipe(model, chunks=2, batch_dim=1, devices=["cpu"] * 2, **settings)
        assert_close(pipe(x := torch.randn(3, 4, 8)), model(x))


def test_auto_uses_the_given_batch_axes() -> None:
    model = Ends(nn.LSTM(8, 8), pick=True)
    pipe = weft.Pipe(model, chunks=2, split="auto", devices=["cpu"] * 2, batch_dim=1, sample=torch.randn(3, 2, 8))
    assert_close(pipe(x := torch.randn(3, 4, 8)), model(x))


def test_modes_and_hooks_of_the_caller_see_no_recording() -> None:
    class Ending(Chain):
        """Ends with a block, so that all of it runs on micro-batches."""

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layers[3](self.layers[2](self.layers[1](self.layers[0](x)).tanh()).tanh())

    model = Ending()
    for executor in ("serial", "threads", "auto"):
        pipe, counts = cut(model, chunks=3, executor=executor), list[tuple[int, int, int]]()
        for call in (pipe, pipe, pipe, lambda x: torch.cat([model(piece) for piece in x.split(2)])):
            saved: list[None] = []

            def pack(tensor: Tensor, saved: list[None] = saved) -> Tensor:
                saved.append(None)
                return tensor

            with FlopCounterMode(display=False) as counter, LinearCounter() as linears:
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    loss = call(rows(6, 8)).sum()
                loss.backward()
            counts.append((counter.get_total_flops(), linears.calls, len(saved)))
        assert len(set(counts)) == 1 and all(counts[0]), executor


def test_comparison_and_measurement_train_no_remote_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote(nn.Module):
        def __init__(self, backend: weft.ExpertBackend, address: str) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.remote = weft.RemoteExpert("expert", address, accumulate=True)
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.remote(self.first(x))) * float(os.environ["TORCHWEFT_TEST_SCALE"])

    monkeypatch.setenv("TORCHWEFT_TEST_SCALE", "1.0")
    inner = nn.Linear(8, 8)
    plain = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(inner), nn.Linear(8, 8))
    schema = (weft.TensorSpec((None, 8), torch.float64),)
    backend = weft.ExpertBackend(
        "expert", inner, lambda parameters: torch.optim.SGD(parameters, 1.0), args_schema=schema
    )
    with weft.Server([backend]) as server:
        model = Remote(backend, server.address)
        model.first.load_state_dict(plain[0].state_dict())
        model.second.load_state_dict(plain[2].state_dict())
        with pytest.raises(UsageError, match=r"split='auto'.*\n.*remote \(RemoteExpert\)"):
            weft.Pipe(model, chunks=2, split="auto", devices=["cpu"] * 2, sample=rows(2, 8))
        cut(model, "remote", chunks=2)(rows(4, 8)).square().sum().backward()
        assert model.remote.commit()
        plain(rows(4, 8)).square().sum().backward()
        torch.optim.SGD(plain[1].parameters(), 1.0).step()
        assert_close(inner.state_dict(), plain[1].state_dict())
        pipe = cut(model, "second", chunks=1)
        for scale in ("1.0", "2.0"):
            monkeypatch.setenv("TORCHWEFT_TEST_SCALE", scale)
            assert_close(pipe(rows(2, 8)), model(rows(2, 8)))
        model.remote.close()


def test_faults_of_split_are_listed_with_all_others() -> None:
    with pytest.raises(UsageError) as seen:
        cut(Chain(), "layer.2", loss_weight=len, schedule="1f1b", checkpoint=["never"] * 3)
    for words in ("'layer.2'; near it: ['layers.2'", "loss_weight", "'1f1b' starts backward", "3 entries for 2 stages"):
        assert words in str(seen.value)
    with pytest.raises(UsageError) as seen:
        weft.Pipe(Chain(), chunks=2, split=["layers.1", "layers.2"], devices=["cpu"], schedule="1f1b")
    assert all(words in str(seen.value) for words in ("2 split points make 3 stages", "'1f1b' starts backward"))


class Tokens(nn.Module):
    """A model that returns its loss. `way` is its use of ``num_items_in_batch``."""

    def __init__(self, way: str = "divides") -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(9, 8), nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 9)
        self.way = way

    def forward(self, ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.head(self.layers[0](self.embed(ids)))
        total = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        count = num_items_in_batch
        if count is None or self.way == "ignores":
            count = (labels != -100).sum()
        loss = total / count
        return {"loss": loss + logits.square().mean() if self.way == "adds" else loss, "logits": logits}


def _tokens(padded: int = 0) -> dict[str, Tensor]:
    labels = torch.arange(12).reshape(4, 3) % 9
    labels[0, :padded] = -100
    return {"ids": torch.arange(12).reshape(4, 3) % 7, "labels": labels}


@pytest.mark.parametrize("items", [None, int, torch.tensor])
@pytest.mark.parametrize("way", ["divides", "ignores", "adds"])
def test_a_number_of_items_is_used_as_the_model_uses_it(way: str, items: Any) -> None:
    """Whether the model divides by it, ignores it, or adds a mean, and whatever number of labels is ignored."""
    for padded, verify in ((0, True), (2, True), (2, False)):
        pipe = cut(model := Tokens(way), "layers.0", chunks=2, verify=verify)
        plain, batch = copy.deepcopy(model), _tokens(padded)
        more = {} if items is None else {"num_items_in_batch": items(12 - padded)}
        for args, kwargs in (((), batch | more), ((*batch.values(), *more.values()), {})):
            model.zero_grad()
            plain.zero_grad()
            loss, expected = (net(*args, **kwargs)["loss"] for net in (pipe, plain))
            loss.backward()
            expected.backward()
            assert_close(loss, expected)
            assert_gradients_equal(pipe, plain, 1e-12)


def test_the_least_recently_used_program_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deciding(Chain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x) * int(x[0, 0])

    monkeypatch.setattr(program_cache, "PROGRAMS", 2)
    monkeypatch.setattr(lengths, "_RECORDINGS", 0)  # so that no program is derived from a dropped one
    pipe = cut(Deciding(), chunks=1, verify=False)

    def recordings(rows: int, number: int) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe(torch.full((rows, 8), float(number)))
        return pipe.statistics()["recordings"]

    assert [recordings(2, number) for number in (1, 2, 1, 3, 1)] == [1, 2, 2, 3, 3]  # of one key
    assert [recordings(rows, 1) for rows in (3, 2, 4, 2, 3)] == [4, 4, 5, 5, 6]
