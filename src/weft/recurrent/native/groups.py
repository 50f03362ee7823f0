"""The order of work in one step: elementwise values of one shape together, so that they are one pass over memory.

A value joins a group if all that it reads is there: made before the group, or a member of it, read whole. Products and
reductions go first as soon as they can, so that groups grow.
"""

from collections.abc import Sequence

from weft.recurrent.native.rows import Axes
from weft.recurrent.native.values import Point, Value, refs


def grouped(loop: Sequence[Value], axes: Axes | None) -> list[list[Value]]:
    """The values of one loop in an order in which they can be made, elementwise ones in groups."""
    pending: list[Value] = list(loop)
    found: list[list[Value]] = []
    while pending:
        waiting = set(pending)
        ready = [each for each in pending if not any(ref.value in waiting for ref in refs(each.made))]
        whole = [[each] for each in ready if not isinstance(each.made, Point)]
        groups = whole or [_group(pending, waiting, ready[0], axes)]
        done = {each for group in groups for each in group}
        found += groups
        pending = [each for each in pending if each not in done]
    return found


def _group(pending: Sequence[Value], waiting: set[Value], first: Value, axes: Axes | None) -> list[Value]:
    """All that can be made in one pass with `first`."""
    members: list[Value] = []
    inside: set[Value] = set()
    for value in pending:
        same = value.shape == first.shape and (axes is None or axes.get(value) == axes.get(first))
        if not same or not isinstance(value.made, Point):
            continue
        if all((ref.value in inside and ref.whole) or ref.value not in waiting for ref in refs(value.made)):
            members.append(value)
            inside.add(value)
    return members
