"""The functional form: a step net over named values, with explicit links.

    result = recurrent_net(step, {"x": x}, {"h": h0}, {"h": "hidden"})
    result.outputs["hidden"]    T x N x ...       every output, also those that are no state
    result.all["h"]             T x N x ...       every state after every step, also those that are no output
    result.last["h"]            N x ...           ready to be the next call's initial state

After Caffe2's `recurrent_net`. What the step reads besides its inputs and states it closes over, or is given as
``references``; gradients of both are summed over time.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from weft.recurrent.backends import Name, Plans, Verify, settings_faults
from weft.recurrent.faults import Faults, cell_fault, truncate_fault
from weft.recurrent.links import Linked, Links, link_faults
from weft.recurrent.memory import Memory
from weft.recurrent.rows import Lengths
from weft.recurrent.unrolling import Result, Settings, run


def recurrent_net(
    step: Callable[..., Any],
    inputs: Mapping[str, Any],
    states: Mapping[str, Any],
    links: Links,
    *,
    references: Mapping[str, Any] | None = None,
    lengths: Lengths | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    time_step: bool = False,
    truncate: int | None = None,
    start: int = 0,
    memory: Memory = "full",
    backend: Name = "auto",
    verify: Verify = "first",
) -> Result:
    """Run ``step(inputs, states) -> outputs`` over time; every value is a dict by name.

    Args:
        inputs: sequences, T x N x ... each.
        states: for every state its value before the first step, N x ...; 1 x ... holds for all rows. A windowed one
            is k x N x ..., oldest first.
        links: for every state the name of the output that feeds it, or a :class:`Window`.
        references: handed to ``step`` as the third dict, if given.
        time_step: ``step`` gets the number of the step as its last argument.
        lengths, mask, reset, truncate, start: as for :class:`Recurrent`; a reset brings ``states`` back.
        memory, backend, verify: as for :class:`Recurrent`. Plans are kept for the process, by what ``step`` is and
            closes over. Give it what the model computes, such as an encoded source, as ``references``: a step that
            closes over it would be another one at every call.

    Returns ``Result(outputs, last, states)`` with dicts by name; ``result.all`` is ``result.states``.
    Raises as :class:`Recurrent` does.
    """
    _check(step, inputs, links, truncate, memory, backend, verify)
    cell = Linked(step, links, references=references, time_step=time_step)
    settings = Settings(truncate=truncate, plans=_plans(backend, memory, verify))
    return run(cell, settings, dict(inputs), states, lengths=lengths, mask=mask, reset=reset, start=start)


def _check(
    step: object, inputs: object, links: object, truncate: object, memory: object, backend: object, verify: object
) -> None:
    """Raise SpecError or UsageError that lists all that is wrong with the arguments."""
    faults = Faults(usage=[*cell_fault(step), *link_faults(links), *truncate_fault(truncate)])
    faults.usage.extend(settings_faults(memory, backend, verify))
    if not isinstance(inputs, Mapping):
        faults.spec.append(f"inputs is of type {type(inputs).__name__}, wanted a dict of sequences by name")
    faults.check("recurrent_net cannot run with these arguments:")


@lru_cache(maxsize=16)
def _plans(backend: Name, memory: Memory, verify: Verify) -> Plans:
    """The plans of this process; as many are kept as by one network."""
    return Plans(backend, memory, verify)
