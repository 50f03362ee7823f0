"""Trainers of the digits that work at the same time, each over its own connections: the job of `survive_digits`.

    trainer: stem, router and head of its own ──┐  8 for each model: their messages meet at its experts, which step
    trainer: stem, router and head of its own ──┼── proxy or not ──> server: 2 of the model's 4 experts
    ...                                         └── proxy or not ──> server: the 2 others

Every call is timed: how long after its deadline did it end?
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

import torch

from benchmarks.experts.survive_model import GRID, WIDTH, Classifier, Labelled, accuracy, digit_expert, loss_of
from tests.experts.faulty_proxy import FaultyProxy, NetworkFaults
from torchweft.experts import ExpertBackend
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import DeadlineError, LostError, UnreachableError
from torchweft.experts.journal import Journal
from torchweft.experts.mixture import RemoteSwitchMixtureOfExperts
from torchweft.experts.server import Server

SERVERS = (((0, 0), (1, 1)), ((0, 1), (1, 0)))
"""Places in the grid of each server's experts: of the two best of a sample, one is at each."""
_LEAST = 1024  # bytes: what carries tensors has more, what HTTP/2 says to itself has less
_FAULTS = (DeadlineError, LostError, UnreachableError)
_LEASE = 3600.0
T = TypeVar("T")
_DRAWING = threading.Lock()  # torch has one generator
_BESIDE = 16  # rows of a call of one expert


@dataclass(frozen=True)
class Setting:
    """Size of the training, number of trainers, and their timeouts. ``mean``: seconds that a message is late.

    ``timeout``: seconds of either direction of a mixture, and of a call of one expert. ``after``: seconds that the
    second expert of a sample is waited for.

    ``loss``: how likely it falls silent; so that, with what its connection carries then, one call in ten is lost.
    ``rate`` falls to nothing by the last step; ``experts_rate`` stays, for experts know of no last step.
    """

    folds: int = 4
    trainers: int = 8
    steps: int = 40
    rows: int = 128
    rate: float = 1e-2
    experts_rate: float = 1e-3
    mean: float = 1.0
    loss: float = 0.028
    timeout: float = 10.0
    after: float = 3.0

    @property
    def network_faults(self) -> NetworkFaults:
        """Of the network."""
        return NetworkFaults(late=self.mean, silent=self.loss, silent_seconds=3 * self.mean, least=_LEAST)


@dataclass
class Punctual:
    """Outcomes of calls, by kind, and the longest delay after their deadlines."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    latest: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def timed(self, kind: str, seconds: float, call: Callable[[], T]) -> T:
        """The call's result, within so many seconds. The work around it counts as its own time."""
        start, fault = time.monotonic(), ""
        try:
            return call()
        except Exception as error:
            fault = type(error).__name__
            raise
        finally:
            late = time.monotonic() - start - seconds
            with self.lock:
                self.kinds[kind] += 1
                self.failed.update([fault] if fault else [])
                self.latest[kind] = max(late, self.latest.get(kind, late))


def classifier(number: int, connections: Connections, setting: Setting) -> Classifier:
    """A model of this fold."""
    middle = RemoteSwitchMixtureOfExperts(
        in_features=WIDTH,
        grid_size=GRID,
        uid_prefix=f"fold{number}",
        connections=connections,
        k_best=2,
        k_min=1,
        backward_k_min=1,
        allow_zero_outputs=True,
        jitter_eps=0.0,
        forward_timeout=setting.timeout,
        backward_timeout=setting.timeout,
        timeout_after_k_min=setting.after,
    )
    return Classifier(middle)


@dataclass
class Trained:
    """Results. ``asked``: messages with tensors that went out; ``lost``: those, and answers, that vanished.

    ``accuracies``: percent of the images held out, by trainer. ``steps`` of all experts, ``journalled`` batches of
    theirs, ``keys`` in those, and how many of them are there more than once (``twice``).
    """

    calls: Punctual = field(default_factory=Punctual)
    accuracies: list[float] = field(default_factory=list[float])
    losses: list[list[float]] = field(default_factory=list[list[float]])
    strange: list[BaseException] = field(default_factory=list[BaseException])
    asked: int = 0
    lost: int = 0
    steps: int = 0
    journalled: int = 0
    keys: int = 0
    twice: int = 0
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """In the mean."""
        return fmean(self.accuracies)


def trained(setting: Setting, data: Sequence[Labelled], *, bad: bool, seed: int) -> Trained:
    """Every fold, by its trainers, all at once: over a bad network, or a good one. ``seed``: of batches and network."""
    with TemporaryDirectory() as folder:
        return _trained(setting, data, folder, bad=bad, seed=seed)


def _trained(setting: Setting, data: Sequence[Labelled], folder: str, *, bad: bool, seed: int) -> Trained:
    uids = [[f"fold{fold}.{row}.{column}" for fold in range(len(data)) for row, column in each] for each in SERVERS]
    journals = {uid: Journal(Path(folder, uid)) for each in uids for uid in each}
    experts = [[_expert(uid, journals[uid], setting) for uid in each] for each in uids]
    with ExitStack() as stack:
        for journal in journals.values():
            stack.enter_context(journal)
        straight = [stack.enter_context(Server(each)).address for each in experts]
        networks = [
            FaultyProxy(each, setting.network_faults, seed=10 * seed + n) for n, each in enumerate(straight) if bad
        ]
        ways = [stack.enter_context(each).address for each in networks] or straight
        found = Trained()
        learning = _Learning(found, setting, data, _directory(stack, uids, ways), seed)
        learning.run()
        past = stack.enter_context(Connections(_directory(stack, uids, straight)))
        found.accuracies += [100 * each for each in learning.accuracies(past)]
    found.asked, found.lost = sum(each.asked for each in networks), sum(each.lost for each in networks)
    found.steps = sum(expert.steps for each in experts for expert in each)
    for journal in journals.values():
        entries = journal.entries()
        keys = Counter((member.client, member.key) for entry in entries for member in entry.members)
        found.journalled, found.keys = found.journalled + len(entries), found.keys + len(keys)
        found.twice += sum(count > 1 for count in keys.values())
    return found


def _expert(uid: str, journal: Journal, setting: Setting) -> ExpertBackend:
    seed = sum(map(ord, uid))  # what one fold's experts begin with differs
    adam = partial(torch.optim.Adam, lr=setting.experts_rate)
    return digit_expert(WIDTH, seed).backend(uid, adam, journal=journal, max_batch_size=setting.rows)


def _directory(stack: ExitStack, uids: Sequence[Sequence[str]], addresses: Sequence[str]) -> LocalDirectory:
    directory = LocalDirectory()
    stack.callback(directory.close)
    for each, address in zip(uids, addresses, strict=True):
        directory.declare(each, address, _LEASE)
    return directory


@dataclass
class _Learning:
    """The threads of a training, and the models that they learned, with the number of their fold."""

    found: Trained
    setting: Setting
    data: Sequence[Labelled]
    directory: LocalDirectory
    seed: int
    models: list[tuple[int, Classifier]] = field(default_factory=list[tuple[int, Classifier]])

    def run(self) -> None:
        """Until all steps are done."""
        start, self._over = time.monotonic(), threading.Event()
        folds, each = range(len(self.data)), range(self.setting.trainers)
        trainers = [threading.Thread(target=self._guarded, args=(self._train, fold, n)) for fold in folds for n in each]
        beside = [threading.Thread(target=self._guarded, args=(self._ask_one, fold, 0)) for fold in folds]
        for thread in [*trainers, *beside]:
            thread.start()
        for thread in trainers:
            thread.join()
        self._over.set()
        for thread in beside:
            thread.join()
        self.found.seconds = time.monotonic() - start

    def accuracies(self, connections: Connections) -> list[float]:
        """Of each trainer's model, with the experts as they are in the end, asked over these connections."""
        seen: list[float] = []
        for fold, model in self.models:
            straight = classifier(fold, connections, self.setting)
            straight.load_state_dict(model.state_dict())
            seen.append(accuracy(straight.eval(), self.data[fold]))
        return seen

    def _guarded(self, work: Callable[[int, int, Connections], None], fold: int, number: int) -> None:
        try:
            with Connections(self.directory) as connections:
                work(fold, number, connections)
        except BaseException as error:
            self.found.strange.append(error)

    def _train(self, fold: int, number: int, connections: Connections) -> None:
        setting, calls, data = self.setting, self.found.calls, self.data[fold]
        model, losses = self._begun(fold, number, connections), list[float]()
        optimizer = torch.optim.Adam(model.parameters(), lr=setting.rate)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, setting.steps)
        draw = torch.Generator().manual_seed(1000 * self.seed + 100 * fold + number)
        for _ in range(setting.steps):
            rows = torch.randint(len(data.images), (setting.rows,), generator=draw)
            learn = partial(loss_of, model, data.images[rows], data.digits[rows])
            whole, loss = calls.timed("forward", setting.timeout, learn)
            optimizer.zero_grad()
            calls.timed("backward", setting.timeout, partial(torch.autograd.backward, whole))
            optimizer.step()
            falling.step()
            losses.append(loss.item())
        self.models.append((fold, model))
        self.found.losses.append(losses)
        with calls.lock:
            calls.failed.update(cast("RemoteSwitchMixtureOfExperts", model.middle).statistics().failed)

    def _begun(self, fold: int, number: int, connections: Connections) -> Classifier:
        with _DRAWING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 * fold + number)
            return classifier(fold, connections, self.setting)

    def _ask_one(self, fold: int, _: int, connections: Connections) -> None:
        """Calls of one expert after the other. Their errors go to the caller."""
        x, seconds = torch.zeros(_BESIDE, WIDTH), self.setting.timeout
        places = [place for each in SERVERS for place in each]
        experts = [RemoteExpert(f"fold{fold}.{row}.{column}", connections, timeout=seconds) for row, column in places]
        for expert in cycle(experts):
            if self._over.is_set():
                return
            with torch.no_grad(), suppress(*_FAULTS):
                self.found.calls.timed("expert", seconds, partial(expert, x))
