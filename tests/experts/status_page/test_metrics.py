"""Metrics as Prometheus reads them: names, types, labels and numbers."""

import re
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from tests.experts.status_page.panel_cases import NASTY, layer, status, train
from torchweft.experts import statistics
from torchweft.experts.server import Server
from torchweft.experts.status_page.metrics import METRICS, exposition, page_status
from torchweft.experts.status_page.recent import RecentCounters

LABELS = {"expert", "direction", "reason", "kind", "device", "what", "le"}


class Samples(dict[tuple[str, frozenset[str]], float]):
    def __getitem__(self, key: Any) -> float:
        return super().__getitem__((key[0], frozenset(key[1:])))


def samples(current: dict[str, Any]) -> Samples:
    text = exposition(current, "")[0].decode()
    families = text_string_to_metric_families(text)
    return Samples({(s.name, frozenset(s.labels.values())): s.value for family in families for s in family.samples})


def test_numbers_types_and_labels_are_those_of_the_status() -> None:
    before = {family.name for family in REGISTRY.collect()}
    with Server([layer("a"), layer("b")]) as server:
        train(server, "a", 3)
        current = server.status()
    seen = samples(current)
    assert seen["torchweft_expert_steps_total", "a"] == 3.0 and seen["torchweft_expert_steps_total", "b"] == 0.0
    assert seen["torchweft_expert_batches_total", "a", "backward"] == 3.0
    assert seen["torchweft_tasks_answered_total", "a", "forward"] == 3.0
    assert seen["torchweft_batch_rows_total", "a", "backward"] == 9.0
    assert 0.0 < seen["torchweft_tasks_answer_seconds_sum", "a", "backward"] < 60.0
    times = [seen["torchweft_tasks_answer_seconds_bucket", "a", "backward", str((1 << n) / 1000)] for n in range(18)]
    assert times == sorted(times) and times[-1] == seen["torchweft_tasks_answer_seconds_count", "a", "backward"] == 3.0
    assert seen["torchweft_calls_total", "BACKWARD"] == 3.0
    assert seen["torchweft_queue_oldest_age_seconds", "b", "forward"] == 0.0
    assert seen["torchweft_runtime_busy_seconds_total", "cpu"] > 0.0
    buckets = [seen["torchweft_batch_tasks_bucket", "a", "forward", str(float(1 << n))] for n in range(13)]
    assert buckets == [3.0] * 13 == [seen["torchweft_batch_tasks_bucket", "a", "forward", "+Inf"]] * 13
    assert (
        seen["torchweft_batch_tasks_count", "a", "forward"] == seen["torchweft_batch_tasks_sum", "a", "forward"] == 3.0
    )
    assert {family.name for family in REGISTRY.collect()} == before  # no metric is registered globally


def test_every_family_has_help_a_type_and_a_name_with_its_unit() -> None:
    text, kind = exposition(status(), "application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    families = list(open_families(text.decode()))
    assert len(families) > 35
    for family in families:
        assert family.name.startswith("torchweft_") and family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        assert re.fullmatch("[a-z_]+", family.name)
        assert all(set(sample.labels) <= LABELS for sample in family.samples)
        assert all((s.name == f"{family.name}_total") for s in family.samples if family.type == "counter")


def test_every_metric_of_the_table_is_exported_once() -> None:
    parts = [
        part for part in vars(statistics).values() if isinstance(part, type) and part.__name__.endswith("Statistics")
    ]
    assert {metric for part in parts for _, metric in statistics.metrics_of(part)} == METRICS.keys()
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_page_shows_rows_of_the_same_table() -> None:
    shown = page_status(status(connections=3, answered={"PING": 2}), RecentCounters())
    rows = {row["help"]: row["value"] for row in shown["metrics"]}
    assert rows["Open streams"] == 3 and rows["Received calls"] == {"PING": 2}
    assert set(rows) == {metric.help for metric in METRICS if metric.on_page}


def test_directory_and_checkpoints_have_metrics() -> None:
    nasty = samples(status([NASTY, "\udc00", "\udc01", 'a\\b"\n']))  # any name can be a label, and names stay distinct
    assert sum(key[0] == "torchweft_expert_steps_total" for key in nasty) == 4
    assert not any("directory" in key[0] or "durable" in key[0] for key in samples(status()))
    directory = {"here": "", "away_seconds": 2.5, "servers": {"b:2": {"experts": 3, "owns": 2}}}
    current = status(directory=directory, keeping={"a": {"durable": 7, "restored": None}}, failures={"lease": "x"})
    current["replicas"] = {"a": {"role": "follower", "behind": 3, "token": 7}}
    seen = samples(current)
    assert seen["torchweft_replica_behind_steps", "a"] == 3.0 and seen["torchweft_replica_owned", "a"] == 0.0
    assert seen["torchweft_directory_servers",] == 1.0 and seen["torchweft_directory_away_seconds",] == 2.5
    assert seen["torchweft_expert_durable_step", "a"] == 7.0 and seen["torchweft_failing", "lease"] == 1.0
