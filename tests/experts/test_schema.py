"""Schemas, the dummy run that completes them, constant outputs, and rejection of unsupported tensors by name."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.experts.expert_cases import TROUBLE, WIDTH, Formula, X, double_layer, rows
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.pytree import flatten
from torchweft.core.spec import TensorSpec
from torchweft.experts import Dim, ExpertBackend, Runtime
from torchweft.experts.schema import Column, FlatSchema, call_schema, check_ranges

specs = st.builds(
    lambda shape, dtype: TensorSpec((None, *shape), dtype),
    st.lists(st.none() | st.integers(0, 3), max_size=2),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
)
trees = st.recursive(
    specs | st.none() | st.integers(), lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=2), max_leaves=5
)


@example([TensorSpec((None,), torch.float32), []], {})  # a container without leaves is an argument too
@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("abc"), trees, max_size=2))
def test_packing_inverts_flattening_around_constants(args: Any, kwargs: Any) -> None:
    leaves = flatten((args, kwargs))[0]
    if not any(isinstance(leaf, TensorSpec) for leaf in leaves):
        return
    nest = call_schema("e", args, kwargs)
    tensors = [spec.empty(2).detach() for spec in nest.specs]
    packed, structure = flatten(nest.pack(tensors))
    assert structure == flatten((tuple(args), kwargs))[1]
    assert all(packed[place] is tensor for place, tensor in zip(nest.places, tensors, strict=True))
    assert all(isinstance(leaf, TensorSpec) or one is leaf for one, leaf in zip(packed, leaves, strict=True))
    assert all(spec.requires_grad == spec.dtype.is_floating_point for spec in nest.specs)
    assert FlatSchema(nest.columns()).check(tensors, "e") == 2


describe = st.tuples(
    st.lists(st.integers(0, 3), max_size=3), st.sampled_from([torch.float32, torch.float16, torch.int64])
)


@given(
    st.lists(st.tuples(specs, st.booleans()), min_size=1, max_size=3),
    st.lists(st.lists(describe, min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_checked_tasks_of_one_batch_key_can_be_joined(columns: Any, tasks: Any) -> None:
    columns = [(spec, casts and spec.dtype.is_floating_point) for spec, casts in columns]
    edge = FlatSchema([Column(str(i), spec, casts) for i, (spec, casts) in enumerate(columns)])
    groups: dict[Any, list[Any]] = {}
    for described in tasks:
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in described]
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
            groups.setdefault(edge.batch_key(tensors), []).append(tensors)
    for members in groups.values():
        for (spec, _), *column in zip(columns, *members, strict=True):
            rows = sum(tensor.shape[0] for tensor in column)
            into = torch.empty((rows, *column[0].shape[1:]), dtype=spec.dtype)
            torch.cat(column, out=into)


IMAGES = TensorSpec((None, 3, None, None), torch.float32)


def folding(count: int) -> nn.Module:
    return Formula(lambda _, x: x.view(-1, count, WIDTH).flip(1).reshape(x.shape))


PICKY: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Tensor]]] = {
    "a kernel of 7": (lambda: nn.Conv2d(3, 4, 7), IMAGES, lambda: torch.randn(2, 3, 12, 9)),
    "a kernel of 50": (lambda: nn.Conv2d(3, 4, 50), IMAGES, lambda: torch.randn(1, 3, 60, 51)),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 7), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        IMAGES,
        lambda: torch.randn(2, 3, 12, 9),
    ),
    "an even batch": (lambda: folding(2), X, lambda: rows(6, 0)),
    "a batch of fours": (lambda: folding(4), X, lambda: rows(12, 0)),
    "a batch like the sample's": (lambda: folding(7), rows(7, 0), lambda: rows(14, 0)),
}


@pytest.mark.parametrize("kind", PICKY)
@pytest.mark.parametrize("with_outputs", [False, True])
def test_module_that_rejects_small_sizes_is_served(kind: str, with_outputs: bool) -> None:
    make, schema, task = PICKY[kind]
    module, x = make(), task()
    inferred = ExpertBackend("e", module, args_schema=(schema,)).get_info()["outputs_schema"]
    outputs_schema = inferred if with_outputs else None
    backend = ExpertBackend("e", module, args_schema=(schema,), outputs_schema=outputs_schema)
    with Runtime([backend]), torch.no_grad():
        y = module(x)
        assert torch.allclose(backend.forward_pool.submit_task(x).result(30)[0], y, atol=1e-6)
    assert [size for size in inferred.shape if size is not None] == list(y.shape[1:2])
    assert sum(size is None for size in inferred.shape) == (3 if y.dim() == 4 else 1)


def test_failed_dummy_run_says_how_to_fix_the_schemas() -> None:
    with pytest.raises(RuntimeError) as caught:
        ExpertBackend("e", folding(7), args_schema=(X,))
    (note,) = caught.value.__notes__
    assert "in the dummy run of expert 'e' on zeros with 3 rows" in note
    assert "nor did it run with 4 or 2 rows" in note and "sample tensors" in note


def talking(says: Callable[[Tensor], Any]) -> nn.Module:
    """Module that returns ``says(x)`` and a constant in addition to its tensor."""
    return Formula(lambda self, x: (self.layer(x), {"says": says(x), "always": 1}), layer=double_layer())


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
@pytest.mark.parametrize("with_outputs", [False, True])
def test_outputs_can_hold_constants(kind: str, with_outputs: bool) -> None:
    schema = (X, {"says": STEADY[kind](rows(1, 0)), "always": 1}) if with_outputs else None
    backend = ExpertBackend("talks", talking(STEADY[kind]), args_schema=(X,), outputs_schema=schema)
    with Runtime([backend]), torch.no_grad():
        for count in (1, 2, 7):
            x = rows(count, count)
            assert torch.equal(backend.forward_pool.submit_task(x).result(30)[0], backend.module(x)[0])


@pytest.mark.parametrize("kind", FICKLE)
def test_output_that_changes_with_numbers_fails_only_its_batch(kind: str) -> None:
    backend = ExpertBackend("talks", talking(FICKLE[kind]), args_schema=(X,))
    gradients = [torch.ones_like(rows(2, 0)), *[torch.ones(2, dtype=torch.float64)] * (kind == "a tensor or None")]
    with Runtime([backend]):
        for _ in range(2):
            for pool, more in ((backend.forward_pool, []), (backend.backward_pool, gradients)):
                with pytest.raises(SpecError, match=r"output\[1\]\['says'\] is ") as caught:
                    pool.submit_task(rows(2, 0), *more).result(30)
                assert kind == "a tensor or None" or "Return it as a tensor" in str(caught.value)
                assert pool.submit_task(torch.zeros(2, WIDTH, dtype=torch.float64), *more).result(30)


@pytest.mark.parametrize("kind", BY_SIZE)
def test_output_that_changes_with_size_is_rejected_at_once(kind: str) -> None:
    with pytest.raises(SpecError, match=r"expert 'talks' .*\n  - output\[1\]\['says'\] is .*wanted"):
        ExpertBackend("talks", talking(BY_SIZE[kind]), args_schema=(X,))


def test_all_output_mismatches_are_listed() -> None:
    def says(x: Tensor) -> Any:
        return [len(x), "same", x.sum().item()] if (x == TROUBLE).any() else [3, "same", 0.0]

    backend = ExpertBackend("talks", talking(says), args_schema=(X,))
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


def odd_module(odd: Tensor, *, always: bool) -> nn.Module:
    return Formula(lambda _, x: odd if always or x.any() else x * 2)


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_are_rejected_by_name(kind: str) -> None:
    """As inputs, together with the faults of other inputs, and as outputs."""
    make, word = ODD[kind]
    backend = ExpertBackend("e", nn.Bilinear(WIDTH, WIDTH, 1, dtype=torch.float64), args_schema=(X, X))
    with pytest.raises(SpecError, match=rf"- args\[0\] is a {word} tensor.*\n  - args\[1\] has dtype"):
        backend.forward_pool.submit_task(make(), rows(3, 0).float())
    backend = ExpertBackend("e", odd_module(make(), always=False), args_schema=(X,))
    with Runtime([backend]), pytest.raises(SpecError, match=f"output is a {word} tensor"):
        backend.forward_pool.submit_task(rows(3, 0)).result(30)
    assert backend.statistics().forward_batches == 0
    for module, schema in ((nn.Identity(), make()), (odd_module(make(), always=True), X)) if word == "nested" else ():
        with pytest.raises(SpecError, match="a nested tensor has no spec"):
            ExpertBackend("e", module, args_schema=(schema,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("inner", [False, True])
def test_torch_script_modules_are_rejected(how: str, inner: bool) -> None:
    jit: Any = torch.jit
    scripted = getattr(jit, how)(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), *[rows(2, 0)] * (how == "trace"))
    module = nn.Sequential(nn.Tanh(), scripted) if inner else scripted
    with pytest.raises(UsageError, match=f"module was made by torch.jit.* {'1' if inner else 'itself'}; give"):
        ExpertBackend("e", module, args_schema=(X,))


def lookup_module() -> nn.Module:
    return Formula(lambda self, index, mask: self.table(index) * mask[:, None], table=nn.Embedding(5, 2))


def lookup_schema(values: range | None) -> tuple[TensorSpec, TensorSpec]:
    return TensorSpec((None,), torch.int64, values=values), TensorSpec((None,), torch.bool)


def test_index_out_of_range_is_rejected_before_it_runs() -> None:
    backend = ExpertBackend("e", lookup_module(), args_schema=lookup_schema(range(5)))
    good, bad, mask = torch.tensor([0, 4]), torch.tensor([5, 0]), torch.ones(2, dtype=torch.bool)
    with Runtime([backend]):
        waiting = backend.forward_pool.submit_task(good, mask)
        for pool, more in ((backend.forward_pool, ()), (backend.backward_pool, (torch.ones(2, 2),))):
            with pytest.raises(SpecError, match=r"args\[0\] has values from 0 to 5, wanted range\(0, 5\)"):
                pool.submit_task(bad, mask, *more)
        assert waiting.result(20)[0].shape == (2, 2)


def test_embedding_on_a_gpu_needs_a_range_of_indices() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    with pytest.raises(UsageError, match=r"'e' has embeddings on cuda:0.*of args\[0\] a range"):
        check_ranges("e", call_schema("e", lookup_schema(None), None), lookup_module(), gpu)
    check_ranges("e", call_schema("e", lookup_schema(None), None), lookup_module(), cpu)
    check_ranges("e", call_schema("e", lookup_schema(range(5)), None), lookup_module(), gpu)
    check_ranges("e", call_schema("e", lookup_schema(None), None), nn.Linear(2, 2), gpu)


@pytest.mark.cuda
def test_bad_index_on_a_gpu_leaves_its_expert_alive() -> None:
    module = lookup_module().to("cuda:0")
    backend = ExpertBackend("e", module, args_schema=lookup_schema(range(5)))
    mask = torch.ones(1, dtype=torch.bool)
    with Runtime([backend]):
        with pytest.raises(SpecError, match="has values from 7 to 7"):
            backend.forward_pool.submit_task(torch.tensor([7]), mask)
        assert backend.forward_pool.submit_task(torch.tensor([4]), mask).result(60)[0].shape == (1, 2)


def test_axis_with_a_bound_refuses_larger_sizes() -> None:
    """One call of great length could otherwise take the whole memory of a device."""
    spec = TensorSpec((None, Dim(max=4), WIDTH), torch.float64)
    assert spec.shape == (None, None, WIDTH) and spec.faults(torch.zeros(9, 4, WIDTH, dtype=torch.float64)) == []
    backend, x = ExpertBackend("f", double_layer(), args_schema=(spec,)), torch.zeros(2, 5, WIDTH, dtype=torch.float64)
    with Runtime([backend]):
        assert len(backend.forward_pool.submit_task(x[:, :4]).result(10)) == 1
        for pool, tensors in ((backend.forward_pool, [x]), (backend.backward_pool, [x, x])):
            with pytest.raises(SpecError, match="axis 1 has size 5, wanted at most 4"):
                pool.submit_task(*tensors)
