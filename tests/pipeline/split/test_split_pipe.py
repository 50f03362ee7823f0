"""A pipe with split= has the features of any Pipe: state, copies, modes, devices, precision, other libraries."""

import copy
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, assert_gradients_equal, pickle_copy, rows, torch_save_copy
from tests.pipeline.split.test_zoo import needs_transformers
from tests.pipeline.split.zoo import Dropping, Shared, UNet, gpt2
from torchweft.core.errors import PartitionError, UsageError
from torchweft.pipeline import tracing
from torchweft.pipeline.split import members

pytestmark = pytest.mark.usefixtures("double")


class Chain(nn.Module):
    """Linear layers with code between them, and options for other paths."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.gain = 1.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.gain
            if mask is not None:
                x = x * mask
        return x


def cut(model: nn.Module, *split: str, chunks: int = 4, **settings: Any) -> weft.Pipe:
    names = list(split) or ["layers.2"]
    return weft.Pipe(model, chunks=chunks, split=names, devices=["cpu"] * (len(names) + 1), **settings)


def assert_trains_as(pipe: weft.Pipe, plain: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Check that output and gradients are those of the plain model on the whole mini-batch."""
    pipe.zero_grad()
    plain.zero_grad()
    bare = {key: value.value if isinstance(value, weft.NoChunk) else value for key, value in kwargs.items()}
    expected = plain(*args, **bare)
    result = pipe(*args, **kwargs)
    assert_close(result, expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    assert_gradients_equal(pipe, plain, 1e-10)


def test_state_goes_both_ways_under_the_keys_of_the_model() -> None:
    model = Chain()
    pipe = cut(copy.deepcopy(model))
    assert pipe.load_state_dict(model.state_dict()).missing_keys == []
    model.load_state_dict(pipe.state_dict())
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert_trains_as(pipe, model, rows(7, 8))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle_copy, torch_save_copy])
def test_copies_and_pickles_record_again_and_share_nothing(duplicate: Any) -> None:
    pipe = cut(Shared(), "other", "head")
    pipe(rows(5, 8))
    again = duplicate(pipe)
    assert type(again) is type(pipe) and again.module.head.weight is again.module.embed.weight
    assert not {id(parameter) for parameter in again.parameters()} & {id(parameter) for parameter in pipe.parameters()}
    assert_close(again(rows(5, 8)).main, pipe(rows(5, 8)).main)


def test_modes_reach_the_model_and_choose_the_program() -> None:
    model = Dropping()
    pipe = cut(model, "blocks.2").eval()
    assert not model.training
    assert_close(pipe(rows(6, 8)), model(rows(6, 8)))
    assert not torch.equal(pipe.train()(rows(6, 8)), model.eval()(rows(6, 8)))


def test_no_grad_and_inference_run_as_the_model_does() -> None:
    model = Chain()
    pipe = cut(model)
    with torch.no_grad():
        assert_close(pipe(rows(6, 8)), model(rows(6, 8)))
        assert not pipe(rows(6, 8)).requires_grad
    with torch.inference_mode():
        assert_close(pipe(rows(6, 8)), model(rows(6, 8)))


def test_numbers_of_the_model_may_change_between_steps() -> None:
    model = Chain()
    pipe = cut(model)
    for gain in (1.0, 0.5, 1.0):
        model.gain = gain
        assert_trains_as(pipe, copy.deepcopy(model), rows(6, 8))
    assert pipe.statistics()["recordings"] == 2  # two sizes of micro-batches; a gain is taken from forward()


def test_layers_may_be_replaced_and_stages_may_change_in_number() -> None:
    model = Chain()
    pipe = cut(model)
    pipe(rows(4, 8))
    model.layers[1] = nn.Linear(8, 8)
    assert_trains_as(pipe, copy.deepcopy(model), rows(6, 8))
    pipe.split, pipe.devices = ["layers.1", "layers.3"], ["cpu"] * 3
    assert_trains_as(pipe, copy.deepcopy(model), rows(6, 8))
    assert len(pipe.statistics()["blocks"]) == 3


def test_masks_for_all_rows_are_taken_whole() -> None:
    model = Chain()
    pipe = cut(model)
    assert_trains_as(pipe, copy.deepcopy(model), rows(6, 8), mask=torch.rand(1, 8))
    assert_trains_as(pipe, copy.deepcopy(model), rows(6, 8), mask=weft.NoChunk(torch.rand(8)))
    assert_trains_as(pipe, copy.deepcopy(model), rows(6, 8), mask=torch.rand(6, 1))


def test_inputs_have_gradients_also_in_later_stages() -> None:
    model = Chain()
    pipe = cut(model, checkpoint="always", executor="threads")
    x, mask = rows(6, 8).requires_grad_(), torch.rand(6, 1, requires_grad=True)
    expected = torch.autograd.grad(model(x, mask).square().sum(), [x, mask])
    assert_close(torch.autograd.grad(pipe(x, mask).square().sum(), [x, mask]), expected)


def test_deferred_batch_norm_counts_the_whole_mini_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    cut(model, "2", deferred_batch_norm=True)(rows(8, 4))
    plain(rows(8, 4))
    assert_close(model[1].running_mean, plain[1].running_mean)
    assert_close(model[1].running_var, plain[1].running_var)


def test_meta_models_get_storage_and_keep_their_ties() -> None:
    with torch.device("meta"):
        model = Shared()
    pipe = cut(model, "other", "head").materialize()
    assert model.head.weight is model.embed.weight and not model.head.weight.is_meta
    pipe(rows(4, 8)).main.sum().backward()


def test_autocast_reaches_the_blocks_and_the_code_between() -> None:
    torch.set_default_dtype(torch.float32)
    model = Chain()
    pipe = cut(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected, result = model(rows(6, 8).float()), pipe(rows(6, 8).float())
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    assert result.dtype == expected.dtype


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_grad_scaler_scales_and_unscales(schedule: str) -> None:
    model = Chain()
    plain = copy.deepcopy(model)
    for net, call in ((model, True), (plain, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run: Any = net
        if call:
            run = cut(net, schedule=schedule, loss=functional.mse_loss, loss_scale=scaler.get_scale)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            x, target = rows(6, 8), rows(6, 8).cos()
            scaler.scale(run(x, target=target) if call else functional.mse_loss(run(x), target)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile, with or without a pipe
def test_compiled_blocks_stay_compiled() -> None:
    model = Chain()
    plain = copy.deepcopy(model)
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    assert_close(cut(model)(rows(6, 8)), plain(rows(6, 8)))


def test_hooks_of_blocks_and_parameters_fire_as_in_a_plain_loop() -> None:
    model = Chain()
    seen: list[str] = []
    pipe = cut(model, chunks=3)
    pipe(rows(6, 8)).sum().backward()
    model.layers[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.layers[3].register_full_backward_hook(lambda *_: seen.append("backward"))
    model.layers[0].weight.register_hook(lambda _: seen.append("weight"))
    pipe(rows(6, 8)).sum().backward()
    assert sorted(seen) == ["backward"] * 3 + ["forward"] * 3 + ["weight"]


def test_tied_parameter_crosses_devices_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device is treated as two, so that stages after the owner use a copy."""
    monkeypatch.setattr(members, "is_elsewhere", lambda parameter, device, home, stage: home != stage)
    for way in ({"executor": "threads", "checkpoint": "always"}, {"executor": "serial"}, {"executor": "graph"}):
        model = Shared()
        plain = copy.deepcopy(model)
        pipe = cut(model, "other", "head", chunks=3, **way)
        for count in (6, 5):
            pipe.zero_grad()
            plain.zero_grad()
            pipe(rows(count, 8)).main.square().sum().backward()
            plain(rows(count, 8)).main.square().sum().backward()
            assert_gradients_equal(pipe, plain, 1e-10)
        assert model.head.weight is model.embed.weight


class _OnGpu(Tensor):
    """Stand-in for a GPU tensor that records the streams which read it."""

    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl
    streams: set[object]

    def record_stream(self, stream: object) -> None:
        self.streams.add(stream)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_copies_of_tied_parameters_belong_to_their_readers(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_copies: list[_OnGpu] = []

    def copied(away: Any, device: torch.device, graph: bool) -> dict[int, Tensor]:
        copies = {id(parameter): parameter.detach().clone().as_subclass(_OnGpu).requires_grad_() for parameter in away}
        for tensor in copies.values():
            tensor.streams = set()
        all_copies.extend(copies.values())
        return copies

    monkeypatch.setattr(members, "is_elsewhere", lambda parameter, device, home, stage: home != stage)
    monkeypatch.setattr(members, "_copied", copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {threading.current_thread().name}")
    pipe = cut(Shared(), "other", "head", chunks=3, executor="threads", checkpoint=checkpoint, verify=False)
    pipe(rows(6, 8)).main.square().sum().backward()
    assert all_copies and all(tensor.streams for tensor in all_copies)


def test_block_of_two_stages_is_on_one_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Steady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            before = self.linear.weight
            time.sleep(0.001 * (1 + len(seen) % 3))  # lets the other stage run
            seen.append(self.linear.weight is before)
            return self.linear(x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.other = Steady(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.other(self.block(x)))

    monkeypatch.setattr(members, "is_elsewhere", lambda parameter, device, home, stage: home != stage)
    model = Twice()
    plain = copy.deepcopy(model)
    pipe = cut(model, "other", chunks=8, executor="threads", verify=False)
    for _ in range(2):  # the first step runs one stage at a time, to observe random draws
        pipe(rows(16, 8)).square().sum().backward()
        plain(rows(16, 8)).square().sum().backward()
    assert all(seen)
    assert_gradients_equal(pipe, plain, 1e-10)


def test_distributed_data_parallel_takes_the_pipe(process_group: None) -> None:
    model = Chain()
    plain = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(cut(model))
    wrapped(rows(6, 8)).square().sum().backward()
    plain(rows(6, 8)).square().sum().backward()
    assert_gradients_equal(model, plain, 1e-10)


def test_routes_list_the_values_that_cross() -> None:
    pipe = cut(UNet(), "middle", "up2", "up1", sample={"x": torch.randn(2, 3, 8, 8)})
    assert any(route.readers == (2,) and route.source == 0 for route in pipe.routes)
    assert {route.name.partition(" ")[0] for route in pipe.routes} >= {"down1", "down2", "middle"}
    assert all(route.bytes > 0 for route in pipe.routes)
    with pytest.raises(UsageError, match="call the pipe"):
        _ = cut(Chain()).routes


def test_glue_on_inputs_alone_is_recomputed_if_smaller() -> None:
    class Attending(Chain):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            square = mask[:, None, :] * mask[:, :, None]
            for layer in self.layers:
                x = square @ layer(x)
            return x

    pipe = cut(Attending())
    pipe(torch.randn(4, 16, 8), torch.rand(4, 16)).sum().backward()
    assert sorted(route.bytes for route in pipe.routes) == [16 * 8, 16 * 8 * 8]  # a row's mask, and its activation


def test_auto_measures_the_items_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(tracing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Timed(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.linear, self.seconds = nn.Linear(8, 8), seconds

        def forward(self, x: Tensor) -> Tensor:
            clock[0] += self.seconds
            return self.linear(x)

    model = Chain()
    model.layers = nn.ModuleList(Timed(seconds) for seconds in (1, 1, 1, 9, 9, 9))
    pipe = weft.Pipe(model, chunks=2, split="auto", devices=["cpu"] * 2, sample=rows(4, 8))
    assert pipe.split == ["layers.4"]
    assert_trains_as(pipe, copy.deepcopy(model), rows(4, 8))
    with pytest.warns(UserWarning, match="sizes of parameters"):
        assert weft.Pipe(Chain(), chunks=2, split="auto", devices=["cpu"] * 2).split == ["layers.2"]
    assert (
        weft.Pipe(nn.Sequential(nn.Linear(8, 8)), chunks=2, split="auto", devices="cpu", sample=rows(2, 8)).split == []
    )
    with pytest.raises(PartitionError, match="finds 4"):
        weft.Pipe(Chain(), chunks=2, split="auto", devices=["cpu"] * 5, sample=rows(2, 8))


def test_auto_takes_a_sequential_too() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pipe = weft.Pipe(model, chunks=2, split="auto", devices=["cpu"] * 2, sample=rows(4, 8))
    assert_trains_as(pipe, copy.deepcopy(model), rows(4, 8))


@needs_transformers
def test_a_loss_over_tokens_is_that_of_all_rows() -> None:
    import transformers  # noqa: PLC0415 - an extra

    model = transformers.GPT2LMHeadModel(gpt2().config)
    model.config.use_cache = True  # the pipe does not request it
    plain = copy.deepcopy(model)
    tokens = torch.randint(3, 50, (6, 9))
    labels = tokens.clone()
    labels[0, :7] = -100
    pipe = cut(model, "transformer.h.2", chunks=3)
    for count in (None, (labels[:, 1:] != -100).sum()):
        pipe.zero_grad()
        plain.zero_grad()
        for net in (pipe, plain):
            net(input_ids=tokens, labels=labels, num_items_in_batch=count).loss.backward()
        assert_gradients_equal(pipe, plain, 1e-10)


@needs_transformers
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_given_number_of_tokens_states_a_sum(schedule: str) -> None:
    """With the number of tokens, micro-batches are added, so backward can begin early. Without it, that is refused."""
    import transformers  # noqa: PLC0415 - an extra

    model = transformers.GPT2LMHeadModel(gpt2().config)
    plain = copy.deepcopy(model)
    tokens = torch.randint(3, 50, (6, 8))
    labels = tokens.clone()
    labels[0, :7] = -100
    pipe = cut(model, "transformer.h.2", chunks=3, schedule=schedule)
    model.train()
    for module in model.modules():
        module.training = not isinstance(module, nn.Dropout)
    for count in ((labels[:, 1:] != -100).sum(), None, 3):
        pipe.zero_grad()
        plain.zero_grad()
        batch = {"input_ids": tokens, "labels": labels, "num_items_in_batch": count}
        if count is None and schedule == "1f1b":
            with pytest.raises(UsageError, match="pass num_items_in_batch="):
                pipe(**batch)
            with torch.no_grad():
                assert_close(pipe(**batch).loss, plain(**batch).loss)
            continue
        for net in (pipe, plain):
            net(**batch).loss.backward()
        assert_gradients_equal(pipe, plain, 1e-10)


@needs_transformers
def test_accelerate_takes_the_pipe() -> None:
    import accelerate  # noqa: PLC0415 - an extra

    model = Chain()
    plain = copy.deepcopy(model)
    accelerator = accelerate.Accelerator(cpu=True)
    pipe, optimizer = accelerator.prepare(cut(model), torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(pipe(rows(6, 8)).square().mean())
    optimizer.step()
    plain(rows(6, 8)).square().mean().backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_gradients_of_gradients_go_through_the_graph_executor() -> None:
    model = Chain()
    pipe = cut(model, executor="graph")
    x = rows(4, 8).requires_grad_()
    both = [torch.autograd.grad(net(x).sum(), x, create_graph=True)[0] for net in (pipe, model)]
    assert_close(torch.autograd.grad(both[0].sum(), x), torch.autograd.grad(both[1].sum(), x))


def test_wrong_arguments_are_listed_at_once() -> None:
    with pytest.raises(UsageError) as seen:
        weft.Pipe(Chain(), chunks=0, split=[], balance=[1])
    assert all(word in str(seen.value) for word in ("chunks", "split", "balance"))


def test_batch_dim_says_where_the_rows_are() -> None:
    model = Chain()
    pipe = cut(model, batch_dim=1)
    assert_trains_as(pipe, copy.deepcopy(model), torch.randn(3, 6, 8))
    named = cut(copy.deepcopy(model), batch_dim={0: 1, "mask": None}, output_batch_dim=1)
    assert_trains_as(named, copy.deepcopy(model), torch.randn(3, 6, 8), mask=torch.rand(8))
