"""Checks the wiring of skips before anything runs.

A wrong skip would otherwise show as an error in the middle of a step, or as a tensor that is kept for
nobody. One walk over the layers finds every fault, and one error reports them all.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from weft.core.errors import SkipWiringError, listed
from weft.pipeline.skip.namespace import Key, describe
from weft.pipeline.skip.walk import Found, skippables


def verify_skippables(module: nn.Module, *, one_to_one: bool = False) -> None:
    """Check that the skips of a model fit together.

    Raises one SkipWiringError (a TypeError) that lists every fault: a layer that declares one name both
    ways; a second stash of a (namespace, name); a pop before any stash; a stash that nobody pops. With
    `one_to_one` a second pop is a fault too; otherwise any number of layers may pop one stash. Skippable
    layers deep inside the model count, in the order in which they run (see `walk`). That all faults are
    reported at once follows torchgpipe.
    """
    faults = list(wiring_faults(skippables(module), one_to_one=one_to_one))
    if faults:
        raise SkipWiringError(
            listed("the skip connections of the model do not fit together:", faults)
            + "\ncorrect the stash= and pop= of @skippable or the order of the layers; if one name belongs "
            "to several connections, set them apart with .isolate(Namespace())"
        )


def wiring_faults(layers: Iterable[Found], *, one_to_one: bool = False) -> Iterator[str]:
    """One line for each fault among layers that run in this order."""
    stashed: dict[Key, Found] = {}
    popped: dict[Key, Found] = {}
    early: list[tuple[Key, Found]] = []  # pops that found no stash before them
    for found in layers:
        layer = found.layer
        for name in sorted(layer.stashable_names & layer.poppable_names):
            yield f"{found} declares {name!r} both as stash and as pop, wanted one of them"
        for key in layer.stashable():
            if key in stashed:
                yield f"{found} stashes {describe(key)} again after {stashed[key]}, wanted one stash"
            stashed[key] = found
        for key in layer.poppable():
            if key not in stashed:
                early.append((key, found))
            elif one_to_one and key in popped:
                yield f"{found} pops {describe(key)} again after {popped[key]}, wanted one pop"
            popped[key] = found
    for key, found in early:
        later = f"{stashed[key]} stashes it only later" if key in stashed else "nobody stashes it"
        yield f"{found} pops {describe(key)} before any stash: {later}"
    for key in (key for key in stashed if key not in popped):
        yield f"{stashed[key]} stashes {describe(key)}, which nobody pops"
