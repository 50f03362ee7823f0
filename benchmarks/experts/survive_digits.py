"""Training on digits over a network with a mean delay of one second per message, which loses one call in ten.

    trainers ── proxy ──> server: 2 of the 4 experts     32 threads that wait most of the time. Each has its own
             ── proxy ──> server: the 2 others           connections, so that a delay of one does not affect another

The setting is that of hivemind's mixture in Ryabinin and Gusev ("Towards Crowdsourced Training ... ", 2020, section
4.2). The delay of each message, in either direction, has an exponential distribution.

TCP does not lose single messages. One call in ten therefore loses its request or answer as in `FaultyProxy`. The proxy
drops that message, and all later messages of its connection in both directions for some seconds. Then the connection
ends, and the client reconnects over the slow network, which takes two round trips. Messages without tensors (pings,
credit) are delayed but not lost, because they are not calls. The table has the share of lost calls.

Each fold of the images is held out from one model, so that the accuracy covers all 1797 images, as a mean over the
trainers. It is compared with the mean of several trainings without faults, with equally many trainers and steps. A step
takes about 9 s, so there are few steps and training does not converge.
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
"""Allowed seconds from the deadline of a call to its end."""
MAX_LOSS = 0.5
"""Allowed loss of accuracy over the network, in percentage points."""
QUICK = Setting(folds=1, trainers=4, steps=6, mean=0.02, timeout=1.0, after=0.1)


def training(quick: bool) -> list[Verdict]:
    """Check the accuracy, and the deadlines of calls."""
    setting, times = (QUICK, 1) if quick else (Setting(), 2)
    data = folds(setting.folds)
    progress("training on digits, without faults")
    reference = [trained(setting, data, bad=False, seed=seed) for seed in range(times)]
    progress("training on digits, over a lossy network")
    with Sleeper() as sleeper:
        bad = trained(setting, data, bad=True, seed=times)
    fault = f"training over a network with a delay of {setting.mean:g} s that loses one call in ten"
    return [_accuracy_verdict(fault, setting, reference, bad, quick), _deadline_verdict(setting, bad, sleeper.latest)]


def folds(count: int) -> list[Labelled]:
    """Split all images into folds. Each image is held out once, or a quarter of them with a single fold."""
    bundled = load_labelled(0)
    images, digits = torch.cat([bundled.images, bundled.held_out]), torch.cat([bundled.digits, bundled.held_out_digits])
    fold = torch.arange(len(images)) % max(count, 4)
    return [Labelled(images[fold != n], digits[fold != n], images[fold == n], digits[fold == n]) for n in range(count)]


def _accuracy_verdict(fault: str, setting: Setting, reference: Sequence[Trained], bad: Trained, quick: bool) -> Verdict:
    accuracies = [result.accuracy for result in reference]
    difference = bad.accuracy - fmean(accuracies)
    return Verdict(
        fault,
        f"{setting.folds} models with {setting.trainers} trainers each, all at once, {setting.steps} steps",
        f"accuracy at most {MAX_LOSS:g} points below that without faults",
        f"{bad.accuracy:.2f}%, without faults {fmean(accuracies):.2f}% ({min(accuracies):.2f} to "
        f"{max(accuracies):.2f}): {difference:+.2f} points; "
        f"{bad.lost / max(1, bad.asked):.1%} of the calls lost, {bad.seconds:.0f} s",
        not bad.strange and (quick or difference >= -MAX_LOSS),
    )


def _deadline_verdict(setting: Setting, bad: Trained, overslept: float) -> Verdict:
    calls = bad.calls
    kind, latest = max(calls.latest.items(), key=lambda item: item[1])
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(calls.kinds.items()))
    failed = ", ".join(f"{count} {name}" for name, count in calls.failed.most_common())
    raised = "; ".join(repr(error) for error in bad.strange[:3])
    return Verdict(
        "its calls: forwards and backwards of the mixture, and calls of single experts",
        counts,
        f"at most {LATE * 1e3:g} ms after the deadline of {setting.timeout:g} s; each key steps once",
        f"the latest ({kind}) {latest * 1e3:+.0f} ms, a process that only sleeps "
        f"{overslept * 1e3:+.0f} ms; {bad.keys} keys in {bad.batches} batches, {bad.steps} steps, "
        f"{bad.twice} keys twice; calls that failed: {failed or 'none'}" + f"; raised: {raised}" * bool(raised),
        latest <= LATE and bad.twice == 0 and bad.steps == bad.batches > 0 and not bad.strange,
    )
