"""Executors walk a schedule: one action after another in the caller's thread, or each worker in its own thread.

    walk(schedule, perform, given, ...)   given: messages that the caller puts into the mailboxes before the start
                                          result: messages that left the run, by address

`StepState.perform` does the work under every executor, so all compute the same numbers. Values and gradients wait in
mailboxes until their stage takes them. A mailbox belongs to one worker and one walk. Every worker can put messages, but
only the owner takes them, so the messages that have arrived are in a private dictionary and need no lock. Closing a
mailbox wakes its worker, so that it does not wait for a sender that failed. A walk ends in `commit` or `abort`, in all
processes that take part.

Workers are threads that outlive the walk, because starting a thread costs more than a small action. A pool of tasks
would not do: every action would pay for a task, and its tensors would change threads and caches. Threads hold no
references between walks, not even to the executor. They end when the executor is freed.
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

from torchweft.core.context import ExecutionContext, has_local_modes
from torchweft.core.rng import carry_lock
from torchweft.pipeline.routing import Address, Given, Message
from torchweft.pipeline.schedule import Action, Schedule

Report = TypeVar("Report")


class WalkAborted(Exception):
    """The walk was aborted while a worker waited. The walk keeps the reason, and not this exception."""


class LocalQueue:
    def __init__(self) -> None:
        self.messages: dict[Address, Any] = {}
        # Methods of the dictionary itself: one thread uses it, and a call of Python would cost more than the lookup.
        self.put, self.receive, self.close = self.messages.__setitem__, self.messages.pop, self.messages.clear


class Mailbox:
    """Messages to one worker of a threaded walk. `receive` waits for the sender, and `close` ends the waiting."""

    def __init__(self) -> None:
        self._arriving: SimpleQueue[tuple[Address | None, Any]] = SimpleQueue()
        self._arrived: dict[Address, Any] = {}

    def put(self, address: Address, value: Any, /) -> None:
        self._arriving.put((address, value))

    def receive(self, address: Address, /) -> Any:
        arrived = self._arrived
        while address not in arrived:
            at, value = self._arriving.get()
            if at is None:
                self._arriving.put((None, None))  # so that the next call finds it closed too
                raise WalkAborted
            arrived[at] = value
        return arrived.pop(address)

    def close(self) -> None:
        self._arriving.put((None, None))


Inbox = LocalQueue | Mailbox
Outboxes = Sequence[Inbox]  # that of the worker of every stage, and at index OUTSIDE that of what leaves the run
Perform = Callable[[Action, Inbox, Outboxes], None]


@contextmanager
def working() -> Generator[None]:
    """The modes of every walk: only segments make graphs, and backward runs in the thread that calls it."""
    # By default PyTorch runs all nodes of a CUDA device in one thread. If `loss.backward()` started this walk, that
    # thread is waiting for the walk, so a backward inside of it would deadlock.
    with torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
        yield


class SerialExecutor:
    """Runs all actions in the caller's thread, the furthest micro-batch first. Base class of other executors.

    With `by_time`, the thread launches work on several GPUs, and takes the action that can begin first. Launches do not
    wait for the work, so the GPUs run at the same time although one thread feeds them."""

    by_time = False

    def __init__(self, *, by_time: bool = False) -> None:
        self.by_time = by_time

    def walk(
        self, schedule: Schedule, perform: Perform, given: Given, ambient: ExecutionContext
    ) -> dict[Address, Message]:
        """Perform every action of the schedule in a valid order. Returns the messages that left the run. The first
        exception of an action ends the walk and is raised here, with its own traceback."""
        # All stages share one queue, because the order of actions makes every value before it is read.
        queue, left = LocalQueue(), LocalQueue()
        for messages in given.values():
            queue.messages.update(messages)
        outboxes = [*[queue] * schedule.stages, left]
        # A layer of an outer walk can hold the lock on generators. The threads of this walk act for it.
        carried = carry_lock()

        def steps() -> None:
            carried()
            with working():
                for _, action in schedule.launch_order if self.by_time else schedule.order:
                    perform(action, queue, outboxes)

        ambient.run(steps)
        return left.messages

    @property
    def alone(self) -> bool:
        return True

    def open(self, what: str) -> None:
        """Start a call that ends in `commit` or `abort`: a walk, and all around it that can fail. `what` is its name in
        messages. Does nothing if the call was started already."""

    def exchange_gradients(
        self, borrowed: Mapping[int, Tensor], by_worker: dict[int, dict[int, Tensor]]
    ) -> dict[int, dict[int, Tensor]]:
        """Exchange gradients with other processes, by worker and by the parameter's id(). Call it before `commit`.
        Gradients of `borrowed` copies go to their owners. Gradients of copies that this process lent are added."""
        return by_worker

    def share_entry_gradients(self, entries: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Send the gradients of this process's part of the mini-batch to the others. Returns those of their parts."""
        return []

    def number_to_report(self, number: Tensor) -> float | None:
        """A number to compare with other processes. On GPUs it is that of the call before, or None in the first."""
        return number.item()

    def end_backward(self, commit: Callable[[], object]) -> None:
        """Call `commit` now, or at the end of the backward, when autograd has handed out the gradients."""
        commit()

    def commit(self, report: Report) -> list[Report]:
        """End a call that succeeded here. Returns the reports of all processes that took part, by worker. Raises the
        failure of another process, if there was one."""
        return [report]

    def abort(self, error: BaseException) -> None:
        """End a call that failed in this process, so that it fails in every process."""


class ThreadExecutor(SerialExecutor):
    """One persistent thread per worker of the schedule, started at the first walk. On the CPU each thread gets its
    share of the caller's intra-op threads. The workers execute one walk at a time. A concurrent call runs serially in
    its own thread."""

    def __init__(self, name: str = "pipe") -> None:
        self._name = name
        self._jobs: list[SimpleQueue[_Job | None]] = []
        self._intra_op = 0
        self._walking = threading.Lock()
        self._finalizer = weakref.finalize(self, _end_threads, self._jobs)
        _executors.add(self)

    @property
    def workers(self) -> int:
        return len(self._jobs)

    def walk(
        self, schedule: Schedule, perform: Perform, given: Given, ambient: ExecutionContext
    ) -> dict[Address, Message]:
        """See `SerialExecutor.walk`. On KeyboardInterrupt each worker stops after its present action. Under modes or
        hooks of the calling thread the walk runs in that thread, because workers do not have them."""
        walking = self._walking
        # A second walk does not wait for the first. Waiting could deadlock: the caller may be a layer of the running
        # walk, or a thread that such a layer waits for.
        if has_local_modes() or not walking.acquire(blocking=False):
            return super().walk(schedule, perform, given, ambient)
        try:
            self._start_threads(len(schedule.workers))
            walk = _Walk(schedule, perform, given)
            try:
                walk.start(self._jobs, ambient)
                walk.wait()
            except BaseException as interrupt:
                walk.abort(interrupt)
                # The count of running workers is not reliable, because the interrupt can hit between two steps of
                # counting. So every worker gets an empty job. It has left the walk when it reaches that job.
                self._call_in_all(int)
                walk.clear_error()
                raise
            return walk.result()
        finally:
            walking.release()

    def close(self) -> None:
        # A walk in progress ends first, because its jobs are in the same queues.
        with self._walking:
            _end_threads(self._jobs)

    def reset_after_fork(self) -> None:
        # Neither the threads nor a walk in progress exist in the child.
        self._jobs.clear()
        self._intra_op = 0
        self._walking = threading.Lock()

    def _start_threads(self, count: int) -> None:
        for number in range(len(self._jobs), count):
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            self._jobs.append(jobs)
            try:
                name = f"torchweft-{self._name}-{number}"
                threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()
            except BaseException:
                # The start failed or was interrupted, so it is not known whether a thread reads this queue. Remove it,
                # or later walks block on it.
                self._jobs.remove(jobs)
                jobs.put(None)
                raise
            self._intra_op = 0  # the new thread has not set its number yet
        of_caller = torch.get_num_threads()
        share = max(1, of_caller // max(1, count))
        if share != self._intra_op:
            self._intra_op = share
            self._call_in_all(partial(_set_intra_op_threads, share))
            # The setting is per thread, but threads that start later inherit the last value that was set anywhere.
            torch.set_num_threads(of_caller)

    def _call_in_all(self, call: Callable[[], object]) -> None:
        done: SimpleQueue[None] = SimpleQueue()
        for jobs in self._jobs:
            jobs.put((call, done))
        for _ in self._jobs:
            done.get()


_executors: weakref.WeakSet[ThreadExecutor] = weakref.WeakSet()


def _reset_all_after_fork() -> None:
    for executor in list(_executors):
        executor.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all_after_fork)


def _set_intra_op_threads(threads: int) -> None:
    # The first use of PyTorch in a thread sets the default of the process, which would overwrite the value set here.
    torch.get_num_threads()
    torch.set_num_threads(threads)


# One call for one worker, and the queue that gets an entry when it ends, also after an exception.
_Job = tuple[Callable[[], object], "SimpleQueue[None]"]


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    # The references to a job are deleted before the wait for the next one. Otherwise an idle thread would keep the
    # tensors of the last walk alive.
    while (job := jobs.get()) is not None:
        call, done = job
        try:
            call()
        finally:
            del job, call
            done.put(None)
            del done


def _end_threads(jobs: "list[SimpleQueue[_Job | None]]") -> None:
    # Not joined: the garbage collector can run this in a worker itself.
    for queue in jobs:
        queue.put(None)
    jobs.clear()


class _Walk:
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
                self.abort(error)

        return program

    def abort(self, error: BaseException) -> None:
        # The first error is the cause. Later ones are often its effects in other stages.
        with self._failing:
            if self._error is None:
                self._error = error
        # After the error is set, so that a worker that wakes finds it.
        for box in self._boxes:
            box.close()

    def wait(self) -> None:
        while self._running:
            self._done.get()
            self._running -= 1

    def clear_error(self) -> None:
        # The traceback of the error refers to the frame that holds this walk, which would be a cycle.
        self._error = None

    def result(self) -> dict[Address, Message]:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, which would be a cycle
        return self._left.messages
