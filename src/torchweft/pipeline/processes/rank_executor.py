"""Executor of one rank: it runs its own row of the schedule, and exchanges values with the other ranks.

    own stages       a dictionary, as in a serial run
    other ranks      `Walk.send` when a value is put; `Walk.receive` when a value is taken that is not in the dictionary

Any table that passes `Schedule.check` runs, because a message is found by its address and not by its order. The row of
a rank is a valid order for its own stages, so a value of an own stage is always there before it is taken. Ranks leave a
walk together: all of them return, or all of them raise.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchweft.core.context import ExecutionContext
from torchweft.core.pytree import flatten
from torchweft.core.timing import LateNumber
from torchweft.core.torch_internals import queue_callback
from torchweft.pipeline.executor import LocalQueue, Outboxes, Perform, Report, SerialExecutor, working
from torchweft.pipeline.processes.given_batch import EntryGradients
from torchweft.pipeline.processes.links import Links, Walk
from torchweft.pipeline.processes.loans import Loans
from torchweft.pipeline.routing import OUTSIDE, Address, Given, Message, Wiring
from torchweft.pipeline.schedule import Schedule

_ENTRY = -7  # a route of addresses; those of values are numbered from 0
_LARGE_RESULTS = 16 << 20  # bytes of results that a step sends to all ranks together


class Channel:
    def __init__(self, links: Links) -> None:
        self.links = links
        self.failed = False  # whether the last walk failed
        self._walk: Walk | None = None
        self._late_end: weakref.ref[LateEnd] | None = None

    @property
    def walk(self) -> Walk:
        assert self._walk is not None, "nothing is sent between walks"
        return self._walk

    def open(self, what: str) -> None:
        # One backward can have several walks, of several calls of the pipe.
        if (late := self._late_end and self._late_end()) is not None:
            late.run()
        if self._walk is None:
            self._walk, self.failed = self.links.open_walk(what), False

    def fail(self, error: BaseException) -> None:
        """Fail the open walk on all ranks, if there is one."""
        if (walk := self.end()) is not None:
            walk.fail(error)
            self.failed = True

    def tell(self, error: BaseException) -> None:
        """Fail the open walk, or the one that the other ranks will open, or have opened, while this rank has none."""
        if self._walk is None and not self.failed:
            self._walk = self.links.open_unnamed_walk()
        self.fail(error)

    def end(self) -> Walk | None:
        walk, self._walk = self._walk, None
        return walk

    def end_late(self, commit: Callable[[], object]) -> None:
        """End the open walk at the end of the backward in which this is called, or before the next walk."""
        self._late_end = weakref.ref(LateEnd(self, commit))


class LateEnd:
    """The end of a walk, after autograd has handed out the gradients of this rank. So their reduction over replicas
    begins while other ranks of the pipe still compute. Only the engine of autograd has a reference."""

    def __init__(self, channel: Channel, commit: Callable[[], object]) -> None:
        self._channel, self._commit = channel, commit
        queue_callback(self._move_back)

    def _move_back(self) -> None:
        # Behind the waits of reductions, which were queued later. After a failed walk, these are complete too.
        queue_callback(self.run)

    def run(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:
            commit()

    def __del__(self) -> None:
        # The engine drops its callbacks without a call if a later node of the backward failed.
        if self._commit is not None:
            self._channel.fail(RuntimeError("the backward failed after the stages of this rank had ended"))


class Placement(NamedTuple):
    """The channel of this rank, the rank of each stage, the loans, whether all ranks get the output, whether they
    compare their mini-batches, and whether gradients are averaged with those of replicas."""

    channel: Channel
    workers: Sequence[int]
    loans: Loans
    shares_output: bool
    checks_batches: bool
    has_replicas: Callable[[], bool]

    @property
    def rank(self) -> int:
        return self.channel.links.rank


class ResultRoute(NamedTuple):
    """The route by which results leave the last stage. Without `shared`, they stay on its rank."""

    number: int
    source: int
    shared: bool


class ProcessExecutor(SerialExecutor):
    """Runs one row of a schedule. The row of worker k belongs to rank k of the group."""

    def __init__(self, placement: Placement, wiring: Wiring, results: ResultRoute) -> None:
        self._placement, self._channel, self._wiring, self._results = placement, placement.channel, wiring, results
        self._late = LateNumber()
        self._warned = False

    @property
    def alone(self) -> bool:
        return False

    def open(self, what: str) -> None:
        self._channel.open(what)

    def walk(
        self, schedule: Schedule, perform: Perform, given: Given, ambient: ExecutionContext
    ) -> dict[Address, Message]:
        """See `SerialExecutor.walk`. Results that left the run on another rank are returned as well. Raises
        RankFailedError and RankLostError for failures on other ranks."""
        walk, rank = self._channel.walk, self._channel.links.rank
        inbox, left = RankInbox(walk, self._wiring, schedule.worker_of, rank), LocalQueue()
        outboxes: Outboxes = [
            *(inbox if worker == rank else RankOutbox(walk, worker) for worker in schedule.worker_of),
            left,
        ]
        for stage, messages in given.items():
            if schedule.worker_of[stage] == rank:
                inbox.messages.update(messages)

        def run_row() -> None:
            with working():
                for action in schedule.workers[rank]:
                    # Before each action, so that this rank stops soon after another one has failed.
                    walk.check()
                    perform(action, inbox, outboxes)

        ambient.run(run_row)
        if any(action.kind == "F" for row in schedule.workers for action in row):
            self._share_results(walk, schedule, left.messages)
        return left.messages

    def _share_results(self, walk: Walk, schedule: Schedule, left: dict[Address, Message]) -> None:
        route, source, shared = self._results
        addresses = [Address(route, OUTSIDE, index) for index in range(schedule.micro_batches)]
        rank, owner = self._channel.links.rank, schedule.worker_of[source]
        if not shared:
            if rank != owner:
                left.update(dict.fromkeys(addresses, Message(None)))
        elif rank == owner:
            # One message for all micro-batches: the ranks wait for the last one anyway.
            results = _stack_numbers([left[address].value for address in addresses])
            self._warn_of_size(results)
            for other in range(self._channel.links.size):
                if other != rank:
                    walk.send(other, addresses[0], results)
        else:
            received = _unstack_numbers(walk.receive(addresses[0], owner))
            left.update({address: Message(value) for address, value in zip(addresses, received, strict=True)})

    def _warn_of_size(self, results: Any) -> None:
        others = self._channel.links.size - 1
        sent = others * sum(x.nbytes for x in flatten(results)[0] if isinstance(x, Tensor))
        if sent > _LARGE_RESULTS and not self._warned:
            self._warned = True
            warnings.warn(
                f"each step sends {sent / 2**20:,.0f} MiB of output from the last stage to {others} other "
                f"rank{'s' * (others > 1)}; output='last' leaves it on the last rank, and with loss= only the loss is "
                "sent",
                stacklevel=2,
            )

    def exchange_gradients(
        self, borrowed: Mapping[int, Tensor], by_worker: dict[int, dict[int, Tensor]]
    ) -> dict[int, dict[int, Tensor]]:
        return self._placement.loans.return_gradients(self._channel.walk, borrowed, by_worker)

    def share_entry_gradients(self, entries: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See `SerialExecutor.share_entry_gradients`, for `EntryGradients`."""
        shared: EntryGradients = entries
        walk, rank = self._channel.walk, self._channel.links.rank
        own, arrived = dict(zip(shared.own, gradients, strict=True)), dict[str, Tensor | None]()
        parts = [(part, owner, names) for part, (owner, names) in enumerate(shared.parts) if names]
        for part, owner, names in parts:
            for other in range(self._channel.links.size) if owner == rank else ():
                if other != rank:
                    walk.send(other, (_ENTRY, part, 0), [own[name] for name in names])
        for part, owner, names in parts:
            if owner != rank:
                arrived.update(zip(names, walk.receive((_ENTRY, part, 0), owner), strict=True))
        return [arrived[name] for name in shared.tensors]

    def number_to_report(self, number: Tensor) -> float | None:
        """See `SerialExecutor.number_to_report`."""
        # Late on all ranks or on none, or they would compare numbers of different steps.
        late = self._channel.links.ways.device_lane is not None
        return self._late.exchange(number) if late else number.item()

    def end_backward(self, commit: Callable[[], object]) -> None:
        """See `SerialExecutor.end_backward`. Late with replicas only: if another rank fails, all ranks raise, but some
        have added their gradients."""
        if self._placement.has_replicas():
            self._channel.end_late(commit)
        else:
            commit()

    def commit(self, report: Report) -> list[Report]:
        """See `SerialExecutor.commit`. A report is None, a string, or a named tuple of plain values."""
        plain: Any = report
        kind = cast(Any, type(plain))
        is_tuple = isinstance(plain, tuple)
        reports = self._channel.walk.agree([*plain] if is_tuple else plain)
        # After `agree`: if it raises, `abort` must still find the walk.
        self._channel.end()
        return [kind(*fields) for fields in reports] if is_tuple else reports

    def abort(self, error: BaseException) -> None:
        self._channel.fail(error)


def _stack_numbers(results: Sequence[Any]) -> Any:
    """Losses of micro-batches as one tensor, because NCCL takes as long for a number as for a thousand."""
    if all(type(x) is Tensor and not x.dim() for x in results):
        kinds = {(x.dtype, x.device, x.requires_grad) for x in results}
        if len(kinds) == 1:
            return torch.stack([x.detach() for x in results]).requires_grad_(results[0].requires_grad)
    return results


def _unstack_numbers(received: Any) -> Sequence[Any]:
    if not isinstance(received, Tensor):
        return received
    return [x.requires_grad_(received.requires_grad) for x in received.detach().unbind()]


class RankInbox(LocalQueue):
    def __init__(self, walk: Walk, wiring: Wiring, worker_of: Sequence[int], rank: int) -> None:
        super().__init__()
        self._walk, self._wiring, self._worker_of, self._rank = walk, wiring, worker_of, rank
        self.receive: Any = self._receive

    def _receive(self, address: Address, /) -> Message:
        message = self.messages.pop(address, None)
        if message is not None:
            return message
        # A value comes from the source of its route; the gradient of a value comes from the rank that read it.
        reader = self._worker_of[address.reader]
        source = self._wiring.routes[address.route].source
        sender = reader if reader != self._rank else self._worker_of[source]
        return Message(self._walk.receive(address, sender))


class RankOutbox(LocalQueue):
    def __init__(self, walk: Walk, rank: int) -> None:
        super().__init__()
        self._walk, self._rank = walk, rank
        self.put: Any = self._put

    def _put(self, address: Address, message: Message, /) -> None:
        self._walk.send(self._rank, address, message.value)
