"""Random numbers per (stage, micro-batch): seeds, who holds the generator, and what a surprise leads to."""

import threading
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.core.errors import UsageError
from weft.core.rng import RandomUse, RngStreams, RngVote, draw_seed, generators, mix


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def uses(stages: int = 2) -> dict[int, RandomUse]:
    """Stages on the CPU that nothing is known about yet."""
    return {stage: RandomUse(generators([torch.device("cpu")])) for stage in range(stages)}


def draw() -> Tensor:
    """Three numbers."""
    return torch.rand(3)


def nothing() -> Tensor:
    """No number."""
    return torch.zeros(3)


def forward(
    rng: RngStreams, stages: list[Callable[[], Tensor]], order: list[tuple[int, int]]
) -> dict[tuple[int, int], Tensor]:
    """What the stages draw for two micro-batches, in any order."""
    drawn: dict[tuple[int, int], Tensor] = {}
    for stage, i in order:
        with rng.scope(stage, i):
            drawn[stage, i] = stages[stage]()
    return drawn


def at_once(work: Callable[[int], None], count: int) -> None:
    """Do it with every number below the count, each in a thread of its own."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


ZEROS = {0: 0, 1: 0}
ALL = list(product(range(2), range(2)))


def test_mixed_seeds_can_seed_a_generator_follow_from_the_keys_and_do_not_meet() -> None:
    keys = [(seed, stage, i) for seed in (0, 1, 2**63 - 1) for stage in range(40) for i in range(40)]
    mixed = [mix(*each) for each in keys]
    assert mixed == [mix(*each) for each in keys] and len(set(mixed)) == len(keys)
    assert min(mixed) >= 0 and max(mixed) < 2**63
    torch.Generator().manual_seed(max(mixed))


def test_the_cpu_has_one_generator_and_meta_none_of_its_own() -> None:
    found = generators([torch.device("cpu"), torch.device("meta"), torch.device("cpu")])
    assert found == (torch.default_generator,)


def test_cuda_starts_before_its_generators_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has no generators of CUDA devices until CUDA is initialized, which a pipe without weights is the first
    to need."""
    of_devices = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "init", lambda: monkeypatch.setattr(torch.cuda, "default_generators", of_devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = generators([torch.device("cuda", 1), torch.device("cuda")])
    assert found == (torch.default_generator, of_devices[1], of_devices[0])


@pytest.mark.parametrize("name", ["mps", "xpu:0"])
def test_an_untested_device_type_is_rejected(name: str) -> None:
    """The error names the device and the types that can be used."""
    with pytest.raises(UsageError, match=f"'{name}' is not supported: .* 'cpu' or 'cuda'"):
        generators([torch.device(name)])


@given(st.permutations(ALL))
def test_numbers_do_not_depend_on_the_order_and_a_repetition_draws_them_again(order: list[tuple[int, int]]) -> None:
    torch.manual_seed(3)
    wanted = forward(RngStreams(uses(), ZEROS), [draw, draw], ALL)
    torch.manual_seed(3)
    rng = RngStreams(uses(), ZEROS)
    seen, again = forward(rng, [draw, draw], order), forward(rng, [draw, draw], ALL)
    for key in ALL:
        assert torch.equal(wanted[key], seen[key]) and torch.equal(wanted[key], again[key])
    assert len({tuple(each.tolist()) for each in wanted.values()}) == len(ALL)
    assert rng.settle()


def test_a_step_that_draws_moves_the_callers_generator_by_one_draw_and_another_not_at_all() -> None:
    before = torch.get_rng_state()
    known = uses()
    for _ in range(3):
        rng = RngStreams(known, ZEROS)
        forward(rng, [nothing, nothing], ALL)
        assert rng.settle()
        assert torch.equal(torch.get_rng_state(), before)
    assert [use.draws for use in known.values()] == [{0: False}, {0: False}]
    torch.randint(1 << 62, ())
    after_one_draw = torch.get_rng_state()
    torch.set_rng_state(before)
    rng = RngStreams(uses(), ZEROS)
    forward(rng, [nothing, draw], ALL)
    assert rng.settle()
    assert torch.equal(torch.get_rng_state(), after_one_draw)


def test_inside_the_scope_the_caller_sees_nothing_of_the_draws_even_on_error() -> None:
    rng = RngStreams(uses(), ZEROS)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), rng.scope(0, 0):
        draw()
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    with rng.scope(1, 0):  # and the generator is free again
        draw()


def test_the_verdict_is_kept_per_configuration() -> None:
    known = uses(1)
    for configuration, stage in (("eval", nothing), ("train", draw), ("eval", nothing)):
        rng = RngStreams(known, {0: configuration})
        forward(rng, [stage], [(0, 0)])
        assert rng.settle()
    assert known[0].draws == {"eval": False, "train": True}


@pytest.mark.parametrize("other", [nothing, draw])
def test_a_surprise_lets_the_step_run_again_with_the_same_seed_and_every_stage_holding(
    other: Callable[[], Tensor],
) -> None:
    known = uses()
    rng = RngStreams(known, ZEROS)
    forward(rng, [nothing, other], ALL)
    assert rng.settle()
    torch.manual_seed(5)
    surprised = RngStreams(known, ZEROS)
    forward(surprised, [draw, other], ALL)
    assert not surprised.settle()
    again = RngStreams(known, ZEROS)
    seen = forward(again, [draw, other], ALL)
    assert again.settle()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    fresh = RngStreams(uses(), ZEROS)
    wanted = forward(fresh, [draw, other], ALL)
    assert fresh.settle()
    assert all(torch.equal(wanted[key], seen[key]) for key in ALL)
    assert torch.equal(torch.get_rng_state(), after)
    assert known[0].draws[0] is True


def test_a_model_known_to_be_quiet_needs_no_scope_and_is_still_found_out() -> None:
    known = uses()
    rng = RngStreams(known, ZEROS)
    assert not rng.quiet, "nothing is known yet"
    forward(rng, [nothing, nothing], ALL)
    rng.settle()
    rng = RngStreams(known, ZEROS)
    assert rng.quiet
    draw()  # outside of every scope
    assert not rng.settle()
    assert not RngStreams(known, ZEROS).quiet


def test_one_stage_holds_the_generator_while_others_wait() -> None:
    rng, inside, most = RngStreams(uses(4), dict.fromkeys(range(4), 0)), [0], [0]
    start = threading.Barrier(4)

    def stage(number: int) -> None:
        start.wait(10)
        for i in range(20):
            with rng.scope(number, i):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                draw()
                inside[0] -= 1

    at_once(stage, 4)
    assert most == [1]


def test_the_seed_of_a_step_is_drawn_by_turns_and_so_is_what_is_put_back() -> None:
    wanted = RngStreams(uses(), ZEROS).seed
    torch.manual_seed(0)
    other = threading.Thread(target=lambda: seeds.append(RngStreams(uses(), ZEROS).seed))
    seeds: list[int] = []
    rng = RngStreams(uses(), ZEROS)
    torch.manual_seed(0)
    with rng.scope(0, 0):
        other.start()
        other.join(0.05)  # in vain, since it waits for its turn
        one = draw()
    other.join(10)
    with rng.scope(0, 0):
        assert torch.equal(one, draw())
    assert seeds == [wanted]


@pytest.mark.parametrize("itself", [False, True])
def test_stages_walk_back_at_the_same_time_but_where_layers_run_again_in_it(itself: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    dropped = nn.functional.dropout
    y = checkpoint(dropped, x, use_reentrant=False).exp() if itself else dropped(x).exp()
    rng, meeting, alone = RngStreams(uses(), ZEROS), threading.Barrier(2), list[bool]()

    def walk(stage: int) -> None:
        with rng.backward(stage, lambda: [y.grad_fn]):
            try:
                meeting.wait(0.1 if itself else 10)
                alone.append(False)
            except threading.BrokenBarrierError:
                alone.append(True)

    at_once(walk, 2)
    assert alone == [itself] * 2


def test_quiet_stages_do_not_wait_for_each_other_nor_for_one_that_draws() -> None:
    known = uses(3)
    rng = RngStreams(known, dict.fromkeys(range(3), 0))
    for number, stage in enumerate([draw, nothing, nothing]):
        with rng.scope(number, 0):
            stage()
    assert rng.settle()
    rng = RngStreams(known, dict.fromkeys(range(3), 0))
    meeting = threading.Barrier(3)

    def meet(number: int) -> None:
        with rng.scope(number, 0):
            meeting.wait(10)

    at_once(meet, 3)
    assert not meeting.broken


def test_processes_that_agree_on_a_seed_stay_alike() -> None:
    """Each uses the agreed numbers, and its generator advances if a stage of any process drew."""
    found = []
    for other_drew in (True, False):
        torch.rand(2)  # other callers' states
        agreed = draw_seed(generators([torch.device("cpu")]))
        assert torch.equal(torch.get_rng_state(), agreed.before[0])
        rng = RngStreams(uses(), ZEROS, agreed)
        found.append(forward(rng, [draw if other_drew else nothing, nothing], ALL))
        assert rng.settle(RngVote.of([rng.vote(), RngVote(drew=other_drew, surprised=False)]))
        assert torch.equal(torch.get_rng_state(), (agreed.after if other_drew else agreed.before)[0])
        again = forward(RngStreams(uses(), ZEROS, agreed), [draw if other_drew else nothing, nothing], ALL)
        assert all(torch.equal(found[-1][at], again[at]) for at in ALL)


def test_a_quiet_process_advances_with_the_others() -> None:
    known = uses()
    assert RngStreams(known, ZEROS).settle()
    agreed = draw_seed(generators([torch.device("cpu")]))
    rng = RngStreams(known, ZEROS, agreed)
    forward(rng, [nothing, nothing], ALL)
    assert rng.settle(RngVote(drew=True, surprised=False))
    assert torch.equal(torch.get_rng_state(), agreed.after[0])
