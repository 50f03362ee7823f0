"""Act three as it is played: who is started, killed and started again, and what everybody is told meanwhile.

    demo ──lines──> server a: 2 experts ──────────────────── SIGKILL
      |──lines──> server b: 2 experts ────────────────────────────────────────────────────>
      |──lines──> server a, again, at another port           └─ from the checkpoints ─────>
      └──lines──> trainers 0 and 1 ── steps ───────────────── 2 experts ────── 4 experts ─>
                  "joined", "begin"                          "left"            "joined"

The demo is the supervisor: it learns of an end as supervisors do, from the end of a process, also where it caused it.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from weft.core.errors import WeftError, listed
from weft.demo import machines_model, machines_server, machines_trainer
from weft.demo.machines_model import SERVERS, UIDS, load_labelled, write_labelled
from weft.demo.machines_processes import Child, Crew
from weft.demo.machines_proof import LIMIT, largest_difference
from weft.demo.machines_story import Stay, Story, Trainer
from weft.demo.stage import ProofError, Stagehand
from weft.experts.client import GrpcTransport

LONGEST = 12.0
"""Seconds that training may take here, whatever the options allow, but for what the return of the experts takes."""
SAVED = 1.0
"""Seconds between two checkpoints."""
_HALF, _AFTER = 0.5, 0.25  # of all steps: before the kill, and at least after the return
_RATE = 1e-3
_PATIENCE = 60.0  # seconds that anything may take before the act gives up
_LAST = 2.0  # seconds of training after the return, where time is short
_LOOK = 0.25  # seconds between two looks at the servers
_TICK = 0.05


def play(hand: Stagehand) -> Story:
    """All of it. Raises ProofError when a claim does not hold, a process fails, or one is not heard of in time."""
    with Crew(hand.options.threads) as crew, ExitStack() as ways:
        return _Play(hand, crew, ways).run()


class _Play:
    def __init__(self, hand: Stagehand, crew: Crew, ways: ExitStack) -> None:
        self._hand, self._crew, self._ways = hand, crew, ways
        self._story = Story([Trainer(f"trainer {number}") for number in range(2)])
        self._trainers: dict[Child, Trainer] = {}
        self._servers: dict[Child, Stay] = {}
        self._transports: dict[str, GrpcTransport] = {}
        self._looked = 0.0
        self._longest = min(hand.options.seconds, LONGEST)

    def run(self) -> Story:
        options, story = self._hand.options, self._story
        digits = self._crew.folder / "digits.pt"
        write_labelled(load_labelled(options.seed), digits)
        story.dead, story.other = (self._serve(f"server {'ab'[i]}", uids) for i, uids in enumerate(SERVERS))
        for number, trainer in enumerate(story.trainers):
            task = {"threads": options.threads, "seed": options.seed, "number": number, "digits": str(digits)}
            self._trainers[self._crew.start(trainer.name, machines_trainer.__name__, task)] = trainer
        self._prove()  # while they start
        self._until("servers and trainers are ready", self._ready)
        story.began = time.monotonic()
        self._tell(do="begin")
        self._until("half of the training is done", self._is_half)
        self._kill()
        self._until("the experts are back", self._is_back)
        self._came_back()
        self._until("the training is done", self._is_done)
        self._finish()
        return story

    # What is done.

    def _prove(self) -> None:
        found = self._story.difference = largest_difference(self._hand.options.seed)
        if not found < LIMIT:
            raise ProofError(f"a gradient of the remote mixture differs by {found:.1e}, more than {LIMIT:g}")
        words = f"largest difference of any gradient from the same mixture here, float64: {found:.1e} (limit {LIMIT:g})"
        self._hand.say(f"  {words}")

    def _serve(self, name: str, uids: tuple[str, ...]) -> Stay:
        """Start a server. It goes on from the checkpoints, if there are any."""
        stay = Stay(name, uids)
        told = {"threads": self._hand.options.threads, "config": _config(self._hand, self._crew, uids)}
        self._servers[self._crew.start(name, machines_server.__name__, told)] = stay
        return stay

    def _kill(self) -> None:
        (child,) = (child for child, stay in self._servers.items() if stay is self._story.dead)
        self._story.killed = child.kill()
        self._hand.say(f"  {self._after(self._story.killed)}: {child.name} is killed (SIGKILL)")

    def _came_back(self) -> None:
        story, back = self._story, self._story.back
        first = back.first
        assert first is not None
        steps = ", ".join(f"{uid} from step {first['keeping'][uid]['restored']}" for uid in back.uids)
        self._hand.say(
            f"  {self._after(story.killed + story.seconds_away)}: its experts answer again, {story.seconds_away:.1f} s "
            f"after the kill, at {back.address}: {steps}"
        )

    def _finish(self) -> None:
        story = self._story
        self._tell(do="finish")
        self._until("the trainers' results are there", lambda: all(t.result is not None for t in story.trainers))
        story.ended = time.monotonic()
        self._look()
        if faults := story.faults():
            raise ProofError(listed("what was trained elsewhere does not add up:", faults))

    # What is waited for.

    def _ready(self) -> bool:
        return all(t.ready for t in self._story.trainers) and all(stay.address for stay in self._servers.values())

    def _is_half(self) -> bool:
        """Something is to be durable, and something more to have happened."""
        status, uids = self._story.dead.last, self._story.dead.uids
        if status is None or not any(status["keeping"][uid]["durable"] for uid in uids):
            return False
        spent = time.monotonic() - self._story.began
        return spent >= _HALF * self._longest or self._fewest() >= _HALF * self._hand.options.steps

    def _is_back(self) -> bool:
        """For both trainers."""
        return all(self._story.back.address in trainer.answered for trainer in self._story.trainers)

    def _is_done(self) -> bool:
        """Enough steps, or enough time, and in both cases some of it with the experts that came back."""
        story, goal = self._story, self._hand.options.steps
        back = story.killed + story.seconds_away
        now = time.monotonic()
        late = now - story.began >= self._longest and now - back >= min(_LAST, _AFTER * self._longest)
        return late or (self._fewest() >= goal and self._fewest(back) >= _AFTER * goal)

    def _fewest(self, since: float = 0.0) -> int:
        return min(sum(at >= since for at, _ in trainer.losses) for trainer in self._story.trainers)

    def _until(self, what: str, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE
        while not is_so():
            if time.monotonic() > end:
                raise ProofError(f"the act waited {_PATIENCE:g} s until {what}, and they are not")
            heard = self._crew.next(_TICK)
            if heard is not None:
                self._hear(*heard)
            if time.monotonic() - self._looked >= _LOOK:
                self._look()
                self._show()

    # What is heard and told.

    def _hear(self, child: Child, words: str | None) -> None:
        if child in self._trainers:
            self._hear_trainer(child, self._trainers[child], words)
        elif words is None:
            self._ended(child, self._servers.pop(child))
        elif " experts at " in words:
            self._serves(self._servers[child], words.rpartition(" ")[2])

    def _hear_trainer(self, child: Child, trainer: Trainer, words: str | None) -> None:
        if words is None:
            raise ProofError(f"a trainer failed: {child.complaints()}")
        told = json.loads(words)
        if told["said"] == "ready":
            trainer.ready = True
        elif told["said"] == "steps":
            trainer.losses += [(at, loss) for at, loss in told["losses"]]
            trainer.checks += [(at, share) for at, share in told["checks"]]
            trainer.answered = told["answered"]
        else:
            trainer.result = told

    def _serves(self, stay: Stay, address: str) -> None:
        stay.address, stay.since = address, time.monotonic()
        self._transports[address] = self._ways.enter_context(GrpcTransport(address))
        first: dict[str, Any] = json.loads(self._transports[address].status())  # before anybody asks it for anything
        stay.first = first
        for uid in stay.uids:  # who comes back falls from what it had reached to what was saved
            points = self._story.steps.setdefault(uid, [])
            points += [(stay.since, value) for _, value in points[-1:]]
            points.append((stay.since, float(first["experts"][uid]["steps"])))
        self._hand.say(f"  {stay.name}: {' and '.join(stay.uids)} at {address}")
        self._tell(do="joined", address=address, uids=stay.uids)

    def _ended(self, child: Child, stay: Stay) -> None:
        story = self._story
        if stay is not story.dead or not story.killed:
            raise ProofError(f"a server ended: {child.complaints()}")
        story.noticed = time.monotonic()
        self._tell(do="left", address=stay.address)
        story.back = self._serve(f"{stay.name}, again", stay.uids)

    def _tell(self, **words: Any) -> None:
        for child in self._trainers:
            child.tell(words)

    def _look(self) -> None:
        """Ask the servers how far they are."""
        for child, stay in list(self._servers.items()):
            if stay.address and child.process.poll() is None:
                try:
                    status: dict[str, Any] = json.loads(self._transports[stay.address].status())
                except WeftError:  # it ends just now, which is heard of soon
                    continue
                stay.last, now = status, time.monotonic()
                for uid in stay.uids:
                    self._story.steps.setdefault(uid, []).append((now, float(status["experts"][uid]["steps"])))
        self._looked = time.monotonic()

    def _show(self) -> None:
        known = [trainer for trainer in self._story.trainers if trainer.losses]
        steps = " and ".join(str(len(trainer.losses)) for trainer in known)
        losses = " and ".join(f"{trainer.losses[-1][1]:.3f}" for trainer in known)
        if known:
            self._hand.progress(f"  steps {steps}   loss {losses}   {time.monotonic() - self._story.began:.0f} s")

    def _after(self, at: float) -> str:
        return f"after {at - self._story.began:.1f} s"


def _config(hand: Stagehand, crew: Crew, uids: tuple[str, ...]) -> dict[str, Any]:
    """A server's, as `weft serve` reads it from a file."""
    experts = [
        {
            "name": uid,
            "kind": machines_model.KIND,
            "arguments": {"hidden": machines_model.WIDTH, "seed": hand.options.seed + UIDS.index(uid)},
            "optimizer": "Adam",
            "optimizer_arguments": {"lr": _RATE},
        }
        for uid in uids
    ]
    return {
        "address": "127.0.0.1:0",  # a port that is free
        "imports": [machines_model.__name__],
        "checkpoints": str(crew.folder / "checkpoints"),
        "options": {"checkpoint_seconds": SAVED},
        "experts": experts,
    }
