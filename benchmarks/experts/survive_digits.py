"""The digits, learned through a network whose messages are late by a second in the mean, and one call in ten is lost.

    trainers ── proxy ──> server: 2 of the 4 experts     32 threads that wait most of the time; each has connections
             ── proxy ──> server: the 2 others           of its own, so that none is late because another is

As Ryabinin and Gusev tried hivemind's mixture ("Towards Crowdsourced Training ... ", 2020, section 4.2). Each message,
in either direction, is late by a time drawn from an exponential distribution.

A *loss*: TCP loses nothing, it only delivers later, or never again. So one call in ten loses its request or its
answer, as in `FaultyProxy`: that message vanishes, and all that its connection carries in the next seconds, in
both directions, without notice. Then the connection ends, and the client has to find its way back over the slow
network, which takes it two round trips. Messages that carry no tensors (pings, credit) are late but not lost: their
number is not that of calls. How many were lost is counted, and said in the table.

The images are cut in folds, and each is held out from one model: so the accuracy is one of all 1797 images, in the mean
of all trainers. It is compared with the mean of several trainings without faults, by as many trainers in as many steps;
the table also has their spread. There are few steps, because each takes some 9 s, so that training is not finished.
"""

from collections.abc import Sequence
from statistics import fmean

import torch

from benchmarks.experts.sleeper import Sleeper
from benchmarks.experts.survive_common import Verdict
from benchmarks.experts.survive_learners import Setting, Trained, trained
from benchmarks.experts.survive_model import Labelled, load_labelled
from benchmarks.harness import progress

LATE = 0.1
"""Seconds that a call may end after its deadline."""
APART = 0.5
"""Points of accuracy that a network may cost."""
QUICK = Setting(folds=1, trainers=4, steps=6, mean=0.02, timeout=1.0, after=0.1)


def learned(quick: bool) -> list[Verdict]:
    """Two lines: how well, and how punctual."""
    setting, times = (QUICK, 1) if quick else (Setting(), 2)
    data = folds(setting.folds)
    progress("the digits, without faults")
    good = [trained(setting, data, bad=False, seed=seed) for seed in range(times)]
    progress("the digits, over a bad network")
    with Sleeper() as sleeper:
        bad = trained(setting, data, bad=True, seed=times)
    what = f"the digits over a network that is {setting.mean:g} s late and loses one call in ten"
    return [_well(what, setting, good, bad, quick), _punctual(setting, bad, sleeper.latest)]


def folds(many: int) -> list[Labelled]:
    """All images, of which each is held out in one of so many; of a single one, a quarter is."""
    whole = load_labelled(0)
    images, digits = torch.cat([whole.images, whole.held_out]), torch.cat([whole.digits, whole.held_out_digits])
    fold = torch.arange(len(images)) % max(many, 4)
    return [Labelled(images[fold != n], digits[fold != n], images[fold == n], digits[fold == n]) for n in range(many)]


def _well(what: str, setting: Setting, good: Sequence[Trained], bad: Trained, quick: bool) -> Verdict:
    without = [each.accuracy for each in good]
    apart = bad.accuracy - fmean(without)
    return Verdict(
        what,
        f"{setting.folds} models, by {setting.trainers} trainers each, all at once, in {setting.steps} steps",
        f"accuracy at most {APART:g} points below that without faults",
        f"{bad.accuracy:.2f}%, without faults {fmean(without):.2f}% ({min(without):.2f} to {max(without):.2f}): "
        f"{apart:+.2f} points; {bad.lost / max(1, bad.asked):.1%} of the calls lost, {bad.seconds:.0f} s",
        not bad.strange and (quick or apart >= -APART),
    )


def _punctual(setting: Setting, bad: Trained, overslept: float) -> Verdict:
    calls = bad.calls
    kind, latest = max(calls.latest.items(), key=lambda each: each[1])
    many = ", ".join(f"{count} {kind}" for kind, count in sorted(calls.kinds.items()))
    failed = ", ".join(f"{count} {name}" for name, count in calls.failed.most_common())
    raised = "; ".join(repr(each) for each in bad.strange[:3])
    return Verdict(
        "its calls: directions of a mixture, and single experts beside",
        many,
        f"none ends {LATE * 1e3:g} ms after its deadline of {setting.timeout:g} s; each key steps once",
        f"the latest ({kind}) {latest * 1e3:+.0f} ms, a process that only sleeps "
        f"{overslept * 1e3:+.0f} ms; {bad.keys} keys in {bad.journalled} batches, {bad.steps} steps, "
        f"{bad.twice} keys twice; calls that failed: {failed or 'none'}" + f"; raised: {raised}" * bool(raised),
        latest <= LATE and bad.twice == 0 and bad.steps == bad.journalled > 0 and not bad.strange,
    )
