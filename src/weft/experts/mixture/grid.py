"""Experts on a grid, which of them live, and what they take and return.

    prefix "ffn", grid 4 x 32      "ffn.3.17" is the expert in row 3 and column 17

    snapshot of the directory ──> LiveExperts: uids   ["ffn.0.0", "ffn.0.1", "ffn.3.17"]
                                               places [[0, 0],    [0, 1],    [3, 17]]      experts x axes, int64

`LiveExperts` is made once for each snapshot, not for each call. An entry of the directory under the prefix that is no
place of the grid is ignored: it belongs to another model. Grids whose scores are sums along the axes are the product
keys of Lample et al., "Large Memory Layers with Product Keys" (2019), in the form of hivemind's mixture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Never, cast

import torch
from torch import Tensor

from weft.core.errors import UsageError, listed
from weft.core.validation import Validator
from weft.experts.client.autograd import RecomputeCache
from weft.experts.client.stub import IdempotencyKey, Signature
from weft.experts.discovery import Snapshot
from weft.experts.errors import NoExpertsError
from weft.experts.mixture.dispatch import RowSpan
from weft.experts.mixture.fanout import (
    AsyncCaller,
    ExpertRequest,
    MixtureCounters,
    QuorumTimeout,
    fan_out,
    too_few_answers,
)
from weft.experts.wire import Received
from weft.experts.wire.service import Description, read_description

_ASKED = 8  # experts that are asked for their description at the same time, at different addresses if possible


@dataclass(frozen=True)
class LiveExperts:
    """The living experts of a grid, sorted by their place: ``places`` is int64, experts x axes, on the CPU."""

    uids: tuple[str, ...]
    places: Tensor

    def __len__(self) -> int:
        return len(self.uids)


def check_grid(check: Validator, prefix: Any, sizes: Any) -> bool:
    """Check the ``uid_prefix`` and the ``grid_size`` of a grid. Returns whether both are valid."""
    named = isinstance(prefix, str) and bool(prefix.strip("."))
    valid = check.that(named, f"uid_prefix is {prefix!r}, wanted a name such as 'ffn'")
    if isinstance(sizes, str | bytes) or not isinstance(sizes, Sequence):
        check.add(f"grid_size is {sizes!r}, wanted a list with one size for each axis, such as [4, 32]")
        return False
    each = list(enumerate(cast("Sequence[Any]", sizes)))
    valid &= check.that(bool(each), "grid_size is empty, wanted one size for each axis")
    return valid & all([check.count(f"grid_size[{i}]", size) for i, size in each])


class Grid:
    """Names of experts as places on a grid. ``sizes``: the number of places along each axis.

    Raises ``UsageError`` that lists an empty prefix, and sizes that are missing or not positive.
    """

    def __init__(self, prefix: str, sizes: Sequence[int]) -> None:
        with Validator("invalid grid of experts") as check:
            check_grid(check, prefix, sizes)
        self.prefix = prefix.rstrip(".") + "."
        self.sizes = tuple(sizes)

    def __len__(self) -> int:
        """The number of places."""
        return math.prod(self.sizes)

    def uid(self, place: Sequence[int]) -> str:
        """The name of the expert at a place."""
        return self.prefix + ".".join(map(str, place))

    def place(self, uid: str) -> tuple[int, ...] | None:
        """The place of the expert of this name; None if it is not in the grid."""
        if not uid.startswith(self.prefix):
            return None
        words = uid[len(self.prefix) :].split(".")
        if len(words) != len(self.sizes) or not all(word.isascii() and word.isdecimal() for word in words):
            return None
        if any(len(word) > len(str(size)) for word, size in zip(words, self.sizes, strict=True)):
            return None  # also spares int() a number of thousands of digits
        place = tuple(int(word) for word in words)
        inside = all(i < size for i, size in zip(place, self.sizes, strict=True))
        return place if inside and self.uid(place) == uid else None  # "03" would be a second name of 3

    def live(self, snapshot: Snapshot) -> LiveExperts:
        """The experts of the snapshot that are in the grid."""
        found = sorted((place, uid) for uid in snapshot.search(self.prefix) if (place := self.place(uid)) is not None)
        places = torch.tensor([place for place, _ in found], dtype=torch.int64, device="cpu")
        return LiveExperts(tuple(uid for _, uid in found), places.reshape(-1, len(self.sizes)))


class MixtureSignature(Signature):
    """A signature whose outputs can be averaged. Raises ``UsageError`` that lists those that cannot."""

    def __init__(self, description: Description) -> None:
        super().__init__(description)
        faults = [
            f"{name} is of {spec.dtype}, wanted floating-point or complex numbers, which have a weighted mean"
            for name, spec in zip(self.outputs.names, self.outputs.specs, strict=True)
            if not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        ]
        if faults:
            raise UsageError(listed(f"expert {description.name!r} cannot be part of a mixture:", faults))

    def output_sizes(self, inputs: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
        """The sizes of each output beyond the batch axis, as far as they are known without an answer.

        A free axis is known from the first input whose spec has the same shape; otherwise it is not (None).
        """
        shapes = {spec.shape: tuple(x.shape) for spec, x in reversed([*zip(self.inputs.specs, inputs, strict=True)])}
        found: list[tuple[int, ...] | None] = []
        for spec in self.outputs.specs:
            inner = [size for size in spec.shape[1:] if size is not None]
            like = shapes.get(spec.shape)
            known = tuple(inner) if len(inner) == len(spec.shape) - 1 else None
            found.append(known if like is None else like[1:])
        return found


@dataclass(frozen=True)
class CachedCall:
    """A forward that will be recomputed: ``chosen`` (samples x k) of the ``live`` experts, which of them answered
    (``alive``: samples x k, bool), their ``answers`` (each samples x k x ...), and the keys of the calls."""

    live: LiveExperts
    chosen: Tensor
    alive: Tensor
    answers: Sequence[Tensor]
    keys: dict[RowSpan, IdempotencyKey]


class GridClient:
    """The experts of a grid, as the directory knows them, and the calls to them. Thread-safe.

    It is no part of the model: a copy of the mixture shares it, and pickling raises an error that says what to do.
    """

    def __init__(self, grid: Grid, caller: AsyncCaller) -> None:
        self.grid, self.caller = grid, caller
        self.counters, self.cache = MixtureCounters(), RecomputeCache[CachedCall]()
        self._known: tuple[Snapshot, LiveExperts] | None = None
        self._signature: MixtureSignature | None = None

    def live(self) -> LiveExperts:
        """The living experts, as far as is known. Calls none of them."""
        snapshot, known = self.caller.connections.snapshot(), self._known
        if known is None or known[0] is not snapshot:
            known = (snapshot, self.grid.live(snapshot))
            self._known = known
        return known[1]

    def signature(self, live: LiveExperts, deadline: float) -> MixtureSignature:
        """What the experts take and return; all of a grid are alike. The first call requests it from some of them, and
        takes the first answer. ``deadline`` is a time of `time.monotonic`.

        Raises ``NoExpertsError`` if there are none, ``TooFewAnswersError`` if none answers in time.
        """
        if self._signature is None:
            if not len(live):
                raise self.no_experts()
            self._signature = MixtureSignature(self._described(live, deadline))
        return self._signature

    def no_experts(self) -> NoExpertsError:
        """The error for a grid without experts."""
        return NoExpertsError(f"the directory lists no living expert of the grid {self.grid.prefix}*")

    def __deepcopy__(self, memo: object) -> "GridClient":
        return self

    def __reduce__(self) -> Never:
        raise UsageError(
            "a remote mixture holds connections, which cannot be pickled: save its state_dict(), make a mixture where "
            "it is wanted, and load that there"
        )

    def _described(self, live: LiveExperts, deadline: float) -> Description:
        snapshot, found = self.caller.connections.snapshot(), list[Description]()
        by_address = {snapshot.addresses(uid)[:1]: uid for uid in reversed(live.uids)}
        uids = list(dict.fromkeys([*by_address.values(), *live.uids[:_ASKED]]))[:_ASKED]

        def accept(index: int, answer: Received) -> None:
            found.append(read_description(answer.header.data))

        requests = [ExpertRequest(self.caller.requests.info(uid), deadline) for uid in uids]
        sample = [torch.zeros(1, dtype=torch.int64, device="cpu")] * len(uids)
        one = torch.ones(1, dtype=torch.int64, device="cpu")
        result = fan_out(self.caller, requests, sample, one, QuorumTimeout(deadline, 0.0, lenient=True), accept)
        if not found:
            faults = {uids[index]: fault for index, fault in result.faults.items()}
            what = f"{len(uids)} experts of a mixture were asked for their description"
            raise too_few_answers(what, 1, 1, 1, faults, self.caller.retry)
        return found[0]
