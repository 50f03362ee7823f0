"""Expert kinds are looked up by name, and the bundled kinds have no special treatment."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from torchweft.core.errors import UsageError
from torchweft.core.spec import TensorSpec
from torchweft.experts import ExpertFactory, FeedForward, Runtime, expert_kinds, make_expert, register_expert
from torchweft.experts import registry as registered


def test_kind_is_built_from_keyword_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_kinds", dict(registered._kinds))

    @register_expert("double")
    def double(width: int) -> ExpertFactory:
        return ExpertFactory(nn.Identity(), (TensorSpec((None, width), torch.float32),), options={"max_batch_size": 7})

    assert "double" in expert_kinds()
    backend = make_expert("double", width=3).backend("d", timeout=0.5)
    assert (backend.forward_pool.options.max_batch_size, backend.forward_pool.options.timeout) == (7, 0.5)
    with pytest.raises(UsageError, match=r"no kind of expert called 'fnn'; known are .*ffn, .*transformer"):
        make_expert("fnn")
    with pytest.raises(UsageError, match="a kind of expert called 'double' already"):
        register_expert("double")(double)
    with pytest.raises(UsageError, match=r"made by double\(width: int\).*, but"):
        make_expert("double", hidden=3)


def test_bundled_layers_are_trained() -> None:
    ffn = make_expert("ffn", hidden=8).backend("ffn.0", partial(torch.optim.Adam, lr=1e-2))
    layer = make_expert("transformer", hidden=8, heads=2).backend("t.0", partial(torch.optim.SGD, lr=1e-2))
    assert isinstance(ffn.module, FeedForward) and isinstance(layer.module, nn.TransformerEncoderLayer)
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    with Runtime([ffn, layer]):
        (y,) = layer.forward_pool.submit_task(x, padding).result(30)
        (gradient, none) = layer.backward_pool.submit_task(x, padding, torch.ones(2, 5, 8)).result(30)
        assert y.shape == gradient.shape == x.shape and not none.any()
        assert ffn.backward_pool.submit_task(torch.randn(3, 8), torch.ones(3, 8)).result(30)
    assert ffn.steps == layer.steps == 1
    with pytest.raises(UsageError, match="heads is 3, wanted a divisor of hidden, 8"):
        make_expert("transformer", hidden=8, heads=3)


@pytest.mark.parametrize(
    ("kind", "arguments", "names"),
    [
        ("ffn", {"hidden": 0}, ["hidden"]),
        ("ffn", {"hidden": -4, "inner": 0}, ["hidden", "inner"]),
        ("ffn", {"hidden": True}, ["hidden"]),
        ("transformer", {"hidden": 8, "heads": 0}, ["heads"]),
        ("transformer", dict(hidden=0, heads=-2, inner=0, dropout=2.0), ["hidden", "heads", "inner", "dropout"]),
        ("transformer", {"hidden": 8, "dropout": float("nan")}, ["dropout"]),
    ],
)
def test_invalid_sizes_are_listed(kind: str, arguments: Any, names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make_expert(kind, **arguments)
    assert [fault.split()[1] for fault in str(caught.value).splitlines()[1:]] == names
