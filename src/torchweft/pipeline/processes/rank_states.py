"""The states of ranks that wait, and the one that keeps the others waiting, in words."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class RankState(NamedTuple):
    """The walk that a rank is in, and the rank that it waits for: for a message of it, or, if `sending`, until it has
    taken the tensors that were sent to it."""

    walk: str | None
    waiting: int | None
    sending: bool

    def __str__(self) -> str:
        return "outside of any walk" if self.walk is None else f"in {self.walk}"


def late_text(receiver: str, sender: str, timeout: float) -> str:
    return (
        f"{receiver} has not taken the tensors that {sender} sent to it for {timeout:g} s: its process, its GPU or the "
        "network between the two hangs, or the tensors need more time. Give the group a longer timeout, or start the "
        "ranks again, from the last checkpoint"
    )


def describe_culprit(
    states: Mapping[int, RankState], names: Sequence[str], parted: Collection[int], here: int, timeout: float
) -> str:
    """The rank that keeps the others waiting, by the `states` of those that answered. `here` is this rank, which waits
    for a message. `parted` are ranks that have left in peace."""
    mine = states[here]
    assert mine.waiting is not None
    waited = f"{names[here]} waited {timeout:g} s in {mine.walk} for {names[mine.waiting]}"
    if mute := [name for rank, name in enumerate(names) if rank not in states and rank not in parted]:
        return f"{', '.join(mute)} does not answer: its process is stopped or hangs. {waited}"
    for sender, state in states.items():
        if state.sending and state.waiting is not None:
            return late_text(names[state.waiting], names[sender], timeout)
    # A rank that waits for none is the culprit: it computes, or is outside of the pipe.
    if idle := [f"{names[rank]}, now {state}," for rank, state in states.items() if state.waiting is None]:
        return (
            f"{' and '.join(idle)} is alive but has not taken part in {mine.walk} for {timeout:g} s; it may be "
            "in a long layer, or has called the Pipe a different number of times. Give the group a longer timeout, "
            "or call the Pipe equally often on all ranks"
        )
    waits = [f"rank {rank} {state} for rank {state.waiting}" for rank, state in states.items()]
    return f"the ranks of the pipeline wait for each other: {'; '.join(waits)}. {waited}"
