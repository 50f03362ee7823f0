"""A batch that went well, and what is to happen if it counts; see `weft.experts.isolation`."""

from collections.abc import Callable, Sequence

from weft.experts.task import Results, Task


class Drafted:
    """A `Draft` out of its results, and a function that makes it count."""

    def __init__(self, consequence: Callable[[], None], results: list[Results]) -> None:
        self._consequence = consequence
        self._results = results

    def apply(self) -> list[Results]:
        """See `Draft.apply`."""
        self._consequence()
        return self._results


def copied(tasks: Sequence[Task], results: Sequence[Results]) -> list[Results | None]:
    """What is recorded of the tasks with a key."""
    pairs = zip(tasks, results, strict=True)
    return [[tensor.clone() for tensor in found] if task.key is not None else None for task, found in pairs]
