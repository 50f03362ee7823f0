"""Executors walk in a valid order. Threads overlap, end a failed walk at once, and end with their executor."""

import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchweft as weft
from tests.processes import forked, only_with_fork
from tests.strategies import any_schedules
from torchweft.core.context import ExecutionContext
from torchweft.core.rng import RngVote, lock_generators
from torchweft.pipeline.actions import Action, needs
from torchweft.pipeline.executor import SerialExecutor, ThreadExecutor, WalkAborted
from torchweft.pipeline.routing import OUTSIDE, Address, Message
from torchweft.pipeline.schedule import Schedule, gpipe, one_f_one_b


class Chain:
    """Work of a chain of stages without tensors: every action sends a token to the actions that wait for it."""

    def __init__(self, schedule: Schedule) -> None:
        present = {action for row in schedule.workers for action in row}
        self.waits = {action: [need for need in needs(action) if need in present] for action in present}
        self.readers: dict[Action, list[Action]] = {action: [] for action in present}
        for action, before in self.waits.items():
            for need in before:
                self.readers[need].append(action)
        self.numbers = {action: number for number, action in enumerate(sorted(present))}
        self.done: list[Action] = []
        self.threads: dict[str, set[int]] = {}
        self.fails: dict[Action, BaseException] = {}

    def at(self, need: Action, action: Action) -> Address:
        """The address of the token from `need` to `action`, made of their numbers."""
        return Address(self.numbers[need], self.numbers[action], 0)

    def __call__(self, action: Action, box: Any, post: Any) -> None:
        for need in self.waits[action]:
            assert box.receive(self.at(need, action)).value == need
        if action in self.fails:
            raise self.fails[action]
        self.threads.setdefault(threading.current_thread().name, set()).add(action.stage)
        self.done.append(action)
        for reader in self.readers[action]:
            post[reader.stage].put(self.at(action, reader), Message(action))
        if not self.readers[action]:
            post[OUTSIDE].put(Address(0, OUTSIDE, self.numbers[action]), Message(action))


def current_context() -> ExecutionContext:
    return ExecutionContext.capture(["cpu"])


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor("test")
    executor.walk(gpipe(4, 1), Chain(gpipe(4, 1)), {}, current_context())  # starts the threads before the first test
    yield executor
    executor.close()


@pytest.mark.parametrize("threaded", [False, True])
@given(schedule=any_schedules())
def test_a_walk_does_everything_once_in_the_order_of_every_list(
    threads: ThreadExecutor, threaded: bool, schedule: Schedule
) -> None:
    chain = Chain(schedule)
    left = (threads if threaded else SerialExecutor()).walk(schedule, chain, {}, current_context())
    assert sorted(chain.done) == sorted(chain.waits)
    position = {action: index for index, action in enumerate(chain.done)}
    for row in schedule.workers:
        positions = [position[action] for action in row]
        assert positions == sorted(positions)
    assert all(position[need] < position[action] for action, before in chain.waits.items() for need in before)
    assert {message.value for message in left.values()} == {a for a, r in chain.readers.items() if not r}
    if threaded:
        expected = {f"torchweft-test-{w}": {a.stage for a in row} for w, row in enumerate(schedule.workers)}
        assert chain.threads == expected
    else:
        assert set(chain.threads) == {threading.current_thread().name}


class LayerError(Exception):
    """An exception raised by a layer."""


@pytest.mark.parametrize("threaded", [False, True])
@given(schedule=any_schedules(), data=st.data())
def test_exception_ends_its_walk_and_the_next_walk_works(
    threads: ThreadExecutor, threaded: bool, schedule: Schedule, data: st.DataObject
) -> None:
    executor = threads if threaded else SerialExecutor()
    chain = Chain(schedule)
    bad = data.draw(st.lists(st.sampled_from(sorted(chain.waits)), min_size=1, max_size=3, unique=True))
    kind = data.draw(st.sampled_from([LayerError, KeyboardInterrupt, SystemExit]))
    chain.fails = {action: kind(str(action)) for action in bad}
    with pytest.raises(kind) as caught:
        executor.walk(schedule, chain, {}, current_context())
    assert caught.value in chain.fails.values()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "__call__", "the frame that raised is in the traceback"
    again = Chain(schedule)
    executor.walk(schedule, again, {}, current_context())
    assert sorted(again.done) == sorted(again.waits)


@pytest.mark.parametrize("table", [gpipe(4, 3), one_f_one_b(4, 3)], ids=["gpipe", "1f1b"])
def test_all_waiting_workers_are_woken_when_one_fails(threads: ThreadExecutor, table: Schedule) -> None:
    # The first worker fails only after the other three wait for it.
    waiting = threading.Semaphore(0)
    woken: list[int] = []

    def perform(action: Action, box: Any, post: Any) -> None:
        if action.stage == 0:
            for _ in range(3):
                assert waiting.acquire(timeout=10)
            raise LayerError
        waiting.release()
        try:
            box.receive(Address(0, action.stage, 0))
        except WalkAborted:
            woken.append(action.stage)
            raise

    with pytest.raises(LayerError):
        threads.walk(table, perform, {}, current_context())
    assert sorted(woken) == [1, 2, 3]


def test_dropped_exception_holds_nothing_of_its_walk(threads: ThreadExecutor) -> None:
    class Value:
        pass

    values: list[weakref.ref[Value]] = []

    def perform(action: Action, box: Any, post: Any) -> None:
        value = Value()
        values.append(weakref.ref(value))
        post[0].put(Address(0, 0, 0), Message(value))
        raise LayerError

    def walk() -> None:
        with pytest.raises(LayerError):
            threads.walk(gpipe(1, 1), perform, {}, current_context())

    walk()
    threads.walk(gpipe(1, 1), lambda action, box, post: None, {}, current_context())
    gc.collect()
    assert values[0]() is None


def test_threads_last_as_long_as_their_executor() -> None:
    executor = ThreadExecutor("gone")
    seen: list[set[str]] = []
    for _ in range(3):
        chain = Chain(gpipe(3, 2))
        executor.walk(gpipe(3, 2), chain, {}, current_context())
        seen.append(set(chain.threads))
    assert seen == [{"torchweft-gone-0", "torchweft-gone-1", "torchweft-gone-2"}] * 3
    assert executor.workers == 3
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("torchweft-gone")]
    assert len(mine) == 3
    gone = weakref.ref(executor)
    del executor
    assert gone() is None
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


def test_close_waits_for_a_walk_and_a_new_walk_can_follow() -> None:
    executor, inside, go_on = ThreadExecutor("closing"), threading.Event(), threading.Event()
    work = Chain(gpipe(2, 1))

    def perform(action: Action, box: Any, post: Any) -> None:
        inside.set()
        go_on.wait(10)
        work(action, box, post)

    walking = threading.Thread(target=executor.walk, args=(gpipe(2, 1), perform, {}, current_context()))
    walking.start()
    inside.wait(10)
    closing = threading.Thread(target=executor.close)
    closing.start()
    assert executor.workers == 2
    go_on.set()
    for thread in (walking, closing):
        thread.join(10)
    assert len(work.done) == 4 and executor.workers == 0
    executor.walk(gpipe(2, 1), again := Chain(gpipe(2, 1)), {}, current_context())
    assert len(again.done) == 4
    executor.close()


@only_with_fork[0]
@only_with_fork[1]
def test_forked_child_has_its_own_workers() -> None:
    """A process can fork during a walk too."""
    executor, inside, go_on = ThreadExecutor("busy"), threading.Event(), threading.Event()
    executor.walk(gpipe(2, 1), Chain(gpipe(2, 1)), {}, current_context())

    def perform(action: Action, box: Any, post: Any) -> None:
        inside.set()
        go_on.wait(30)

    def work() -> bool:
        chain = Chain(gpipe(2, 1))
        executor.walk(gpipe(2, 1), chain, {}, current_context())
        return len(chain.threads) == 2 and len(chain.done) == 4

    assert forked(work)
    walking = threading.Thread(target=executor.walk, args=(gpipe(2, 1).forward_only, perform, {}, current_context()))
    walking.start()
    inside.wait(10)
    try:
        assert forked(work)
    finally:
        go_on.set()
        walking.join(10)


@settings(max_examples=5)
@given(workers=st.integers(1, 4), threads_of_caller=st.integers(1, 6))
def test_workers_share_the_intra_op_threads_of_the_caller(workers: int, threads_of_caller: int) -> None:
    """The caller keeps its own number of threads."""
    shares: list[int] = []
    after: list[int] = []

    def perform(action: Action, box: Any, post: Any) -> None:
        shares.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(threads_of_caller)
    try:
        executor = ThreadExecutor("share")
        executor.walk(gpipe(workers, 1).forward_only, perform, {}, current_context())
        assert torch.get_num_threads() == threads_of_caller
        late = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
        late.start()
        late.join()
        executor.close()
    finally:
        torch.set_num_threads(before)
    assert shares == [max(1, threads_of_caller // workers)] * workers
    assert after == [threads_of_caller], "a thread that starts later uses the setting of the caller"


def test_walks_of_two_threads_run_one_after_the_other(threads: ThreadExecutor) -> None:
    schedule = gpipe(2, 3)
    chains = [Chain(schedule) for _ in range(4)]
    callers = [threading.Thread(target=threads.walk, args=(schedule, chain, {}, current_context())) for chain in chains]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    assert all(sorted(chain.done) == sorted(chain.waits) for chain in chains)


def test_walk_inside_a_walk_runs_in_its_own_thread() -> None:
    executor, chain = ThreadExecutor("own"), Chain(gpipe(2, 2))

    def perform(action: Action, box: Any, post: Any) -> None:
        executor.walk(gpipe(2, 2), chain, {}, current_context())

    walking = threading.Thread(
        target=executor.walk, args=(gpipe(1, 1).forward_only, perform, {}, current_context()), daemon=True
    )
    walking.start()
    walking.join(10)
    assert set(chain.threads) == {"torchweft-own-0"} and sorted(chain.done) == sorted(chain.waits)


def test_lock_holder_does_not_wait_for_its_waiters() -> None:
    """A thread that holds the lock of a generator must not wait for a walk that waits for this lock."""
    executor, chain, started = ThreadExecutor("shared"), Chain(gpipe(2, 2)), threading.Event()

    def perform(action: Action, box: Any, post: Any) -> None:
        started.set()
        with lock_generators([torch.default_generator]):
            pass

    def with_lock() -> None:
        with lock_generators([torch.default_generator]):
            walking.start()
            assert started.wait(10)
            executor.walk(gpipe(2, 2), chain, {}, current_context())

    walking = threading.Thread(target=executor.walk, args=(gpipe(2, 2), perform, {}, current_context()), daemon=True)
    holding = threading.Thread(target=with_lock, daemon=True)
    holding.start()
    for thread in (holding, walking):
        thread.join(10)
    assert not holding.is_alive() and not walking.is_alive() and sorted(chain.done) == sorted(chain.waits)


@pytest.mark.parametrize("threaded", [False, True])
def test_walk_uses_the_locks_of_its_own_thread(threaded: bool) -> None:
    """Generator locks of the thread that captured the context do not count."""
    executor, captured, locked = ThreadExecutor("inner"), current_context(), list[Action]()

    def perform(action: Action, box: Any, post: Any) -> None:
        with lock_generators([torch.default_generator]):
            locked.append(action)

    def with_lock() -> None:
        with lock_generators([torch.default_generator]):
            (executor if threaded else SerialExecutor()).walk(gpipe(2, 1).forward_only, perform, {}, captured)

    walking = threading.Thread(target=with_lock, daemon=True)
    walking.start()
    walking.join(10)
    assert len(locked) == 2


@pytest.mark.parametrize("threaded", [False, True])
def test_action_has_the_context_of_the_caller(threads: ThreadExecutor, threaded: bool) -> None:
    """It gets the values for its stage, has grad mode off, and runs backward in its own thread. The engine's thread
    for a CUDA device could be the one that waits for the walk."""
    given = {stage: {Address(7, stage, 0): Message(f"for {stage}")} for stage in range(3)}
    seen: dict[int, tuple[str, bool, bool]] = {}

    def perform(action: Action, box: Any, post: Any) -> None:
        value, mode = box.receive(Address(7, action.stage, 0)).value, torch.is_grad_enabled()
        x = torch.ones(1, requires_grad=True)
        with torch.enable_grad():
            y = x * 2
        multithreaded: list[bool] = []
        y.register_hook(lambda gradient: multithreaded.append(torch._C._is_multithreading_enabled()))
        torch.autograd.grad(y, x)
        seen[action.stage] = value, mode, *multithreaded

    (threads if threaded else SerialExecutor()).walk(gpipe(3, 1).forward_only, perform, given, current_context())
    assert seen == {stage: (f"for {stage}", False, False) for stage in range(3)}
    assert torch.is_grad_enabled() and torch._C._is_multithreading_enabled()


def test_failed_thread_start_fails_only_its_own_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    start, tries = threading.Thread.start, iter([True, False])

    def start_or_fail(thread: threading.Thread) -> None:
        if not next(tries, True):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    executor = ThreadExecutor("poor")
    with pytest.raises(RuntimeError, match="can't start"):
        executor.walk(gpipe(2, 1), Chain(gpipe(2, 1)), {}, current_context())
    work = Chain(gpipe(2, 1))
    executor.walk(gpipe(2, 1), work, {}, current_context())
    assert len(work.done) == 4
    executor.close()


def test_an_interrupt_is_in_no_reference_cycle(threads: ThreadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt(KeyboardInterrupt):
        pass

    def wait(walk: Any) -> None:
        raise Interrupt

    def interrupted() -> weakref.ref[Interrupt]:
        try:
            threads.walk(gpipe(2, 1), lambda action, box, post: None, {}, current_context())
        except Interrupt as interrupt:
            return weakref.ref(interrupt)
        raise AssertionError("nothing was raised")

    monkeypatch.setattr("torchweft.pipeline.executor._Walk.wait", wait)
    gc.disable()
    try:
        assert interrupted()() is None
    finally:
        gc.enable()


class OneOfSeveral(SerialExecutor):
    """Executor of one process of several. It records how walks end. `others` are the reports of the other processes."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.others: list[Any] = []

    def commit(self, report: Any) -> list[Any]:
        self.ends.append("commit")
        others, self.others = self.others, []
        return [report, *others]

    def abort(self, error: BaseException) -> None:
        self.ends.append(f"abort: {error}")


class Fails(torch.autograd.Function):
    """Identity that fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise LayerError("backward")


class Layer(torch.nn.Linear):
    """Linear layer that counts its calls and fails in the phase `fails`."""

    fails, calls = "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails == "forward":
            raise LayerError("forward")
        return Fails.apply(super().forward(x)) if self.fails else super().forward(x)


def pipe_of_several_processes() -> tuple[Any, Layer, OneOfSeveral]:
    """A pipe with the executor of one process of several."""
    layer = Layer(3, 3)
    pipe = weft.Pipe(torch.nn.Sequential(layer, torch.nn.Linear(3, 2)), chunks=2, executor="serial")
    pipe(torch.ones(4, 3))
    plans = pipe._runtime.plans
    executor = plans._serial = OneOfSeveral()
    plans._plans.clear()
    return pipe, layer, executor


@pytest.mark.parametrize(
    ("fails", "ends"),
    [("", ["commit"] * 2), ("forward", ["abort: forward"]), ("backward", ["commit", "abort: backward"])],
)
def test_a_walk_ends_in_commit_or_abort(fails: str, ends: list[str]) -> None:
    pipe, layer, executor = pipe_of_several_processes()
    layer.fails = fails
    with pytest.raises(LayerError) if fails else nullcontext():
        pipe(torch.ones(4, 3)).sum().backward()
    assert executor.ends == ends


def test_step_with_surprising_draws_elsewhere_runs_again() -> None:
    pipe, layer, executor = pipe_of_several_processes()
    layer.calls, executor.others = 0, [RngVote(drew=False, surprised=True)]
    pipe(torch.ones(4, 3))
    assert layer.calls == 4
    assert executor.ends == ["commit"] * 2


def test_draws_of_others_advance_the_generator_of_the_caller() -> None:
    pipe, _, executor = pipe_of_several_processes()
    pipe._runtime.uses[0].draws.clear()  # the next step observes draws again, for which it draws a seed
    before = torch.get_rng_state()
    pipe(torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), before)
    pipe._runtime.uses[0].draws.clear()
    executor.others = [RngVote(drew=True, surprised=False)]
    pipe(torch.ones(4, 3))
    assert not torch.equal(torch.get_rng_state(), before)
