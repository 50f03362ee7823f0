"""Faults that experts on a server survive: hostile clients, crowds, lost replies, crashes. Each line is a promise.

survive_hostile.py    broken requests                 survive_crowd.py      cancelled, idle, slow, vanished
survive_fuzz.py       bytes broken at random          survive_crash.py      SIGKILL, and the disk
survive_replies.py    replies that are lost           survive_network.py    delays, cuts, silence
survive_gradients.py  NaN, infinity, huge, raising    survive_directory.py  etcd away for a minute, where there is one
survive_keys.py       many remembered requests        survive_attack.py     attacks of a stranger and a neighbour
survive_owner.py      an owner that is stopped
survive_digits.py     the digits over a lossy network, by the trainers of survive_learners.py
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
)
from benchmarks.experts.survive_common import Verdict
from benchmarks.experts.survive_crash import Killing, disk_crashes
from benchmarks.harness import progress
from benchmarks.table import Table

KILL_SECONDS = 90.0


def run(quick: bool) -> Table:
    """A row for each fault."""
    times = {name: counts[quick] for name, counts in _TIMES.items()}
    found: list[Verdict] = []
    with ExitStack() as stack:
        killing = Killing(stack, sys.executable)  # it imports while the others run
        gc.freeze()  # as `torchweft serve` does: a full collection of what torch is stops all threads for 0.2 to 0.4 s
        stack.callback(gc.unfreeze)
        progress("bytes broken at random")
        found.append(survive_fuzz.fuzzed(times["fuzz"]))
        progress("broken requests among good ones")
        found.append(survive_hostile.among_good_ones(times["broken"]))
        progress("bad gradients")
        found += survive_gradients.refused(times["gradients"])
        progress("submit and cancel")
        found += survive_crowd.cancelled(times["cancel"])
        progress("clients that vanish")
        found.append(survive_crowd.vanished(times["vanish"]))
        progress("idle connections and slow readers")
        found += survive_crowd.crowded(times["idle"], times["slow"], times["calls"])
        progress("a stranger and a neighbour who attack")
        found.append(survive_attack.attacked(times["attack"]))
        progress("lost replies")
        found += [survive_replies.dropped(times["drop"]), survive_replies.cut(times["cut"])]
        progress("a bad network")
        found += [survive_network.rough(times["rough"]), survive_network.in_a_hurry(times["hurry"])]
        found += [survive_network.silent(times["silent"])] if times["silent"] else []
        found += survive_digits.learned(quick)
        progress("many remembered requests")
        found.append(survive_keys.many_keys(times["keys"], times["saving"], times["starts"]))
        progress("a directory that is away")
        found += survive_directory.away(times["away"]) if times["away"] else []
        progress("an owner that is stopped")
        found += survive_owner.stopped(times["stopped"], 3.0) if times["stopped"] else []
        progress("crashes of the disk")
        found.append(disk_crashes(times["disk"]))
        progress("SIGKILL")
        found.append(killing.run(times["kill"], KILL_SECONDS))
    return Table("What experts behind a server survive", [each.row() for each in found])


_TIMES = {
    "fuzz": (1_000_000, 1_000),
    "broken": (10_000, 60),
    "gradients": (1_000, 20),
    "cancel": (100_000, 1_000),
    "vanish": (100, 4),
    "idle": (1_000, 20),
    "slow": (10, 2),
    "calls": (3_000, 100),
    "attack": (3_000, 40),
    "drop": (10_000, 100),
    "cut": (100, 2),
    "rough": (2_000, 20),
    "hurry": (500, 8),
    "silent": (2, 0),
    "keys": (100_000, 1_000),
    "saving": (65, 2),
    "starts": (3, 1),
    "away": (60, 0),
    "stopped": (10, 0),
    "disk": (5, 1),
    "kill": (200, 2),
}
"""How often each fault occurs: in a whole run, and in a quick one."""
