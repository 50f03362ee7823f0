"""Optimizer steps: fused optimizers, private memory of gradients, gradient hooks, and retained memory."""

import copy
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.optim.lr_scheduler import StepLR

from tests.experts.expert_cases import Formula, assert_same_state, fussy_backend, rows, seeded, send_step, work
from torchweft.core.errors import UsageError
from torchweft.experts import ExpertBackend, Runtime, TensorSpec
from torchweft.experts.errors import StepError
from torchweft.experts.gradients import private_gradients
from torchweft.experts.graph_cache import strided_parts
from torchweft.experts.optimizer_state import make_optimizer, make_schedule


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def step_in_backward(parameter: Tensor) -> None:
    """Hook that steps within the backward, which saves the memory of gradients."""
    assert parameter.grad is not None and not torch.is_grad_enabled()
    parameter.sub_(parameter.grad, alpha=0.3)
    parameter.grad = None


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("mini_batch", [False, True])
@pytest.mark.parametrize("hooks", [[step_in_backward], [halve, halve], [halve, step_in_backward]])
def test_gradient_hooks_run_once_a_step_with_the_sum(hooks: list[Any], mini_batch: bool) -> None:
    backend = fussy_backend(optimizer=sgd)
    plain = copy.deepcopy(backend.module)
    for module in (backend.module, plain):
        for layer in (module.first, module.side):
            layer.bias.requires_grad_(False)  # no gradient, and so no call
        for parameter in module.parameters():
            for hook in hooks if parameter.requires_grad else []:
                parameter.register_post_accumulate_grad_hook(hook)
    assert all(isinstance(answer, list) for answer in send_step(backend, mini_batch=mini_batch))
    x, gradient = (torch.cat([rows(2, seed + more) for seed in range(1 + mini_batch)]) for more in (0, 50))
    plain(x).backward(gradient)
    sgd(plain.parameters()).step()
    assert_same_state(backend.module, plain)


@pytest.mark.parametrize("mini_batch", [False, True])
def test_hook_that_raises_is_a_failed_step(mini_batch: bool) -> None:
    def fail(parameter: Tensor) -> None:
        raise ZeroDivisionError("mine")

    backend = fussy_backend(optimizer=sgd)
    before = copy.deepcopy(backend.module)
    next(backend.module.parameters()).register_post_accumulate_grad_hook(fail)
    error = send_step(backend, mini_batch=mini_batch)[-1]
    assert isinstance(error, StepError) and "ZeroDivisionError: mine" in str(error)
    assert backend.steps == 0 and all(parameter.grad is None for parameter in backend.module.parameters())
    assert all(map(torch.equal, backend.module.parameters(), before.parameters()))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=dtype))]


@pytest.mark.parametrize(
    ("factory", "fused"),
    [
        (torch.optim.Adam, True),
        (partial(torch.optim.SGD, lr=0.1), True),
        (partial(torch.optim.AdamW, fused=False), False),
        (lambda given: torch.optim.Adam(list(given)), False),
        (torch.optim.RMSprop, False),
        (partial(torch.optim.Adam, foreach=True), False),
        (torch.optim.Adam(parameters()), False),
    ],
)
def test_factory_is_fused_where_possible(factory: Any, fused: bool) -> None:
    optimizer = make_optimizer(factory, parameters())
    assert bool(optimizer.defaults.get("fused")) == fused
    assert optimizer is factory or not isinstance(factory, torch.optim.Adam)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3,), torch.complex64), ((), torch.complex64), ((3, 4), torch.float32), ((3,), torch.int64)]
)
def test_complex_and_strided_parameters_are_not_fused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = nn.Parameter(torch.ones(2))
    strange = torch.ones(*shape, 4, dtype=dtype)[..., ::2] if dtype is torch.float32 else torch.ones(shape, dtype=dtype)
    optimizer = make_optimizer(torch.optim.Adam, [plain, nn.Parameter(strange, requires_grad=False)])
    assert bool(optimizer.defaults["fused"]) == (dtype is torch.int64), "a frozen integer parameter is never stepped"


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("factory", "steps"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), ["dense", "sparse", "dense"]),
        (torch.optim.Adagrad, ["dense", "sparse", "dense"]),
        (MOMENTUM, ["none", "dense", "dense"]),
    ],
)
def test_sparse_or_late_gradients_switch_to_the_unfused_step(factory: Any, steps: list[str]) -> None:
    dense = torch.tensor([[0.0, 3.0], [0.0, -1.0]], dtype=torch.float64)
    stepped: list[nn.ParameterList] = []
    for make in (make_optimizer, lambda factory, parameters: factory(parameters)):
        tensors = nn.ParameterList([torch.ones(2, 2, dtype=torch.float64) for _ in range(2)])
        optimizer = make(factory, list(tensors))
        for kind in steps:
            tensors[0].grad = dense.clone()
            tensors[1].grad = {"none": None, "dense": dense.clone(), "sparse": dense.to_sparse(1)}[kind]
            optimizer.step()
        assert not optimizer.param_groups[0]["fused"]
        stepped.append(tensors)
    assert_same_state(*stepped)


def test_wrong_optimizer_and_schedule_factories_are_rejected() -> None:
    wrong: Any = lambda _: 3  # noqa: E731
    with pytest.raises(UsageError, match="optimizer made a int"):
        make_optimizer(wrong, parameters())
    optimizer = torch.optim.Adam(parameters())
    with pytest.raises(UsageError, match="schedule made a int"):
        make_schedule(wrong, optimizer)
    with pytest.raises(UsageError, match="no optimizer"):
        make_schedule(wrong, None)
    with pytest.raises(UsageError, match="another optimizer"):
        make_schedule(StepLR(torch.optim.Adam(parameters()), 1), optimizer)
    schedule = StepLR(optimizer, 1)
    assert make_schedule(schedule, optimizer) is schedule and make_schedule(None, None) is None


D = torch.float64


class ConstantGradient(torch.autograd.Function):
    """``x + p``, where the gradient of p is the tensor object ``constant`` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, constant: Tensor) -> Tensor:
        ctx.constant = constant
        return x + p

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.constant, None


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=D))


def channels_last(parameters: bool) -> nn.Module:
    conv = nn.Conv2d(3, 5, 3, dtype=D)
    module = Formula(lambda s, x: s.layer(x.to(memory_format=torch.channels_last)), layer=conv)
    return module.to(memory_format=torch.channels_last) if parameters else module


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, bias=False, dtype=D)
    return Formula(lambda s, x: s.layer(x.unsqueeze(1) + s.p).flatten(1), layer=layer, p=parameter(3, 4))


def sparse() -> nn.Module:
    """Module with a sparse gradient that shares memory with the answer, and a parameter without a gradient."""
    table = nn.Embedding(9, 4, sparse=True, dtype=D)
    return Formula(lambda s, x: (x + s.layer((x[:, 0] > 0).long())) * 2, layer=table, unused=parameter(2))


WIDE: dict[str, Callable[[], nn.Module]] = {
    "sum of two": lambda: Formula(lambda s, x: x @ (s.a + s.b), a=parameter(4, 4), b=parameter(4, 4)),
    "sum of two and its sum": lambda: Formula(
        lambda s, x: x @ (s.a + s.b) + s.a.sum(), a=parameter(4, 4), b=parameter(4, 4)
    ),
    "bias of one row": lambda: Formula(lambda s, x: (x + s.p) * 2, p=parameter(1, 4)),
    "expanded by one axis": lambda: Formula(lambda s, x: x @ s.w.sum(0), w=parameter(3, 4, 4)),
    "scalar": lambda: Formula(lambda s, x: (x * s.t.exp()).log_softmax(1), t=parameter()),
    "cat": lambda: Formula(lambda s, x: x @ torch.cat([s.u, s.v], 1), u=parameter(4, 2), v=parameter(4, 2)),
    "stack": lambda: Formula(lambda s, x: x @ torch.stack([s.u, s.v], 1), u=parameter(4), v=parameter(4)),
    "einsum": lambda: Formula(lambda s, x: torch.einsum("bi,hio->bho", x, s.w).flatten(1), w=parameter(2, 4, 3)),
    "transposed": lambda: Formula(lambda s, x: (x.unsqueeze(1) * s.w.t().tanh()).sum(-1), w=parameter(4, 5)),
    "transposed parameter": lambda: Formula(
        lambda s, x: x @ s.w.exp() + s.w.sum(), w=nn.Parameter(torch.randn(5, 4, dtype=D).t())
    ),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 3, dtype=D)),
    "encoder": encoder,
    "gradient is a buffer": lambda: Formula(  # which must not change
        lambda s, x: ConstantGradient.apply(x, s.p, s.constant), p=parameter(4), constant=torch.randn(4, dtype=D)
    ),
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


def assert_steps_as_in_plain_pytorch(
    make: Callable[[], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer],
    shape: tuple[int, ...],
    clip: float | None = None,
    mini_batch: bool = False,
    dtype: torch.dtype = D,
) -> None:
    """Assert that two steps give the weights and answers of plain PyTorch, and that answers do not change later."""
    module = seeded(make)
    plain = copy.deepcopy(module)
    plain_optimizer = optimizer(plain.parameters())
    assert not any(group.get("fused") for group in plain_optimizer.param_groups)
    backend = ExpertBackend(
        "e", module, optimizer, args_schema=(TensorSpec((None, *shape), dtype),), clip_grad_norm=clip
    )
    random = torch.Generator().manual_seed(1)
    for step in range(2):
        plain_optimizer.zero_grad()
        for part in range(2 if mini_batch else 1):
            x = torch.randn(1 + step, *shape, dtype=dtype, generator=random).requires_grad_()
            y = plain(x)
            gradient = torch.randn(y.shape, dtype=dtype, generator=random)
            y.backward(gradient)
            words = {"client": "ann", "key": f"{step} {part}", "mini_batch": f"m{step}" if mini_batch else None}
            answers = [backend.backward_pool.submit_task(x.detach(), gradient, **words) for _ in range(2)]
            work(backend)
            answers.append(backend.backward_pool.submit_task(x.detach(), gradient, **words))
            for answer in answers:
                torch.testing.assert_close(answer.result(0)[0], x.grad, rtol=0, atol=1e-12)
        if clip is not None:
            clip_grad_norm_(plain.parameters(), clip)
        plain_optimizer.step()
        if mini_batch:
            committed = backend.commit(f"m{step}", client="ann")
            work(backend)
            assert committed.result(0)
    assert backend.steps == 2
    assert_same_state(module, plain)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("module", "optimizer"),
    [(m, o) for i, m in enumerate([*WIDE, *IMAGES]) for j, o in enumerate(OPTIMIZERS) if (i + j) % 3 == 0],
)
def test_weights_and_answers_equal_plain_pytorch(module: str, optimizer: str) -> None:
    make, shape = (WIDE[module], (4,)) if module in WIDE else (IMAGES[module], (3, 8, 8))
    for clip, mini_batch in product((None, 0.1), (False, True)):
        assert_steps_as_in_plain_pytorch(make, OPTIMIZERS[optimizer], shape, clip, mini_batch)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad"])
def test_complex_parameters_step_as_in_plain_pytorch(optimizer: str) -> None:
    dtype = torch.complex128
    assert_steps_as_in_plain_pytorch(lambda: nn.Linear(4, 4, dtype=dtype), OPTIMIZERS[optimizer], (4,), dtype=dtype)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])  # the others take no sparse gradients, nor does clipping
@pytest.mark.parametrize("mini_batch", [False, True])
def test_sparse_gradients_step_as_in_plain_pytorch(optimizer: str, mini_batch: bool) -> None:
    assert_steps_as_in_plain_pytorch(sparse, OPTIMIZERS[optimizer], (4,), mini_batch=mini_batch)


def test_only_gradients_in_shared_memory_are_copied() -> None:
    matrix = nn.Parameter(torch.zeros(3, 4))
    whole, other, flat = torch.ones(3, 4), torch.ones(3, 4), torch.ones(24)
    halves = [flat[:12].view(3, 4), flat[12:].view(3, 4)]
    shared = {other.untyped_storage().data_ptr()}
    gradients = [whole, whole, other, *halves, torch.ones(4, 3).t(), torch.ones(()).expand(3, 4), None]
    private = private_gradients([matrix] * len(gradients), gradients, shared)
    assert [one is gradient for one, gradient in zip(private, gradients, strict=True)] == [
        *(True, False, False),  # unshared, the same again, shared with others
        *(True, False),  # two halves of one memory
        *(False, False, True),  # other layouts, none
    ]
    assert all(one is None or (one.is_contiguous() and one.equal(torch.ones(3, 4))) for one in private)
    addresses = [one.untyped_storage().data_ptr() for one in private if one is not None]
    assert len(set(addresses)) == len(addresses) and not shared & set(addresses)


def test_sparse_gradient_is_copied() -> None:
    values = torch.ones(2, 4, dtype=D)
    gradient = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3, 4), check_invariants=True)
    parameter = nn.Parameter(torch.zeros(3, 4, dtype=D))
    assert sum(part.nbytes for part in strided_parts(gradient)) >= 2 * 4 * 8
    assert [part.nbytes for part in strided_parts(torch.eye(4, dtype=D))] == [16 * 8]
    one, other = private_gradients([parameter] * 2, [gradient] * 2, set())
    assert one is not None and other is not None and one is not gradient and other is not gradient
    other._values().zero_()
    assert values.equal(torch.ones(2, 4, dtype=D)) and one.to_dense().sum() == 8


def test_gradient_gets_the_layout_of_its_parameter() -> None:
    one = torch.randn(2, 3, 4, 5)
    for parameter in (one, one.transpose(0, 2), one.to(memory_format=torch.channels_last), one[:, :, :, ::2]):
        state = torch.zeros_like(parameter)
        for gradient in (torch.randn(parameter.shape), torch.ones(()).expand(parameter.shape)):
            (private,) = private_gradients([nn.Parameter(parameter)], [gradient], set())
            assert private is not None and private.equal(gradient) and private.stride() == state.stride()


LARGE = (2**9, 2**9)  # a weight of 1 MB and a small bias


class RecordingSgd(torch.optim.SGD):
    def __init__(self, parameters: Any, seen: list["list[weakref.ref[Tensor]]"]) -> None:
        super().__init__(parameters, lr=0.1)
        self._seen = seen

    def step(self, closure: Any = None) -> None:
        self._seen.append([weakref.ref(p.grad) for group in self.param_groups for p in group["params"]])
        super().step(closure)


def test_large_gradients_live_until_the_next_batch() -> None:
    seen: list[list[weakref.ref[Tensor]]] = []
    spec = TensorSpec((None, LARGE[0]), torch.float32)
    backend = ExpertBackend("e", nn.Linear(*LARGE), lambda params: RecordingSgd(params, seen), args_schema=(spec,))
    with Runtime([backend]):
        for _ in range(3):
            backend.backward_pool.submit_task(torch.randn(2, LARGE[0]), torch.randn(2, LARGE[1])).result(30)
    living = [[gradient.shape for ref in refs if (gradient := ref()) is not None] for refs in seen]
    assert living == [[], [], [LARGE]]
