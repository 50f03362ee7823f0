"""What ties a mixture to the experts out there: the directory's snapshot, the way to call them, and what they take.

    snapshot ── the same as before? ── yes ──> the crowd that is known
                      └── no ──> the crowd of this one

It is no part of the model: a copy of the mixture shares it, and pickling says what to do instead.
"""

from collections.abc import Sequence
from typing import Never

import torch

from weft.core.errors import UsageError
from weft.experts.client.connections import Connections
from weft.experts.client.retry import Retry
from weft.experts.client.stub import RequestBuilder, client_name
from weft.experts.compression import Policy
from weft.experts.directory import Snapshot
from weft.experts.errors import NoExpertsError
from weft.experts.mixture.calls import Calls, Request
from weft.experts.mixture.gathering import Patience, gather, too_few
from weft.experts.mixture.grid import Crowd, Grid
from weft.experts.mixture.layout import Layout
from weft.experts.mixture.recall import Recall
from weft.experts.mixture.tally import Tally
from weft.experts.wire import Received
from weft.experts.wire.service import Description, read_description

_ASKED = 8  # experts that are asked for their layout at the same time, each at another address if it can be


class Link:
    """The experts of a grid, as the directory knows them. Thread-safe."""

    def __init__(self, grid: Grid, connections: Connections, retry: Retry, compression: Policy, client: str) -> None:
        self.grid, self.connections = grid, connections
        self.calls = Calls(connections, retry, RequestBuilder(client_name(client), compression))
        self.tally, self.recall = Tally(), Recall()
        self._known: tuple[Snapshot, Crowd] | None = None
        self._layout: Layout | None = None

    def crowd(self) -> Crowd:
        """Who lives, as far as is known. Asks no expert."""
        snapshot, known = self.connections.snapshot(), self._known
        if known is None or known[0] is not snapshot:
            known = (snapshot, self.grid.crowd(snapshot))
            self._known = known
        return known[1]

    def layout(self, crowd: Crowd, deadline: float) -> Layout:
        """What the experts take and return. The first call asks some of them, and takes what comes first.

        ``deadline`` is a time of `time.monotonic`.

        Raises ``NoExpertsError`` if there is nobody to ask, ``TooFewAnswersError`` if nobody answers in time.
        """
        if self._layout is None:
            if not len(crowd):
                raise self.nobody()
            self._layout = Layout(self._described(self._spread(crowd), deadline))
        return self._layout

    def nobody(self) -> NoExpertsError:
        """The error for a grid without experts."""
        return NoExpertsError(f"the directory knows no living expert of the grid {self.grid.prefix}*")

    def __deepcopy__(self, memo: object) -> "Link":
        return self

    def __reduce__(self) -> Never:
        raise UsageError(
            "a remote mixture holds connections, which cannot be pickled: save its state_dict(), make a mixture where "
            "it is wanted, and load that there"
        )

    def _described(self, uids: Sequence[str], deadline: float) -> Description:
        found: list[Description] = []

        def accept(index: int, answer: Received) -> None:
            found.append(read_description(answer.header.data))

        requests = [Request(self.calls.requests.info(uid), deadline) for uid in uids]
        sample = [torch.zeros(1, dtype=torch.int64, device="cpu")] * len(uids)
        one = torch.ones(1, dtype=torch.int64, device="cpu")
        patience = Patience(deadline, 0.0, lenient=True)
        gathered = gather(self.calls, requests, sample, one, patience, accept)
        if not found:
            faults = {uids[index]: fault for index, fault in gathered.faults.items()}
            raise too_few(
                f"{len(uids)} experts of a mixture were asked what they take", 1, 1, 1, faults, self.calls.retry
            )
        return found[0]

    def _spread(self, crowd: Crowd) -> list[str]:
        """Some experts, first those at different addresses."""
        snapshot = self.connections.snapshot()
        first = {snapshot.addresses(uid)[:1]: uid for uid in reversed(crowd.uids)}
        return list(dict.fromkeys([*first.values(), *crowd.uids[:_ASKED]]))[:_ASKED]
