"""Invalid configurations of a server: each error says where the fault is, and nothing is left open."""

import os
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.expert_cases import work
from tests.experts.server.server_cases import access_of, backend_of
from torchweft.cli import main
from torchweft.core.errors import UsageError
from torchweft.experts.errors import GradientError
from torchweft.experts.gradients import Guards
from torchweft.experts.graph_cache import GraphBudget
from torchweft.experts.registry import ExpertFactory, register_expert
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server.auth import Grant, Role
from torchweft.experts.server.config import ExpertTable, PanelTable, ServeConfig, build

EXPERT: dict[str, Any] = {"name": "a", "kind": "ffn", "arguments": {"hidden": 8}}
GOOD: dict[str, Any] = {"address": "127.0.0.1:0", "experts": [EXPERT]}
TABLES = ["options", "limits", "tls", "directory_tls", "replicas", "tokens"]
LISTS = ["experts", "grants", "imports"]


@register_expert("zz-spoiled")
def failing_kind(hidden: int) -> ExpertFactory:
    raise RuntimeError("no such device")


def refusal_of(config: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        build(config)
    text = str(caught.value)
    assert text.startswith("invalid configuration of the server:\n  - ")
    return text


def expert(**more: Any) -> dict[str, Any]:
    return {**GOOD, "experts": [{**EXPERT, **more}]}


def replicas(**more: Any) -> dict[str, Any]:
    return {"directory": "local", "replicas": more}


def adam(**arguments: Any) -> dict[str, Any]:
    return {"optimizer": "Adam", "optimizer_arguments": arguments}


def scheduled(name: str, **arguments: Any) -> dict[str, Any]:
    return {"optimizer": "SGD", "schedule": name, "schedule_arguments": arguments}


def test_wrong_type_is_reported_with_its_name(subtests: pytest.Subtests) -> None:
    for wrong, name in product([5, True, "x", 1.5], [*TABLES, *LISTS]):
        with subtests.test(wrong=wrong, name=name):
            seen = f"of type {type(wrong).__name__}" if name in ("tokens", "replicas") else repr(wrong)
            kind = "table" if name in TABLES else "valid list"
            assert f"{name} is {seen}, wanted a {kind}" in refusal_of({**GOOD, name: wrong})
    for wrong, name in product([5, True, "x", [1]], ["experts", "grants"]):
        with subtests.test(wrong=wrong, name=name):
            assert f"{name}[0] is {wrong!r}, wanted a table" in refusal_of({**GOOD, name: [wrong]})


def test_every_table_reports_invalid_values(subtests: pytest.Subtests) -> None:
    for more, words in [
        ({"grants": [{"role": ["train"]}]}, ["grants[0].role is ['train']"]),
        ({"grants": [{"role": 1}, {"role": "king"}]}, ["grants[0].role is 1", "'king'"]),
        ({"experts": []}, ["no experts"]),
        ({"adress": "x", "options": {"conections": 1}, "limits": {"frames": 1}}, ["adress", "conections", "frames"]),
        ({"tls": {"cert": "x"}, "keep": "three"}, ["cert", "'three'"]),
        ({"imports": [5, ""]}, ["imports[0] is 5", "imports[1] is ''"]),
        ({"imports": [".x"]}, ["imports", "'.x'", "full name"]),
        ({"tls": {}}, ["tls has no key", "tls has no certificate"]),
        ({"tls": {"key": "/x"}}, ["tls has no certificate"]),
        ({"tls": {"key": 4, "certificate": 5}}, ["tls.key is 4", "tls.certificate is 5"]),
        ({"directory": "etcd://a:1", "directory_tls": {"key": "/x"}}, ["directory_tls: a key goes"]),
        ({"directory": "etcd://a:1", "directory_tls": {"key": 1}}, ["directory_tls.key is 1"]),
        ({"directory": "zk://a"}, ["directory: ", "zk://a"]),
        ({"limits": {"frame_bytes": "1"}}, ["limits.frame_bytes is '1'"]),
        ({"limits": {"frame_bytes": 1e6}}, ["limits.frame_bytes is 1000000.0"]),
        ({"limits": {"frame_bytes": 1 << 31}}, ["frame_bytes is 2147483648, the format allows at most"]),
        ({"limits": {"calls": 0}, "options": {"connections": 0}}, ["limits: calls is 0", "options: connections is 0"]),
        ({"keep": 0, "checkpoints": "x"}, ["keep is 0"]),
        ({"checkpoints": ""}, ["checkpoints is ''"]),
        ({"checkpoints": "a\0b"}, ["checkpoints: ", "null byte"]),
        ({"checkpoints": "/dev/null"}, ["checkpoints: ", "/dev/null"]),
        ({"checkpoints": "/dev/null/x"}, ["checkpoints: ", "/dev/null"]),
        ({"keep": 3}, ["[keep] and no checkpoints"]),
        ({"advertise": "a:1"}, ["advertise= and no directory"]),
        ({"directory_tls": {}}, ["[directory_tls] and no directory"]),
        ({"replicas": {}}, ["[replicas] and no directory"]),
        ({"advertise": "not an address", "directory": "local"}, ["advertise is 'not an address'"]),
        ({"advertise": "", "directory": "local"}, ["advertise is ''"]),
        ({"address": "127.0.0.1:70000", "panel": "x"}, ["address is '127.0.0.1:70000'", "panel is 'x'"]),
        ({"tokens": {"a": 5}, "grants": []}, ["tokens has a client that is not text"]),
        ({"tokens": {"a": ""}, "grants": []}, ["tokens: ", "empty"]),
        ({"tokens": {"s3cret\n": "me"}, "grants": []}, ["tokens: ", "of client 'me': token ", "strip()"]),
        ({"tokens": {"s3cret": "me"}}, ["[tokens] and no grants"]),
        (replicas(experts=[5]), ["replicas.experts[0] is 5"]),
        (replicas(experts=[]), ["replicas: experts is []"]),
        (replicas(follow_seconds=-1), ["replicas: follow_seconds is -1.0"]),
        (replicas(tls={"zz": "x"}), ["replicas.tls has 'zz'"]),
        (replicas(tls={"key": "x"}), ["replicas.tls: a key goes with its certificate"]),
    ]:
        with subtests.test(more=more, words=words):
            text = refusal_of({**GOOD, **more})
            for word in words:
                assert word in text
            assert "s3cret" not in text


def test_failed_entry_is_reported_with_its_number(subtests: pytest.Subtests) -> None:
    for more, word in [
        *(({"arguments": {"hidden": wrong}}, "hidden") for wrong in ("8", 8.5, True)),
        ({"arguments": {"hidden": -8}}, "hidden is -8, wanted an int"),
        ({"arguments": {"hiden": 8}}, "ffn(hidden: int"),
        ({"kind": "zebra"}, "zebra"),
        ({"kind": None}, "kind"),
        ({"hidden": 3}, "'hidden'"),
        ({"kind": "zz-spoiled"}, "RuntimeError: no such device (test_config.py:"),
        ({"optimizer": "Optimizer"}, "no optimizer 'Optimizer'"),
        ({"optimizer": "lr_scheduler"}, "no optimizer 'lr_scheduler'"),
        (adam(lr=-1.0), "ValueError: Invalid learning rate: -1.0 (adam.py:"),
        (adam(lr="x"), "TypeError"),
        (adam(lrr=1), "'lrr'"),
        (adam(params=1.0), "'params'"),
        ({"schedule": "StepLR"}, "experts[0]: there is schedule and no optimizer"),
        ({"optimizer": "SGD", "schedule_arguments": {}}, "experts[0]: there is schedule_arguments and no schedule"),
        (scheduled("LRScheduler"), "torch.optim.lr_scheduler has no schedule 'LRScheduler'"),
        (scheduled("Adam"), "no schedule 'Adam'"),
        (scheduled("StepLR"), "step_size"),
        (scheduled("StepLR", optimizer=1), "'optimizer'"),
        (scheduled("ReduceLROnPlateau"), "metrics"),
        ({"guards": {"max_norm": -1}}, "max_norm is -1"),
        ({"guards": {"max_norm": True}}, "experts[0].guards.max_norm is True, wanted a valid number"),
        ({"guards": {"finite": 1}}, "experts[0].guards.finite is 1, wanted a valid boolean"),
        ({"guards": {"finit": True}}, "experts[0].guards has 'finit'"),
        ({"guards": 5}, "experts[0].guards is 5, wanted a table"),
        ({"optimizer_arguments": {"lr": 1.0}}, "experts[0]: there is optimizer_arguments and no optimizer"),
        ({"clip_grad_norm": 1}, "experts[0]: there is clip_grad_norm and no optimizer"),
        ({"optimizer": "SGD", "clip_grad_norm": -1}, "clip_grad_norm is -1.0"),
        *(({"options": {name: 1}}, f"experts[0].options has {name!r}") for name in ("name", "guards", "optimizer")),
        ({"options": {"keep_graphs": True}}, "experts[0].options has 'keep_graphs'"),
        ({"options": {"max_batch_size": 0}}, "max_batch_size is 0"),
        ({"keep_graphs": {"nbytes": 0}}, "nbytes"),
        ({"keep_graphs": {"seconds": "long"}}, "experts[0].keep_graphs has no nbytes"),
        ({"count": 0}, "experts[0].count is 0"),
        ({"count": -1}, "experts[0].count is -1"),
        ({"count": True}, "experts[0].count is True"),
        ({"count": 2}, "{}"),
        ({"name": "f.{}"}, "experts[0]: it is called 'f.{}' and has no count"),
        ({"name": ""}, "name is ''"),
    ]:
        with subtests.test(more=more, word=word):
            text = refusal_of(expert(**more))
            assert word in text and "experts[0]" in text


def test_entry_configures_optimizer_schedule_and_guards() -> None:
    more = {
        "optimizer": "SGD",
        "optimizer_arguments": {"lr": 1.0},
        "schedule": "StepLR",
        "schedule_arguments": {"step_size": 1, "gamma": 0.5},
        "guards": {"max_norm": 3, "finite": False},
    }
    backend = backend_of(build(expert(**more)), "a")
    for size in (1e-3, 1e3):
        done = backend.backward_pool.submit_task(torch.ones(2, 8), torch.full((2, 8), size))
        work(backend)
    with pytest.raises(GradientError, match="norm"):
        done.result(0.0)
    assert backend.optimizer is not None and backend.optimizer.param_groups[0]["lr"] == 0.5 and backend.steps == 1
    backend = backend_of(build(expert(optimizer="SGD", schedule="ConstantLR")), "a")
    assert isinstance(backend.schedule, torch.optim.lr_scheduler.ConstantLR)


def test_docs_list_every_name_of_the_configuration() -> None:
    text = (Path(__file__).parents[3] / "docs" / "experts.md").read_text("utf-8")
    _, _, table = text.partition("Contents of the file")
    tables: list[Any] = [ServeConfig, ExpertTable, PanelTable]
    names = {name for model in tables for name in model.model_fields}
    names |= {field.name for kind in (Guards, GraphBudget, ReplicaOptions, Grant) for field in fields(kind)}
    table = table.partition("\n## ")[0].replace("[", "`").replace("]", "`")
    assert {name for name in names if f"`{name}`" not in table} == set()


def test_faults_of_several_entries_are_reported_together() -> None:
    entries = [{**EXPERT, "kind": "zebra"}, EXPERT, EXPERT, {**EXPERT, "name": "{}", "count": 3, "arguments": {}}]
    config = {**GOOD, "experts": entries, "tokens": {"a": ""}, "grants": [], "directory": "zk"}
    text = refusal_of(config)
    assert text.count("\n") == 6
    for word in ("tokens: ", "directory: ", "experts[0], called 'a': ", "experts[1] has the name 'a'", "experts[3]"):
        assert word in text


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def (", "SyntaxError"),
        ("raise ValueError('boo')", "ValueError: boo"),
        ("import no_such_thing", "no_such_thing"),
    ],
)
def test_a_module_that_fails_says_why(source: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spoiled_kinds.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    text = refusal_of({**GOOD, "imports": ["spoiled_kinds", "no.such.module"]})
    assert word in text and "'spoiled_kinds'" in text and "'no.such.module'" in text


def test_refused_configuration_leaves_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    refusal_of({**GOOD, "checkpoints": str(folder), "directory": "zk"})
    assert not folder.exists()
    assert os.listdir(tmp_path) == []


def test_access_is_open_only_without_grants() -> None:
    def access(**more: Any) -> Any:
        return access_of(build({**GOOD, **more}))

    assert access().role("", "a") is Role.ADMIN
    assert not access(grants=[]).admits("") and not access(grants=[], tokens={"s": "me"}).admits("me")
    some = access(grants=[{"client": "me"}], tokens={"s": "me"})
    assert some.role("me", "a") is Role.TRAIN and not some.admits("")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--expert", "a=ffn:hidden=8", "--lr", "0.1"], "--optimizer"),
        (["--optimizer", "SGD"], "--expert"),
        (["--lr", "0.1"], "--expert"),
        ([], "no experts"),
        (["--expert", "a=ffn:hidden=-8"], "hidden is -8"),
        (["--expert", "a=ffn:hidden=8", "--address", "127.0.0.1:70000"], "address is '127.0.0.1:70000'"),
    ],
)
def test_misuse_of_the_command_ends_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *words])
    assert stop.value.code == 2 and said in capsys.readouterr().err
