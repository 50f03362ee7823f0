"""Executors walk a schedule: one action after another in the caller's thread, or each worker in its own thread.

    walk(schedule, perform, given, ...)   given: what the caller puts into the mailboxes before the start
                                          result: what left the run, by address

`StepState.perform` does the work under every executor, so all give the same numbers. Values and gradients wait in
mailboxes until their stage takes them: a mailbox belongs to one worker and one walk. Every worker may put; only the
owner takes, so what has arrived lies in a private dictionary and needs no lock. Closing a mailbox wakes its worker:
none waits for a sender that failed. A walk ends in `commit` or `abort`: it counts in all processes that take part, or
in none. The protocol holds nothing that needs shared memory.

Workers are threads that outlive the walk, since starting one costs more than a small action. They hold nothing
between walks, not even the executor; when it is dropped, they end.
"""

import os
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.core.context import ExecutionContext, has_local_modes
from weft.core.rng import carry_lock
from weft.pipeline.routing import Address, Given, Message
from weft.pipeline.schedule import Action, Schedule

Report = TypeVar("Report")


class WalkAborted(Exception):
    """The walk was given up while a worker waited; the walk keeps the reason, not this exception."""


class LocalQueue:
    """The messages of a serial walk, where one thread puts and takes, or of what left the run: a plain dictionary."""

    def __init__(self) -> None:
        self.messages: dict[Address, Any] = {}
        self.put, self.receive, self.close = self.messages.__setitem__, self.messages.pop, self.messages.clear


class Mailbox:
    """The messages to one worker of a threaded walk. `take` waits for the sender, `close` ends the waiting."""

    def __init__(self) -> None:
        self._arriving: SimpleQueue[tuple[Address | None, Any]] = SimpleQueue()
        self._arrived: dict[Address, Any] = {}

    def put(self, address: Address, value: Any, /) -> None:
        self._arriving.put((address, value))

    def receive(self, address: Address, /) -> Any:
        """The value at `address`, as soon as it is there. Raises Closed when the walk is given up first."""
        arrived = self._arrived
        while address not in arrived:
            at, value = self._arriving.get()
            if at is None:
                self._arriving.put((None, None))  # stays closed for the next take
                raise WalkAborted
            arrived[at] = value
        return arrived.pop(address)

    def close(self) -> None:
        self._arriving.put((None, None))


Inbox = LocalQueue | Mailbox
Outboxes = Sequence[Inbox]
"""For every stage the mailbox of its worker; the last one, which is at OUTSIDE, holds what leaves the run."""
Perform = Callable[[Action, Inbox, Outboxes], None]


@contextmanager
def working() -> Generator[None]:
    """The modes of every walk: no graph but where a segment makes one, and backward in the thread that asks for it.

    By default PyTorch walks the nodes of a CUDA device in one thread: the very one which waits for this walk when
    ``loss.backward()`` started it.
    """
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


class SerialExecutor:
    """All actions in the caller's thread, the micro-batch that has come furthest first; base of other executors."""

    def walk(
        self, schedule: Schedule, perform: Perform, given: Given, ambient: ExecutionContext
    ) -> dict[Address, Message]:
        """Perform every action of the schedule in a valid order; return what left the run.

        The first exception of an action ends the walk and is raised here, with its own traceback.
        """
        queue, left = LocalQueue(), LocalQueue()
        for messages in given.values():
            queue.messages.update(messages)
        outboxes = [*[queue] * schedule.stages, left]
        carried = carry_lock()

        def steps() -> None:
            carried()
            with working():
                for _, action in schedule.order:
                    perform(action, queue, outboxes)

        ambient.run(steps)
        return left.messages

    @property
    def alone(self) -> bool:
        """Whether all stages run in this process."""
        return True

    def open(self, what: str) -> None:
        """Begin a call that ends in `commit` or `abort`: a walk, and everything around it that can fail. `what` is its
        name in messages. Does nothing if the call has begun."""

    def exchange_gradients(
        self, borrowed: Mapping[int, Tensor], by_worker: dict[int, dict[int, Tensor]]
    ) -> dict[int, dict[int, Tensor]]:
        """Gradients of parameters, by worker and by the parameter's id(). Those of `borrowed` copies go to the owners.
        Those of copies that this process lent are added. Between `open` and `commit`."""
        return by_worker

    def commit(self, report: Report) -> list[Report]:
        """End a call that succeeded here. Returns the reports of all processes that took part, by worker.

        Raises the failure of another process, if there was one. Here no other process takes part.
        """
        return [report]

    def abort(self, error: BaseException) -> None:
        """End a call that failed here, so that it fails in every process."""


class ThreadExecutor(SerialExecutor):
    """One persistent thread per worker of the schedule, started at the first walk.

    On CPU each gets its share of the caller's intra-op threads. They are in one walk at a time; who comes meanwhile
    walks by himself. He could not wait: it may be a layer of this very walk that calls, or somebody whom one of its
    layers waits for.
    """

    def __init__(self, name: str = "pipe") -> None:
        self._name = name
        self._jobs: list[SimpleQueue[_Job | None]] = []
        self._intra_op = 0
        self._walking = threading.Lock()
        self._finalizer = weakref.finalize(self, _dismiss, self._jobs)
        _executors.add(self)

    @property
    def workers(self) -> int:
        """How many threads there are now."""
        return len(self._jobs)

    def walk(
        self, schedule: Schedule, perform: Perform, given: Given, ambient: ExecutionContext
    ) -> dict[Address, Message]:
        """See `SerialExecutor.walk`. On KeyboardInterrupt the workers stop after the action that each is in.

        Under modes or hooks of the calling thread all is done in that thread: workers would run without them.
        """
        walking = self._walking
        if has_local_modes() or not walking.acquire(blocking=False):
            return super().walk(schedule, perform, given, ambient)
        try:
            self._hire(len(schedule.workers))
            walk = _Walk(schedule, perform, given)
            try:
                walk.start(self._jobs, ambient)
                walk.wait()
            except BaseException as interrupt:
                walk.give_up(interrupt)
                # The interrupt may have hit between two steps of counting: ask the workers themselves, who have
                # ended the walk when they get to the next job, which does nothing.
                self._tell_all(int)
                walk.forget()
                raise
            return walk.result()
        finally:
            walking.release()

    def close(self) -> None:
        """Dismiss the threads, after the walk that they may be in; a later walk starts new ones."""
        with self._walking:
            _dismiss(self._jobs)

    def forked(self) -> None:
        """In a child: neither the threads nor who may have been in a walk are there."""
        self._jobs.clear()
        self._intra_op = 0
        self._walking = threading.Lock()

    def _hire(self, count: int) -> None:
        """Have at least `count` threads, each with its share of intra-op threads."""
        for number in range(len(self._jobs), count):
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            self._jobs.append(jobs)
            try:
                threading.Thread(target=_work, args=(jobs,), name=f"weft-{self._name}-{number}", daemon=True).start()
            except BaseException:  # no thread, or an interrupt and nobody knows: later walks must not wait for it
                self._jobs.remove(jobs)
                jobs.put(None)
                raise
            self._intra_op = 0
        here = torch.get_num_threads()
        share = max(1, here // max(1, count))
        if share != self._intra_op:
            self._intra_op = share
            self._tell_all(partial(_take_share, share))
            # The setting is per thread, but the last one set is also what threads that start later inherit.
            torch.set_num_threads(here)

    def _tell_all(self, call: Callable[[], object]) -> None:
        done: SimpleQueue[None] = SimpleQueue()
        for jobs in self._jobs:
            jobs.put((call, done))
        for _ in self._jobs:
            done.get()


_executors: weakref.WeakSet[ThreadExecutor] = weakref.WeakSet()


def _forked() -> None:
    for executor in list(_executors):
        executor.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _take_share(threads: int) -> None:
    """Let this thread use so many intra-op threads."""
    torch.get_num_threads()  # the first use of PyTorch in a thread sets the process's number: have it behind us
    torch.set_num_threads(threads)


_Job = tuple[Callable[[], object], "SimpleQueue[None]"]
"""One call for one worker, and who hears of its end, however it ends."""


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    """What a worker thread does all its life. Holds no job while it waits for the next."""
    while (job := jobs.get()) is not None:
        call, done = job
        try:
            call()
        finally:
            del job, call
            done.put(None)
            del done


def _dismiss(jobs: "list[SimpleQueue[_Job | None]]") -> None:
    for each in jobs:
        each.put(None)
    jobs.clear()


class _Walk:
    """One threaded walk: boxes, programs, and the first error."""

    def __init__(self, schedule: Schedule, perform: Perform, given: Given) -> None:
        self._schedule = schedule
        self._perform = perform
        self._boxes = [Mailbox() for _ in schedule.workers]
        self._left = LocalQueue()
        self._outboxes: Outboxes = [*(self._boxes[worker] for worker in schedule.worker_of), self._left]
        for stage, messages in given.items():
            for address, message in messages.items():
                self._outboxes[stage].put(address, message)
        self._error: BaseException | None = None
        self._failing = threading.Lock()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._running = 0
        self._carried = carry_lock()

    def start(self, jobs: "Sequence[SimpleQueue[_Job | None]]", ambient: ExecutionContext) -> None:
        for worker, (queue, program) in enumerate(zip(jobs, self._schedule.workers, strict=False)):
            queue.put((self._program(worker, program, ambient), self._done))
            self._running += 1

    def _program(self, worker: int, actions: Sequence[Action], ambient: ExecutionContext) -> Callable[[], None]:
        box = self._boxes[worker]

        def steps() -> None:
            self._carried()
            with working():
                for action in actions:
                    if self._error is not None:
                        return
                    self._perform(action, box, self._outboxes)

        def program() -> None:
            try:
                ambient.run(steps)
            except WalkAborted:
                pass
            except BaseException as error:
                self.give_up(error)

        return program

    def give_up(self, error: BaseException) -> None:
        """Keep the first error, and wake every worker that waits."""
        with self._failing:
            if self._error is None:
                self._error = error
        for box in self._boxes:
            box.close()

    def wait(self) -> None:
        """Until every worker has ended its program."""
        while self._running:
            self._done.get()
            self._running -= 1

    def forget(self) -> None:
        """Let go of the error. Its traceback holds the frame that holds this walk: a cycle otherwise."""
        self._error = None

    def result(self) -> dict[Address, Message]:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # a traceback that holds this frame must not be held by it
        return self._left.messages
