"""Notebook display of a recording, a schedule, and the plan of a cell."""

import html
from xml.etree import ElementTree

import torch
from torch import nn

from torchweft import Pipe, Recorder, Recurrent, Schedule
from torchweft.pipeline.schedule import one_f_one_b


def test_recording_is_shown_as_a_timeline_and_its_memory() -> None:
    recorder, without = Recorder(memory=True), Recorder()
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
    for observer in (recorder, without):
        with pipe.observed_by(observer):
            pipe(torch.randn(4, 3)).sum().backward()
    pages = [ElementTree.fromstring(observer._repr_html_()).get("srcdoc") or "" for observer in (recorder, without)]
    shown, bare = pages
    assert shown.startswith("<!DOCTYPE html>") and "stage 1" in shown and "forward, stage 0, micro-batch 1" in shown
    assert "alive for backward" in shown and "alive for backward" not in bare
    assert "<svg" in Recorder()._repr_html_().replace("&lt;", "<")


def test_schedule_is_a_table_with_its_bubbles() -> None:
    rows = [[cell.text or "" for cell in row] for row in ElementTree.fromstring(one_f_one_b(2, 2)._repr_html_())]
    assert rows[0][0] == "worker 0"
    assert [row[1:] for row in rows] == [["0F0", "0F1", "", "0B0", "", "0B1"], ["", "1F0", "1B0", "1F1", "1B1", ""]]
    for wrong in (Schedule.parse("0B0,0F0"), Schedule(())):
        ElementTree.fromstring(wrong._repr_html_())


def test_plan_is_text_that_a_notebook_folds() -> None:
    net = Recurrent(nn.GRUCell(3, 4), backend="python", verify="never")
    net(torch.randn(2, 2, 3))
    plan = net.explain()
    assert isinstance(plan, str) and "loop (step by step)" in plan
    shown = ElementTree.fromstring(plan._repr_html_())
    headings = [summary.text or "" for summary in shown.iter("summary")]
    assert any(heading.startswith("loop (step by step)") for heading in headings)
    assert all(html.unescape(line.strip()) in "".join(shown.itertext()) for line in plan.splitlines())
