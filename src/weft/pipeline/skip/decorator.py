"""`skippable`: from a user's module class to a class of layers that stash and pop.

    class Encoder(nn.Module): ...              skippable(stash=["early"])
              │                                          │
              └──────────────> Skippable subclass <──────┘
                               module_cls, stashable_names, poppable_names

The class is changed into a class and not the instance into an instance, so a model reads as before.
"""

from collections.abc import Callable, Iterable
from typing import cast

from torch import nn

from weft.core.errors import SkipWiringError
from weft.pipeline.skip.skippable import M, P, Skippable, class_around, distinct_names


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Callable[P, M]], type[Skippable[P, M]]]:
    """Declare which skip tensors a module class stashes and pops.

    Use it as a decorator, ``@skippable(stash=["early"])``, or as a call,
    ``skippable(stash=["early"])(Class)``; both give a subclass of `Skippable` with the constructor of the
    class. Its ``forward`` is then a generator:

        @skippable(stash=["early"])
        class Encoder(nn.Module):
            def forward(self, x):
                yield stash("early", x)
                return self.conv(x)

    A name is stashed by one layer and may be popped by any number of later layers. Layers of this kind work
    in a bare `nn.Sequential` and in a Pipe alike.

    Raises SkipWiringError (a TypeError) if `stash` or `pop` is a bare string, or if what is decorated is no
    module class. The idea of declared skips with a yielding forward comes from torchgpipe (Kim et al., 2020,
    arXiv:2004.09910).
    """
    stashed, popped = distinct_names("stash", stash), distinct_names("pop", pop)

    def decorate(module_cls: Callable[P, M]) -> type[Skippable[P, M]]:
        if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
            raise SkipWiringError(f"skippable was applied to {module_cls!r}, wanted a class derived from nn.Module")
        return cast(type[Skippable[P, M]], class_around(module_cls, stashed, popped))

    return decorate
