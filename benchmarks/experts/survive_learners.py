"""Concurrent trainers for `survive_digits`, each with its own connections.

    trainer: own stem, router and head ──┐  8 trainers per model, which share the experts of the model
    trainer: own stem, router and head ──┼── proxy or not ──> server: 2 of the model's 4 experts
    ...                                  └── proxy or not ──> server: the 2 others

For every call, the time from its deadline to its end is measured.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from statistics import fmean
from typing import TypeVar, cast

import torch

from benchmarks.experts.survive_model import GRID, WIDTH, Classifier, Labelled, accuracy, digit_expert, loss_of
from tests.experts.faulty_proxy import FaultyProxy, NetworkFaults
from torchweft.experts import ExpertBackend
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import DeadlineError, LostError, UnreachableError
from torchweft.experts.mixture import RemoteSwitchMixtureOfExperts
from torchweft.experts.server import Server
from torchweft.experts.task import Answer, Task

SERVERS = (((0, 0), (1, 1)), ((0, 1), (1, 0)))
"""Grid coordinates of each server's experts, so that the two best of a sample are on different servers."""
_MIN_BYTES = 1024  # bytes: messages with tensors are larger, control messages of HTTP/2 are smaller
_FAULTS = (DeadlineError, LostError, UnreachableError)
_LEASE = 3600.0
T = TypeVar("T")
_DRAWING = threading.Lock()  # protects torch's global generator
_SINGLE_ROWS = 16  # rows of a call of one expert


@dataclass(frozen=True)
class Setting:
    """Size of the training, number of trainers, and their timeouts. ``mean`` is the mean delay of a message in seconds.

    ``timeout``: seconds for a forward or backward of the mixture, or a call of one expert. ``after``: seconds to wait
    for the second expert of a sample.

    ``loss``: probability that a message starts a silence of its connection, chosen so that one call in ten is lost.
    ``rate`` decays until the last step. ``experts_rate`` is constant, because experts do not know the last step.
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
        return NetworkFaults(late=self.mean, silent=self.loss, silent_seconds=3 * self.mean, least=_MIN_BYTES)


@dataclass
class CallTimes:
    """Outcomes of calls by kind, and their largest delay after the deadline."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    latest: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def timed(self, kind: str, seconds: float, call: Callable[[], T]) -> T:
        """Run `call`, whose deadline is `seconds` from now, and record its outcome. Local work in it counts too."""
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
    """Model of fold `number`."""
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
    """Results of a training. ``asked``: sent messages with tensors. ``lost``: lost requests and answers.

    ``accuracies``: percent of held-out images, by trainer. ``steps`` are of all experts. ``batches`` counts their
    batches, ``keys`` the keys in these batches, and ``twice`` the keys that occur more than once.
    """

    calls: CallTimes = field(default_factory=CallTimes)
    accuracies: list[float] = field(default_factory=list[float])
    losses: list[list[float]] = field(default_factory=list[list[float]])
    strange: list[BaseException] = field(default_factory=list[BaseException])
    asked: int = 0
    lost: int = 0
    steps: int = 0
    batches: int = 0
    keys: int = 0
    twice: int = 0
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """Mean accuracy."""
        return fmean(self.accuracies)


def trained(setting: Setting, data: Sequence[Labelled], *, bad: bool, seed: int) -> Trained:
    """Train all folds concurrently. ``bad`` adds network faults, ``seed`` seeds batches and faults."""
    uids = [[f"fold{fold}.{row}.{column}" for fold in range(len(data)) for row, column in places] for places in SERVERS]
    experts = [[_expert(uid, setting) for uid in served] for served in uids]
    applied = {uid: _Applied() for served in uids for uid in served}
    with ExitStack() as stack:
        for served in experts:
            for expert in served:
                expert.observe(applied[expert.name])
        direct = [stack.enter_context(Server(served)).address for served in experts]
        proxies = [
            FaultyProxy(address, setting.network_faults, seed=10 * seed + n) for n, address in enumerate(direct) if bad
        ]
        addresses = [stack.enter_context(proxy).address for proxy in proxies] or direct
        result = Trained()
        learning = _Learning(result, setting, data, _directory(stack, uids, addresses), seed)
        learning.run()
        connections = stack.enter_context(Connections(_directory(stack, uids, direct)))
        result.accuracies += [100 * share for share in learning.accuracies(connections)]
    result.asked, result.lost = sum(proxy.asked for proxy in proxies), sum(proxy.lost for proxy in proxies)
    result.steps = sum(expert.steps for served in experts for expert in served)
    for found in applied.values():
        result.batches, result.keys = result.batches + found.batches, result.keys + len(found.keys)
        result.twice += sum(count > 1 for count in found.keys.values())
    return result


class _Applied:
    """An observer of one expert, which counts the batches of backwards that counted, and the keys in them."""

    def __init__(self) -> None:
        self.batches = 0
        self.keys: Counter[tuple[str | None, str | None]] = Counter()

    def process(
        self, process: Callable[[Sequence[Task]], Sequence[Answer]], pool: str, tasks: Sequence[Task]
    ) -> Sequence[Answer]:
        answers = process(tasks)
        if pool.endswith(".backward"):
            self.batches += 1
            pairs = zip(tasks, answers, strict=True)
            self.keys.update((task.client, task.key) for task, answer in pairs if not isinstance(answer, BaseException))
        return answers

    def step_span(self, expert: str, step: int) -> AbstractContextManager[None]:
        return nullcontext()


def _expert(uid: str, setting: Setting) -> ExpertBackend:
    seed = sum(map(ord, uid))  # initial weights differ between experts and folds
    adam = partial(torch.optim.Adam, lr=setting.experts_rate)
    return digit_expert(WIDTH, seed).backend(uid, adam, max_batch_size=setting.rows)


def _directory(stack: ExitStack, uids: Sequence[Sequence[str]], addresses: Sequence[str]) -> LocalDirectory:
    directory = LocalDirectory()
    stack.callback(directory.close)
    for served, address in zip(uids, addresses, strict=True):
        directory.declare(served, address, _LEASE)
    return directory


@dataclass
class _Learning:
    """Threads of a training, and the trained models with the numbers of their folds."""

    result: Trained
    setting: Setting
    data: Sequence[Labelled]
    directory: LocalDirectory
    seed: int
    models: list[tuple[int, Classifier]] = field(default_factory=list[tuple[int, Classifier]])

    def run(self) -> None:
        """Run all trainers, and calls of single experts until the trainers have finished."""
        start, self._over = time.monotonic(), threading.Event()
        folds, numbers = range(len(self.data)), range(self.setting.trainers)
        jobs = [(self._train, fold, number) for fold in folds for number in numbers]
        trainers = [threading.Thread(target=self._guarded, args=job) for job in jobs]
        callers = [threading.Thread(target=self._guarded, args=(self._call_experts, fold, 0)) for fold in folds]
        for thread in [*trainers, *callers]:
            thread.start()
        for thread in trainers:
            thread.join()
        self._over.set()
        for thread in callers:
            thread.join()
        self.result.seconds = time.monotonic() - start

    def accuracies(self, connections: Connections) -> list[float]:
        """Accuracy of each trainer's model with the final experts, over these connections."""
        accuracies: list[float] = []
        for fold, model in self.models:
            copy = classifier(fold, connections, self.setting)
            copy.load_state_dict(model.state_dict())
            accuracies.append(accuracy(copy.eval(), self.data[fold]))
        return accuracies

    def _guarded(self, work: Callable[[int, int, Connections], None], fold: int, number: int) -> None:
        try:
            with Connections(self.directory) as connections:
                work(fold, number, connections)
        except BaseException as error:
            self.result.strange.append(error)

    def _train(self, fold: int, number: int, connections: Connections) -> None:
        setting, calls, data = self.setting, self.result.calls, self.data[fold]
        model, losses = self._initial_model(fold, number, connections), list[float]()
        optimizer = torch.optim.Adam(model.parameters(), lr=setting.rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, setting.steps)
        draw = torch.Generator().manual_seed(1000 * self.seed + 100 * fold + number)
        for _ in range(setting.steps):
            rows = torch.randint(len(data.images), (setting.rows,), generator=draw)
            learn = partial(loss_of, model, data.images[rows], data.digits[rows])
            total, loss = calls.timed("forward", setting.timeout, learn)
            optimizer.zero_grad()
            calls.timed("backward", setting.timeout, partial(torch.autograd.backward, total))
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        self.models.append((fold, model))
        self.result.losses.append(losses)
        with calls.lock:
            calls.failed.update(cast("RemoteSwitchMixtureOfExperts", model.middle).statistics().failed)

    def _initial_model(self, fold: int, number: int, connections: Connections) -> Classifier:
        with _DRAWING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 * fold + number)
            return classifier(fold, connections, self.setting)

    def _call_experts(self, fold: int, _: int, connections: Connections) -> None:
        """Call single experts in turn. Their errors reach the caller, unlike those in a mixture."""
        x, seconds = torch.zeros(_SINGLE_ROWS, WIDTH), self.setting.timeout
        places = [place for served in SERVERS for place in served]
        experts = [RemoteExpert(f"fold{fold}.{row}.{column}", connections, timeout=seconds) for row, column in places]
        for expert in cycle(experts):
            if self._over.is_set():
                return
            with torch.no_grad(), suppress(*_FAULTS):
                self.result.calls.timed("expert", seconds, partial(expert, x))
