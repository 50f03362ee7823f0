"""Random numbers per (stage, micro-batch): their seeds, the lock of the generators, and stages that suddenly draw."""

import threading
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchweft.core.errors import UsageError
from torchweft.core.rng import DrawnSeed, RandomUse, RngStreams, RngVote, derive_seed, draw_seed, generators_of

CPU = generators_of([torch.device("cpu")])
ALL = list(product(range(2), range(2)))
Stage = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def unknown_stages(count: int = 2) -> dict[int, RandomUse]:
    """Stages on the CPU without observations."""
    return {stage: RandomUse(CPU) for stage in range(count)}


def streams(uses: dict[int, RandomUse], agreed: DrawnSeed | None = None) -> RngStreams:
    return RngStreams(uses, dict.fromkeys(uses, 0), agreed)


def draw() -> Tensor:
    return torch.rand(3)


def draw_nothing() -> Tensor:
    return torch.zeros(3)


def forward(rng: RngStreams, stages: list[Stage], order: list[tuple[int, int]] = ALL) -> dict[tuple[int, int], Tensor]:
    """The numbers of the stages for two micro-batches, in any order."""
    numbers: dict[tuple[int, int], Tensor] = {}
    for stage, i in order:
        with rng.scope(stage, i):
            numbers[stage, i] = stages[stage]()
    return numbers


def assert_equal_numbers(one: dict[tuple[int, int], Tensor], other: dict[tuple[int, int], Tensor]) -> None:
    assert all(torch.equal(one[key], other[key]) for key in ALL)


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Call `work` with every number below `count`, each in its own thread."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def test_mixed_seeds_are_valid_reproducible_and_distinct() -> None:
    keys = [(seed, stage, i) for seed in (0, 1, 2**63 - 1) for stage in range(40) for i in range(40)]
    mixed = [derive_seed(*key) for key in keys]
    assert mixed == [derive_seed(*key) for key in keys] and len(set(mixed)) == len(keys)
    assert min(mixed) >= 0 and max(mixed) < 2**63
    torch.Generator().manual_seed(max(mixed))


def test_meta_device_has_only_the_cpu_generator() -> None:
    assert generators_of([torch.device("cpu"), torch.device("meta"), torch.device("cpu")]) == (torch.default_generator,)


def test_cuda_starts_before_its_generators_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no CUDA generators until CUDA is initialized. A pipe without weights can be the first to need one."""
    of_devices = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "init", lambda: monkeypatch.setattr(torch.cuda, "default_generators", of_devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sources = generators_of([torch.device("cuda", 1), torch.device("cuda")])
    assert sources == (torch.default_generator, of_devices[1], of_devices[0])


@pytest.mark.parametrize("name", ["mps", "xpu:0"])
def test_untested_device_type_is_rejected(name: str) -> None:
    """The error names the device and the types that can be used."""
    with pytest.raises(UsageError, match=f"'{name}' is not supported: .* 'cpu' or 'cuda'"):
        generators_of([torch.device(name)])


@given(st.permutations(ALL))
def test_numbers_do_not_depend_on_the_order(order: list[tuple[int, int]]) -> None:
    """A repeated step draws the same numbers, and all numbers of one step differ."""
    torch.manual_seed(3)
    expected = forward(streams(unknown_stages()), [draw, draw])
    torch.manual_seed(3)
    rng = streams(unknown_stages())
    assert_equal_numbers(expected, forward(rng, [draw, draw], order))
    assert_equal_numbers(expected, forward(rng, [draw, draw]))
    assert len({tuple(numbers.tolist()) for numbers in expected.values()}) == len(ALL)
    assert rng.commit_draws()


def test_step_advances_the_generator_by_one_draw_or_none() -> None:
    """The caller's generator advances by one draw if a stage drew, and stays unchanged otherwise."""
    before, uses = torch.get_rng_state(), unknown_stages()
    for _ in range(3):
        rng = streams(uses)
        forward(rng, [draw_nothing, draw_nothing])
        assert rng.commit_draws()
        assert torch.equal(torch.get_rng_state(), before)
    assert [use.draws for use in uses.values()] == [{0: False}, {0: False}]
    torch.randint(1 << 62, ())
    after_one_draw = torch.get_rng_state()
    torch.set_rng_state(before)
    rng = streams(unknown_stages())
    forward(rng, [draw_nothing, draw])
    assert rng.commit_draws()
    assert torch.equal(torch.get_rng_state(), after_one_draw)


def test_scope_restores_the_generator_after_an_error() -> None:
    rng, before = streams(unknown_stages()), torch.get_rng_state()
    with pytest.raises(KeyError), rng.scope(0, 0):
        draw()
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    with rng.scope(1, 0):  # the lock is free again
        draw()


def test_observation_is_kept_per_configuration() -> None:
    uses = unknown_stages(1)
    for configuration, stage in (("eval", draw_nothing), ("train", draw), ("eval", draw_nothing)):
        rng = RngStreams(uses, {0: configuration})
        forward(rng, [stage], [(0, 0)])
        assert rng.commit_draws()
    assert uses[0].draws == {"eval": False, "train": True}


@pytest.mark.parametrize("other", [draw_nothing, draw])
def test_step_with_a_sudden_draw_repeats_under_locks(other: Stage) -> None:
    """The repetition has the same seed, so its numbers are those of a step in which all stages lock from the start."""
    uses = unknown_stages()
    rng = streams(uses)
    forward(rng, [draw_nothing, other])
    assert rng.commit_draws()
    torch.manual_seed(5)
    surprised = streams(uses)
    forward(surprised, [draw, other])
    assert not surprised.commit_draws()
    again = streams(uses)
    repeated = forward(again, [draw, other])
    assert again.commit_draws()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    fresh = streams(unknown_stages())
    assert_equal_numbers(forward(fresh, [draw, other]), repeated)
    assert fresh.commit_draws()
    assert torch.equal(torch.get_rng_state(), after)
    assert uses[0].draws[0] is True


def test_quiet_step_detects_a_draw_without_scopes() -> None:
    uses = unknown_stages()
    rng = streams(uses)
    assert not rng.quiet, "no stage has been observed"
    forward(rng, [draw_nothing, draw_nothing])
    rng.commit_draws()
    rng = streams(uses)
    assert rng.quiet
    draw()  # outside every scope
    assert not rng.commit_draws()
    assert not streams(uses).quiet


def test_one_stage_at_a_time_holds_the_generator() -> None:
    rng, inside, most = streams(unknown_stages(4)), [0], [0]
    start = threading.Barrier(4)

    def run_stage(number: int) -> None:
        start.wait(10)
        for i in range(20):
            with rng.scope(number, i):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                draw()
                inside[0] -= 1

    run_threads(run_stage, 4)
    assert most == [1]


def test_seed_of_a_step_is_drawn_under_the_lock() -> None:
    """A step that begins while a stage draws waits, and neither changes the numbers of the other."""
    expected = streams(unknown_stages()).seed
    torch.manual_seed(0)
    seeds: list[int] = []
    other = threading.Thread(target=lambda: seeds.append(streams(unknown_stages()).seed))
    rng = streams(unknown_stages())
    torch.manual_seed(0)
    with rng.scope(0, 0):
        other.start()
        other.join(0.05)  # times out, because the other thread waits for the lock
        numbers = draw()
    other.join(10)
    with rng.scope(0, 0):
        assert torch.equal(numbers, draw())
    assert seeds == [expected]


@pytest.mark.parametrize("checkpoints_itself", [False, True])
def test_only_self_checkpointing_layers_lock_in_backward(checkpoints_itself: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    dropout = nn.functional.dropout
    y = checkpoint(dropout, x, use_reentrant=False).exp() if checkpoints_itself else dropout(x).exp()
    rng, meeting, alone = streams(unknown_stages()), threading.Barrier(2), list[bool]()

    def walk(stage: int) -> None:
        with rng.backward(stage, lambda: [y.grad_fn]):
            try:
                meeting.wait(0.1 if checkpoints_itself else 10)
                alone.append(False)
            except threading.BrokenBarrierError:
                alone.append(True)

    run_threads(walk, 2)
    assert alone == [checkpoints_itself] * 2


def test_stages_that_draw_nothing_never_wait() -> None:
    """They wait neither for each other nor for a stage that draws."""
    uses = unknown_stages(3)
    rng = streams(uses)
    forward(rng, [draw, draw_nothing, draw_nothing], [(0, 0), (1, 0), (2, 0)])
    assert rng.commit_draws()
    rng, meeting = streams(uses), threading.Barrier(3)

    def meet(number: int) -> None:
        with rng.scope(number, 0):
            meeting.wait(10)

    run_threads(meet, 3)
    assert not meeting.broken


@pytest.mark.parametrize("drew", [True, False])
def test_processes_that_agree_on_a_seed_stay_alike(drew: bool) -> None:
    """Each process uses the agreed numbers. Its generator advances if a stage of any process drew."""
    stages: list[Stage] = [draw if drew else draw_nothing, draw_nothing]
    torch.rand(2)  # unlike the state of other processes
    agreed = draw_seed(CPU)
    assert torch.equal(torch.get_rng_state(), agreed.before[0])
    rng = streams(unknown_stages(), agreed)
    numbers = forward(rng, stages)
    assert rng.commit_draws(RngVote.of([rng.vote(), RngVote(drew=drew, surprised=False)]))
    assert torch.equal(torch.get_rng_state(), (agreed.after if drew else agreed.before)[0])
    assert_equal_numbers(numbers, forward(streams(unknown_stages(), agreed), stages))


def test_quiet_process_advances_with_the_others() -> None:
    uses = unknown_stages()
    assert streams(uses).commit_draws()
    agreed = draw_seed(CPU)
    rng = streams(uses, agreed)
    forward(rng, [draw_nothing, draw_nothing])
    assert rng.commit_draws(RngVote(drew=True, surprised=False))
    assert torch.equal(torch.get_rng_state(), agreed.after[0])
