"""A pipe with split= over processes has the outputs and gradients of the model itself."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pipeline.processes import splitting
from tests.pipeline.processes.launch import Ranks
from tests.pipeline.split.test_zoo import needs_transformers
from torchweft.pipeline.processes.collective_forward import CollectiveCalls
from torchweft.pipeline.processes.links import Links
from torchweft.pipeline.processes.rank_executor import Channel

Find = Callable[[int], Ranks]
pytestmark = pytest.mark.filterwarnings("ignore")

HERE = ["unet", *(pytest.param(name, marks=needs_transformers) for name in splitting.FAMILIES if name != "unet")]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", HERE)
def test_any_model_trains_over_ranks_as_plain(ranks: Find, name: str, schedule: str, size: int) -> None:
    results = ranks(size).run(splitting.train_beside_plain, name, schedule, size == 3, seconds=120.0)
    keys = [key for result in results for key in result["keys"]]
    assert sorted(keys) == sorted(results[0]["all"])
    assert all(result["keys"] for result in results)
    assert max(result["worst"] for result in results) <= 1e-12


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", splitting.MODELS)
def test_code_between_blocks_computes_the_same(ranks: Find, name: str, size: int) -> None:
    results = ranks(size).run(splitting.compare_small, name)
    assert sorted(key for result in results for key in result["keys"]) == results[0]["all"]
    assert max(result["worst"] for result in results) <= 1e-13
    calls = results[0]["calls"]
    # The model counts each micro-batch of the loop. The pipe counts its five steps, as the undivided model would.
    calls |= {"calls": 5.0} if "calls" in calls else {}
    assert calls.items() >= results[0]["buffers"].items()
    if name == "branches":
        assert results[0]["recordings"] == results[1]["recordings"] > 2


def test_stages_recompute_and_keep_the_output(ranks: Find) -> None:
    results = ranks(2).run(splitting.compare_small, "parameters between blocks", "always", "last")
    assert max(result["worst"] for result in results) <= 1e-13


@needs_transformers
def test_ranks_with_several_stages_train_as_plain(ranks: Find) -> None:
    results = ranks(2).run(splitting.train_beside_plain, "gpt2", "interleaved", True)
    assert max(result["worst"] for result in results) <= 1e-12


@pytest.mark.long
@pytest.mark.parametrize("name", HERE[:3])
def test_parameters_on_meta_go_where_a_sample_uses_them(ranks: Find, name: str) -> None:
    results = ranks(2).run(splitting.train_beside_plain, name, "gpipe", True, True)
    assert sorted(key for result in results for key in result["keys"]) == sorted(results[0]["all"])
    assert max(result["worst"] for result in results) <= 1e-12


def test_a_sample_that_needs_weights_is_left_out(ranks: Find) -> None:
    for result in ranks(2).run(splitting.load_where_the_sample_fails):
        assert any("the sample was not used" in words for words in result["words"])
        assert "on the meta device; load them" in result["error"]
        assert result["worst"] <= 1e-13


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shift", "recorded different programs.*begin to differ at add"),
        ("late", "recorded different programs.*begin to differ at add"),
        ("rise", "recorded different programs.*begin to differ at mul"),
        ("swap", "forward.. takes another path on each rank"),
        ("hidden", "and its recorded program compute different values; the first value that differs"),
    ],
)
def test_programs_that_differ_are_rejected_everywhere(ranks: Find, kind: str, words: str) -> None:
    for name, text, worst in ranks(2).run(splitting.fail_apart, kind):
        assert name == "SplitError" and re.search(words, text), text
        assert worst <= 1e-6


@pytest.mark.parametrize("wrong", ["borrower", "owner"])
def test_a_wrongly_lent_parameter_is_an_error(ranks: Find, wrong: str) -> None:
    for errors in ranks(2).run(splitting.borrow_wrongly, wrong):
        assert [name for name, _ in errors] == ["SplitError"] * 2, errors
        assert re.search(r"reads scales\.\d, but rank 0 lent scales\.\d for it", errors[0][1])
        assert re.search(r"reads 2\.(weight, .* 0\.bias or 2\.bias|bias, .* 0\.weight or 2\.weight) for", errors[1][1])


def test_ranks_agree_on_an_automatic_split(ranks: Find) -> None:
    (one, worst), (other, other_worst) = ranks(2).run(splitting.cut_automatically)
    assert one == other and len(one) == 1
    assert max(worst, other_worst) <= 1e-13


def test_recordings_see_present_values_of_buffers(ranks: Find) -> None:
    for worst, recordings in ranks(2).run(splitting.count_in_a_buffer):
        assert worst <= 1e-13 and recordings == 10


def test_uneven_shares_without_a_sample_are_told(ranks: Find) -> None:
    (words,), others = ranks(2).run(splitting.own_unevenly)
    assert "in bytes: rank 0 336, rank 1 168" in words and "sample=" in words and others == []


def test_a_counter_of_several_ranks_is_rejected(ranks: Find) -> None:
    for text in ranks(2).run(splitting.share_a_counter):
        assert re.search(r"buffers that a step writes to.*third\.seen, on the ranks \[0, 1\]", text, re.S)


def test_state_that_is_read_before_a_write_is_rejected(ranks: Find) -> None:
    for text in ranks(2).run(splitting.read_then_count):
        assert "reads state that forward() writes to afterwards" in text


def test_ranks_drop_the_same_programs(ranks: Find) -> None:
    for calls in ranks(2).run(splitting.drop_programs):
        assert max(worst for worst, _, _ in calls) <= 1e-13
        assert [recordings for _, recordings, _ in calls] == [1, 2, 3, 4, 4]
        assert max(kept for _, _, kept in calls) <= 3


@pytest.mark.parametrize(("block", "recordings"), [("tanh", 2), ("pads", 5)])
def test_programs_of_other_lengths_are_derived_on_all_ranks(ranks: Find, block: str, recordings: int) -> None:
    for worst, count in ranks(2).run(splitting.train_on_lengths, block):
        assert worst <= 1e-13 and count == recordings


def test_replaced_parameters_are_read_by_other_stages(ranks: Find) -> None:
    assert max(ranks(2).run(splitting.replace_parameters)) <= 1e-13


def test_an_error_while_recording_reaches_all_ranks(ranks: Find) -> None:
    (one, text, worst), (other, _, other_worst) = ranks(2).run(splitting.raise_in_a_block)
    assert (one, other) == ("RankFailedError", "ArithmeticError") and "a poisoned row" in text
    assert max(worst, other_worst) <= 1e-13


def exchange_late() -> list[Any]:
    """The contents of all ranks, where the first rank sends last."""
    links = Links(dist.group.WORLD)
    channel, calls = Channel(links), CollectiveCalls(links.rank, torch.device("cpu"))
    calls.set_channel(channel)
    channel.open("the exchange")
    time.sleep(0.0 if links.rank else 0.5)
    contents = calls.exchange_contents(links.rank)
    channel.walk.agree(None)
    links.close()
    return contents


def test_an_exchange_keeps_the_content_of_every_rank(ranks: Find) -> None:
    assert ranks(3).run(exchange_late) == [[0, 1, 2]] * 3
