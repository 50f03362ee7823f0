"""Whatever autograd's gradients look like in memory, weights and answers are those of plain PyTorch."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations

from tests.experts.expert_cases import seeded, work
from weft.experts import ExpertBackend, TensorSpec
from weft.experts.optimizer_step import nbytes, private_gradients

D = torch.float64


class Formula(nn.Module):
    """A function of parameters, by their shapes, and of layers."""

    def __init__(self, formula: Callable[..., Tensor], layer: nn.Module | None = None, **shapes: Any) -> None:
        super().__init__()
        self.formula = formula
        self.layer = layer
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=D)))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


class Returns(torch.autograd.Function):
    """``x + p``; the gradient of p is the very tensor ``given``, whosever it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, given: Tensor) -> Tensor:
        ctx.given = given
        return x + p

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.given, None


class Constant(nn.Module):
    """Its parameter's gradient is its buffer, which has to stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(4, dtype=D))
        self.register_buffer("given", torch.randn(4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return Returns.apply(x, self.p, self.given)


def transposed() -> nn.Module:
    """Its parameter is no contiguous one."""
    module = Formula(lambda s, x: x @ s.w.exp() + s.w.sum(), w=())
    module.w = nn.Parameter(torch.randn(5, 4, dtype=D).t())
    return module


def channels_last(parameters: bool) -> nn.Module:
    """Activations in that layout, and maybe the weights as well."""
    conv = nn.Conv2d(3, 5, 3, dtype=D)
    module = Formula(lambda s, x: s.layer(x.to(memory_format=torch.channels_last)), conv)
    return module.to(memory_format=torch.channels_last) if parameters else module


def encoder() -> nn.Module:
    """Attention, norms and a feed-forward net over three tokens."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, bias=False, dtype=D)
    return Formula(lambda s, x: s.layer(x.unsqueeze(1) + s.p).flatten(1), layer, p=(3, 4))


def sparse() -> nn.Module:
    """A sparse gradient that looks into the answer's memory, and a parameter without any."""
    table = nn.Embedding(9, 4, sparse=True, dtype=D)
    return Formula(lambda s, x: (x + s.layer((x[:, 0] > 0).long())) * 2, table, unused=(2,))


WIDE: dict[str, Callable[[], nn.Module]] = {
    "sum of two": lambda: Formula(lambda s, x: x @ (s.a + s.b), a=(4, 4), b=(4, 4)),
    "sum of two and its sum": lambda: Formula(lambda s, x: x @ (s.a + s.b) + s.a.sum(), a=(4, 4), b=(4, 4)),
    "bias of one row": lambda: Formula(lambda s, x: (x + s.p) * 2, p=(1, 4)),
    "bias": lambda: Formula(lambda s, x: x + s.p, p=(4,)),
    "expanded vector": lambda: Formula(lambda s, x: x + s.b.sum(), b=(4,)),
    "expanded by one axis": lambda: Formula(lambda s, x: x @ s.w.sum(0), w=(3, 4, 4)),
    "scalar": lambda: Formula(lambda s, x: (x * s.t.exp()).log_softmax(1), t=()),
    "cat": lambda: Formula(lambda s, x: x @ torch.cat([s.u, s.v], 1), u=(4, 2), v=(4, 2)),
    "flat cat": lambda: Formula(lambda s, x: x * torch.cat([s.u, s.v]), u=(2,), v=(2,)),
    "stack": lambda: Formula(lambda s, x: x @ torch.stack([s.u, s.v], 1), u=(4,), v=(4,)),
    "einsum": lambda: Formula(lambda s, x: torch.einsum("bi,hio->bho", x, s.w).flatten(1), w=(2, 4, 3)),
    "permuted": lambda: Formula(lambda s, x: torch.einsum("bi,oji->bjo", x, s.w).flatten(1), w=(3, 2, 4)),
    "transposed": lambda: Formula(lambda s, x: (x.unsqueeze(1) * s.w.t().tanh()).sum(-1), w=(4, 5)),
    "transposed parameter": transposed,
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 3, dtype=D)),
    "encoder": encoder,
    "gradient is a buffer": Constant,
}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "channels last": lambda: channels_last(False),
    "channels last, also weights": lambda: channels_last(True),
    "pointwise": lambda: nn.Conv2d(3, 5, 1, dtype=D).to(memory_format=torch.channels_last),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "unfused Adam": partial(torch.optim.Adam, lr=0.1, fused=False),
}


def plain(make: Callable[..., torch.optim.Optimizer], module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer without any fused step."""
    optimizer = make(module.parameters())
    for group in optimizer.param_groups:
        assert not group.get("fused")
    return optimizer


def assert_steps_as_in_plain_pytorch(
    make: Callable[[], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer],
    shape: tuple[int, ...],
    clip: float | None,
    mini_batch: bool,
) -> None:
    """Two steps here and in plain PyTorch: weights and answers are the same, and answers stay."""
    module = seeded(make)
    other = copy.deepcopy(module)
    steps = plain(optimizer, other)
    backend = ExpertBackend("e", module, optimizer, args_schema=(TensorSpec((None, *shape), D),), clip_grad_norm=clip)
    random = torch.Generator().manual_seed(1)
    for step in range(2):
        steps.zero_grad()
        for part in range(2 if mini_batch else 1):
            x = torch.randn(1 + step, *shape, dtype=D, generator=random).requires_grad_()
            y = other(x)
            gradient = torch.randn(y.shape, dtype=D, generator=random)
            y.backward(gradient)
            name = f"m{step}" if mini_batch else None
            sent = {"client": "ann", "key": f"{step} {part}", "mini_batch": name}
            answers = [backend.backward_pool.submit_task(x.detach(), gradient, **sent) for _ in range(2)]
            work(backend)
            answers.append(backend.backward_pool.submit_task(x.detach(), gradient, **sent))
            for answer in answers:
                torch.testing.assert_close(answer.result(0)[0], x.grad, rtol=0, atol=1e-12)
        if clip is not None:
            clip_grad_norm_(other.parameters(), clip)
        steps.step()
        if mini_batch:
            committed = backend.commit(f"m{step}", client="ann")
            work(backend)
            assert committed.result(0)
    assert backend.steps == 2
    for name, value in other.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=1e-12, msg=lambda s, n=name: n + s)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("module", [*WIDE, *IMAGES])
def test_weights_and_answers_are_those_of_plain_pytorch(module: str, optimizer: str) -> None:
    make, shape = (WIDE[module], (4,)) if module in WIDE else (IMAGES[module], (3, 8, 8))
    for clip, mini_batch in product((None, 0.1), (False, True)):
        assert_steps_as_in_plain_pytorch(make, OPTIMIZERS[optimizer], shape, clip, mini_batch)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])  # the others take no sparse gradients, nor does clipping
@pytest.mark.parametrize("mini_batch", [False, True])
def test_sparse_gradients_step_as_those_of_plain_pytorch(optimizer: str, mini_batch: bool) -> None:
    assert_steps_as_in_plain_pytorch(sparse, OPTIMIZERS[optimizer], (4,), None, mini_batch)


def test_only_what_has_to_be_is_copied() -> None:
    matrix = nn.Parameter(torch.zeros(3, 4))
    whole, other, flat = torch.ones(3, 4), torch.ones(3, 4), torch.ones(24)
    parts = [flat[:12].view(3, 4), flat[12:].view(3, 4)]
    held = {other.untyped_storage().data_ptr()}
    gradients = [whole, whole, other, *parts, torch.ones(4, 3).t(), torch.ones(()).expand(3, 4), None]
    found = private_gradients([matrix] * len(gradients), gradients, held)
    assert [one is given for one, given in zip(found, gradients, strict=True)] == [
        *(True, False, False),  # nobody else's; the same again; held
        *(True, False),  # two halves of one memory
        *(False, False, True),  # other layouts; none
    ]
    assert all(one is None or (one.is_contiguous() and one.equal(torch.ones(3, 4))) for one in found)
    addresses = [one.untyped_storage().data_ptr() for one in found if one is not None]
    assert len(set(addresses)) == len(addresses) and not held & set(addresses)


def test_a_sparse_gradient_is_copied_where_its_numbers_are_others() -> None:
    values = torch.ones(2, 4, dtype=D)
    gradient = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3, 4), check_invariants=True)
    parameter = nn.Parameter(torch.zeros(3, 4, dtype=D))
    for held, copied in ((set[int](), False), ({values.untyped_storage().data_ptr()}, True)):
        one, other = private_gradients([parameter] * 2, [gradient] * 2, held)
        assert one is not None and other is not None and (one is not gradient) == copied and other is not gradient
        other._values().zero_()
        assert values.equal(torch.ones(2, 4, dtype=D)) and one.to_dense().sum() == 8


def test_a_gradient_gets_the_layout_of_its_parameter() -> None:
    one = torch.randn(2, 3, 4, 5)
    for parameter in (one, one.transpose(0, 2), one.to(memory_format=torch.channels_last), one[:, :, :, ::2]):
        state = torch.zeros_like(parameter)
        for gradient in (torch.randn(parameter.shape), torch.ones(()).expand(parameter.shape)):
            (found,) = private_gradients([nn.Parameter(parameter)], [gradient], set())
            assert found is not None and found.equal(gradient) and found.stride() == state.stride()


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_memory_of_any_tensor_is_counted(layout: Any) -> None:
    dense = torch.eye(4, dtype=D)
    found = nbytes(dense.to_sparse(layout=layout) if layout is not torch.strided else dense)
    assert found >= 4 * 8 and (layout is not torch.strided or found == 16 * 8)
