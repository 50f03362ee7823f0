"""Faults that experts on a server must survive. Each row of the table checks one promise.

survive_hostile.py    malformed requests              survive_crowd.py      cancelled, idle, slow and vanished clients
survive_fuzz.py       random corruption of messages   survive_crash.py      SIGKILL, and crashes of the disk
survive_replies.py    lost replies                    survive_network.py    delays, cuts, silence
survive_gradients.py  NaN, infinite, huge, raising    survive_directory.py  etcd unavailable for a minute, if installed
survive_keys.py       many remembered requests        survive_attack.py     attacks with and without a token
survive_owner.py      a stopped owner                 survive_stages.py     killed trainers, commits in two phases
survive_digits.py     training on digits over a lossy network, with the trainers of survive_learners.py
survive_steps.py, survive_common.py  shared code
"""

import gc
import sys
from contextlib import ExitStack

from benchmarks.experts import (
    survive_attack,
    survive_crowd,
    survive_digits,
    survive_directory,
    survive_fuzz,
    survive_gradients,
    survive_hostile,
    survive_keys,
    survive_network,
    survive_owner,
    survive_replies,
    survive_stages,
)
from benchmarks.experts.survive_common import Verdict
from benchmarks.experts.survive_crash import Killing, disk_crashes
from benchmarks.harness import progress
from benchmarks.table import Table

KILL_SECONDS = 90.0


def run(quick: bool) -> Table:
    """One row for each fault."""
    times = {name: counts[quick] for name, counts in _TIMES.items()}
    verdicts: list[Verdict] = []
    with ExitStack() as stack:
        killing = Killing(stack, sys.executable)  # starts early, because it imports torch
        gc.freeze()  # as `torchweft serve` does: a full collection over torch's objects takes 0.2 to 0.4 s
        stack.callback(gc.unfreeze)
        progress("randomly corrupted bytes")
        verdicts.append(survive_fuzz.corrupted_messages(times["fuzz"]))
        progress("malformed requests among valid ones")
        verdicts.append(survive_hostile.malformed_requests(times["malformed"]))
        progress("invalid gradients")
        verdicts += survive_gradients.invalid_gradients(times["gradients"])
        progress("submit and cancel")
        verdicts += survive_crowd.cancelled_requests(times["cancel"])
        progress("vanishing clients")
        verdicts.append(survive_crowd.vanished_clients(times["vanish"]))
        progress("idle connections and slow readers")
        verdicts += survive_crowd.idle_and_slow_clients(times["idle"], times["slow"], times["calls"])
        progress("attacks with and without a token")
        verdicts.append(survive_attack.attacks(times["attack"]))
        progress("lost replies")
        verdicts += [survive_replies.dropped_replies(times["drop"]), survive_replies.cut_connections(times["cut"])]
        progress("a bad network")
        verdicts += [survive_network.long_deadlines(times["long"]), survive_network.short_deadlines(times["short"])]
        verdicts += [survive_network.silent_connections(times["silent"])] if times["silent"] else []
        verdicts += survive_digits.training(quick)
        progress("many remembered requests")
        verdicts.append(survive_keys.many_keys(times["keys"], times["saving"], times["starts"]))
        progress("an unavailable directory")
        verdicts += survive_directory.away(times["away"]) if times["away"] else []
        progress("a stopped owner")
        verdicts += survive_owner.stopped_owner(times["stopped"], 3.0) if times["stopped"] else []
        progress("killed trainers of three stages")
        verdicts.append(survive_stages.killed_trainers(times["stages"], 5.0 if times["stages"] > 10 else 1.0))
        progress("crashes while writing checkpoints")
        verdicts.append(disk_crashes(times["disk"]))
        progress("SIGKILL")
        verdicts.append(killing.run(times["kill"], KILL_SECONDS))
    return Table("faults that experts on a server survive", [verdict.row() for verdict in verdicts])


_TIMES = {
    "fuzz": (1_000_000, 1_000),
    "malformed": (10_000, 60),
    "gradients": (1_000, 20),
    "cancel": (100_000, 1_000),
    "vanish": (100, 4),
    "idle": (1_000, 20),
    "slow": (10, 2),
    "calls": (3_000, 100),
    "attack": (3_000, 40),
    "drop": (10_000, 100),
    "cut": (100, 2),
    "long": (2_000, 20),
    "short": (500, 8),
    "silent": (2, 0),
    "keys": (100_000, 1_000),
    "saving": (65, 2),
    "starts": (3, 1),
    "away": (60, 0),
    "stopped": (10, 0),
    "stages": (60, 2),
    "disk": (5, 1),
    "kill": (200, 2),
}
"""Number of faults of each kind: in a full run, and in a quick one."""
