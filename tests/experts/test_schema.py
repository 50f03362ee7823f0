"""Schemas, the dummy run that completes them, constants in them, and unusual tensors, which are refused by name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.expert_cases import TROUBLE, WIDTH, X, rows
from weft.core.errors import SpecError, UsageError
from weft.core.pytree import flatten
from weft.core.spec import TensorSpec
from weft.experts import ExpertBackend, Runtime
from weft.experts.schema import Column, FlatSchema, call_schema, check_ranges

specs = st.builds(
    lambda shape, dtype: TensorSpec((None, *shape), dtype),
    st.lists(st.none() | st.integers(0, 3), max_size=2),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
)
trees = st.recursive(
    specs | st.none() | st.integers(), lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=2), max_leaves=5
)


@example([TensorSpec((None,), torch.float32), []], {})  # what holds no leaf is an argument all the same
@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("abc"), trees, max_size=2))
def test_packing_is_the_inverse_of_flattening_with_constants_in_their_places(args: Any, kwargs: Any) -> None:
    leaves = flatten((args, kwargs))[0]
    wanted = [leaf for leaf in leaves if isinstance(leaf, TensorSpec)]
    if not wanted:
        return
    nest = call_schema("e", args, kwargs)
    tensors = [spec.empty(2).detach() for spec in nest.specs]
    value = nest.pack(tensors)
    assert flatten(value)[1] == flatten((tuple(args), kwargs))[1]
    found = [flatten(value)[0][place] for place in nest.places]
    assert all(a is b for a, b in zip(found, tensors, strict=True))
    for leaf, original in zip(flatten(value)[0], leaves, strict=True):
        assert isinstance(original, TensorSpec) or leaf is original
    assert all(spec.requires_grad == spec.dtype.is_floating_point for spec in nest.specs)
    assert FlatSchema(nest.columns()).check(tensors, "e") == 2


describe = st.tuples(
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from([torch.float32, torch.float16, torch.int64])
)


@given(
    st.lists(st.tuples(specs, st.booleans()), min_size=1, max_size=3),
    st.lists(st.lists(describe, min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_whatever_passes_the_edge_with_one_batch_key_can_be_joined(columns: Any, tasks: Any) -> None:
    columns = [(spec, casts and spec.dtype.is_floating_point) for spec, casts in columns]
    edge = FlatSchema([Column(str(i), spec, casts) for i, (spec, casts) in enumerate(columns)])
    lanes: dict[Any, list[Any]] = {}
    for shapes_of_task in tasks:
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes_of_task]
        fits = len(tensors) == len(columns) and all(
            len(t.shape) == len(spec.shape)
            and all(size in (None, seen) for size, seen in zip(spec.shape, t.shape, strict=True))
            and (t.dtype == spec.dtype or (casts and t.is_floating_point()))
            for t, (spec, casts) in zip(tensors, columns, strict=True)
        )
        fits = fits and len({t.shape[0] for t in tensors}) == 1 and tensors[0].shape[0] > 0
        try:
            edge.check(tensors, "edge")
        except SpecError:
            assert not fits
        else:
            assert fits
            lanes.setdefault(edge.batch_key(tensors), []).append(tensors)
    for members in lanes.values():
        for (spec, _), *column in zip(columns, *members, strict=True):
            rows = sum(tensor.shape[0] for tensor in column)
            into = torch.empty((rows, *column[0].shape[1:]), dtype=spec.dtype)
            torch.cat(column, out=into)


IMAGES = TensorSpec((None, 3, None, None), torch.float32)


class Folds(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, self.count, WIDTH).flip(1).reshape(x.shape)


PICKY: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Tensor]]] = {
    "a kernel of 7": (lambda: nn.Conv2d(3, 4, 7), IMAGES, lambda: torch.randn(2, 3, 12, 9)),
    "a kernel of 50": (lambda: nn.Conv2d(3, 4, 50), IMAGES, lambda: torch.randn(1, 3, 60, 51)),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 7), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        IMAGES,
        lambda: torch.randn(2, 3, 12, 9),
    ),
    "an even batch": (lambda: Folds(2), X, lambda: rows(6, 0)),
    "a batch of fours": (lambda: Folds(4), X, lambda: rows(12, 0)),
    "a batch like the sample's": (lambda: Folds(7), rows(7, 0), lambda: rows(14, 0)),
}


@pytest.mark.parametrize("kind", PICKY)
@pytest.mark.parametrize("given", [False, True])
def test_a_module_that_refuses_small_sizes_is_served(kind: str, given: bool) -> None:
    make, schema, task = PICKY[kind]
    module, x = make(), task()
    found = ExpertBackend("e", module, args_schema=(schema,)).get_info()["outputs_schema"]
    backend = ExpertBackend("e", module, args_schema=(schema,), outputs_schema=found if given else None)
    with Runtime([backend]), torch.no_grad():
        wanted = module(x)
        assert torch.allclose(backend.forward_pool.submit_task(x).result(30)[0], wanted, atol=1e-6)
    assert [size for size in found.shape if size is not None] == list(wanted.shape[1:2])
    free = sum(size is None for size in found.shape)
    assert free == (3 if wanted.dim() == 4 else 1)


def test_what_runs_with_no_sizes_is_told_with_what_to_do() -> None:
    with pytest.raises(RuntimeError) as caught:
        ExpertBackend("e", Folds(7), args_schema=(X,))
    (note,) = caught.value.__notes__
    assert "in the dummy run of expert 'e' on zeros with 3 rows" in note
    assert "nor did it run with 4 or 2 rows" in note and "sample tensors" in note


class Talks(nn.Module):
    """Returns something beside its tensor, and a number that is always the same."""

    def __init__(self, says: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.says = says
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self.layer(x), {"says": self.says(x), "always": 1}


STEADY: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "str": lambda x: "".join(["mo", "de"]),
    "a new NaN": lambda x: float("nan"),
    "complex NaN": lambda x: complex(float("nan"), 1),
    "int": lambda x: int("7" * 20),
    "a number in a list": lambda x: [1.5, (True, None)],
    "dtype": lambda x: x.dtype,
}
FICKLE: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: x.square().sum().item(),
    "NaN or not": lambda x: float("nan") if x.any() else 0.0,
    "number or NaN": lambda x: 0.0 if x.any() else float("nan"),
    "another type": lambda x: True if x.any() else 1,
    "None or a tensor": lambda x: x[:, 0] if x.any() else None,
    "a tensor or None": lambda x: None if x.any() else x[:, 0],
    "str": lambda x: "large" if x.any() else "small",
}
BY_SIZE: dict[str, Callable[[Tensor], Any]] = {
    "rows": len,
    "bool": lambda x: len(x) > 3,
    "None for few": lambda x: None if len(x) < 4 else x,
    "None for many": lambda x: x if len(x) < 4 else None,
    "object": lambda x: object(),
    "array": lambda x: x.numpy(),
}


@pytest.mark.parametrize("kind", STEADY)
@pytest.mark.parametrize("given", [False, True])
def test_what_is_always_the_same_may_be_among_the_outputs(kind: str, given: bool) -> None:
    said = (X, {"says": STEADY[kind](rows(1, 0)), "always": 1}) if given else None
    backend = ExpertBackend("talks", Talks(STEADY[kind]), args_schema=(X,), outputs_schema=said)
    with Runtime([backend]), torch.no_grad():
        for count in (1, 2, 7):
            x = rows(count, count)
            assert torch.equal(backend.forward_pool.submit_task(x).result(30)[0], backend.module(x)[0])


@pytest.mark.parametrize("kind", FICKLE)
def test_what_changes_with_the_numbers_fails_its_batch_by_name_and_no_other(kind: str) -> None:
    backend = ExpertBackend("talks", Talks(FICKLE[kind]), args_schema=(X,))
    gradients = [torch.ones_like(rows(2, 0)), *[torch.ones(2, dtype=torch.float64)] * (kind == "a tensor or None")]
    with Runtime([backend]):
        for _ in range(2):
            for pool, more in ((backend.forward_pool, []), (backend.backward_pool, gradients)):
                with pytest.raises(SpecError, match=r"output\[1\]\['says'\] is ") as caught:
                    pool.submit_task(rows(2, 0), *more).result(30)
                assert kind == "a tensor or None" or "Return it as a tensor" in str(caught.value)
                assert pool.submit_task(torch.zeros(2, WIDTH, dtype=torch.float64), *more).result(30)


@pytest.mark.parametrize("kind", BY_SIZE)
def test_what_changes_with_the_size_is_seen_when_the_expert_is_made(kind: str) -> None:
    with pytest.raises(SpecError, match=r"expert 'talks' .*\n  - output\[1\]\['says'\] is .*wanted"):
        ExpertBackend("talks", Talks(BY_SIZE[kind]), args_schema=(X,))


def test_all_that_does_not_fit_is_told_at_once() -> None:
    def says(x: Tensor) -> Any:
        return [len(x), "same", x.sum().item()] if (x == TROUBLE).any() else [3, "same", 0.0]

    backend = ExpertBackend("talks", Talks(says), args_schema=(X,))
    with Runtime([backend]), pytest.raises(SpecError) as caught:
        backend.forward_pool.submit_task(torch.full((2, WIDTH), TROUBLE, dtype=torch.float64)).result(30)
    head, *faults = str(caught.value).splitlines()
    assert "do not match its outputs_schema" in head
    assert [fault.split(" is ")[0] for fault in faults] == ["  - output[1]['says'][0]", "  - output[1]['says'][2]"]


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the strided ones a prototype
        return torch.nested.nested_tensor([rows(2, 0), rows(3, 1)], layout=layout)


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "strided nested": (lambda: nested(torch.strided), "nested"),
    "jagged nested": (lambda: nested(torch.jagged), "nested"),
    "sparse": (lambda: rows(3, 0).to_sparse(), r"torch\.sparse_coo"),
    "meta": (lambda: rows(3, 0).to("meta"), "meta"),
}


class Gives(nn.Module):
    def __init__(self, odd: Tensor, *, always: bool) -> None:
        super().__init__()
        self.odd, self.always = [odd], always

    def forward(self, x: Tensor) -> Tensor:
        return self.odd[0] if self.always or x.any() else x * 2


@pytest.mark.parametrize("kind", ODD)
def test_a_task_of_an_odd_tensor_is_refused_with_all_its_faults(kind: str) -> None:
    make, word = ODD[kind]
    backend = ExpertBackend("e", Pair(), args_schema=(X, X))
    with pytest.raises(SpecError, match=rf"- args\[0\] is a {word} tensor.*\n  - args\[1\] has dtype"):
        backend.forward_pool.submit_task(make(), rows(3, 0).float())


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize("kind", ODD)
def test_a_module_that_returns_an_odd_tensor_is_told_by_name(kind: str) -> None:
    make, word = ODD[kind]
    backend = ExpertBackend("e", Gives(make(), always=False), args_schema=(X,))
    with Runtime([backend]), pytest.raises(SpecError, match=f"output is a {word} tensor"):
        backend.forward_pool.submit_task(rows(3, 0)).result(30)
    assert backend.statistics().forward_batches == 0
    if word == "nested":  # neither a schema nor the first output may be
        for module, schema in ((nn.Identity(), make()), (Gives(make(), always=True), X)):
            with pytest.raises(SpecError, match="a nested tensor has no spec"):
                ExpertBackend("e", module, args_schema=(schema,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("inner", [False, True])
def test_modules_of_torch_script_are_refused_with_what_to_do(how: str, inner: bool) -> None:
    jit: Any = torch.jit
    scripted = getattr(jit, how)(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), *[rows(2, 0)] * (how == "trace"))
    module = nn.Sequential(nn.Tanh(), scripted) if inner else scripted
    with pytest.raises(UsageError, match=f"module was made by torch.jit.* {'1' if inner else 'itself'}; give"):
        ExpertBackend("e", module, args_schema=(X,))


class LookUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)

    def forward(self, index: Tensor, mask: Tensor) -> Tensor:
        return self.table(index) * mask[:, None]


def looking_up(values: range | None) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec((None,), torch.int64, values=values), TensorSpec((None,), torch.bool)


def test_an_index_out_of_range_is_refused_at_the_edge() -> None:
    """Forward and backward, before anything runs; others in the queue do not notice."""
    backend = ExpertBackend("e", LookUp(), args_schema=looking_up(range(5)))
    good, bad, mask = torch.tensor([0, 4]), torch.tensor([5, 0]), torch.ones(2, dtype=torch.bool)
    with Runtime([backend]):
        waiting = backend.forward_pool.submit_task(good, mask)
        for pool, more in ((backend.forward_pool, ()), (backend.backward_pool, (torch.ones(2, 2),))):
            with pytest.raises(SpecError, match=r"args\[0\] has values from 0 to 5, wanted range\(0, 5\)"):
                pool.submit_task(bad, mask, *more)
        assert waiting.result(20)[0].shape == (2, 2)


def test_an_embedding_on_a_gpu_needs_the_range_of_its_indices() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    with pytest.raises(UsageError, match=r"'e' has embeddings on cuda:0.*of args\[0\] a range"):
        check_ranges("e", call_schema("e", looking_up(None), None), LookUp(), gpu)
    check_ranges("e", call_schema("e", looking_up(None), None), LookUp(), cpu)
    check_ranges("e", call_schema("e", looking_up(range(5)), None), LookUp(), gpu)
    check_ranges("e", call_schema("e", looking_up(None), None), nn.Linear(2, 2), gpu)


@pytest.mark.cuda
def test_a_bad_index_on_a_gpu_leaves_its_expert_alive() -> None:
    module = LookUp().to("cuda:0")
    with pytest.raises(UsageError, match="has embeddings on cuda:0"):
        ExpertBackend("e", module, args_schema=looking_up(None))
    backend = ExpertBackend("e", module, args_schema=looking_up(range(5)))
    mask = torch.ones(1, dtype=torch.bool)
    with Runtime([backend]):
        with pytest.raises(SpecError, match="has values from 7 to 7"):
            backend.forward_pool.submit_task(torch.tensor([7]), mask)
        assert backend.forward_pool.submit_task(torch.tensor([4]), mask).result(60)[0].shape == (1, 2)
