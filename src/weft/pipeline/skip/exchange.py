"""One forward of a skippable layer: the talk between its generator and the tracker.

    generator                Exchange                        tracker
    yield stash(name, t) ──> declared? not twice? ──save──>  keeps t
                         <── None
    yield pop(name)      ──> declared?            ──load──>  gives t
                         <── t (a second pop of one name is answered from here)
    return output        ──> all declarations kept?

A fault is thrown into the generator at its ``yield``, so that the traceback ends in the line of the user's
layer.
"""

from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from weft.core.errors import SkipError, SkipWiringError, listed
from weft.pipeline.skip.commands import pop, stash
from weft.pipeline.skip.namespace import Key, describe
from weft.pipeline.skip.tracker import SkipTracker

Talk: TypeAlias = Generator[Any, Any, Any]  # whatever the user's forward yields and returns


class Exchange:
    """Answers the commands of one forward and remembers them."""

    def __init__(
        self,
        layer: str,
        keys: Mapping[str, Key],
        stashable: Collection[str],
        poppable: Collection[str],
        tracker: SkipTracker,
    ) -> None:
        self.layer = layer  # its name in messages
        self.keys = keys
        self.stashable = stashable
        self.poppable = poppable
        self.tracker = tracker
        self.stashed: set[str] = set()
        self.popped: dict[str, Tensor | None] = {}

    def drive(self, talk: Talk) -> Any:
        """Run the generator to its end and give its return value."""
        advance: Callable[[], object] = partial(next, talk)
        while True:
            try:
                command = advance()
            except StopIteration as stop:
                return stop.value
            try:
                advance = partial(talk.send, self.answer(command))
            except (SkipError, SkipWiringError) as fault:
                advance = partial(talk.throw, fault)

    def answer(self, command: object) -> Tensor | None:
        """Do what the command says. Raises SkipError or, for what is no command, SkipWiringError."""
        if isinstance(command, stash):
            return self._stash(command.name, command.tensor)
        if isinstance(command, pop):
            return self._pop(command.name)
        raise SkipWiringError(
            f"{self.layer} yielded {type(command).__name__}, wanted stash(name, tensor) or pop(name); "
            "the output of a layer is returned, not yielded"
        )

    def _stash(self, name: str, value: object) -> None:
        if name not in self.stashable:
            raise SkipError(self._undeclared("stashed", name, self.stashable, "stash"))
        if name in self.stashed:
            raise SkipError(
                f"{self.layer} stashed {describe(self.keys[name])} twice in one forward, wanted once; "
                "stash the second tensor under a name of its own"
            )
        if not (value is None or isinstance(value, Tensor)):
            raise SkipError(
                f"{self.layer} stashed a {type(value).__name__} as {describe(self.keys[name])}, wanted a "
                "tensor or None; stash several tensors under several names"
            )
        self.tracker.save(*self.keys[name], value)
        self.stashed.add(name)

    def _pop(self, name: str) -> Tensor | None:
        if name not in self.poppable:
            raise SkipError(self._undeclared("popped", name, self.poppable, "pop"))
        if name not in self.popped:
            try:
                self.popped[name] = self.tracker.load(*self.keys[name])
            except SkipError as fault:
                raise SkipError(f"{self.layer}: {fault}") from None
        return self.popped[name]

    def _undeclared(self, did: str, name: str, declared: Collection[str], word: str) -> str:
        names = ", ".join(map(repr, sorted(declared))) or "no name"
        return (
            f"{self.layer} {did} {name!r}, which it does not declare: its {word}= has {names}; "
            f"add {name!r} to the {word}= of @skippable"
        )

    def finish(self) -> None:
        """The forward is over. Raises one SkipError that lists every declaration that was not kept."""
        faults = [
            f"{describe(self.keys[name])} was declared as {able} but not {did}"
            for able, did, names in (
                ("stashable", "stashed", set(self.stashable) - self.stashed),
                ("poppable", "popped", set(self.poppable) - self.popped.keys()),
            )
            for name in sorted(names)
        ]
        if faults:
            raise SkipError(
                listed(f"{self.layer} broke its skip declaration by the end of its forward:", faults)
                + "\nstash and pop on every path through forward (None may be stashed), "
                "or take the names out of @skippable"
            )
