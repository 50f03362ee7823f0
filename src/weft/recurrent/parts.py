"""The cut of a captured step into parts, by what each operator depends on.

    forward                                        backward, last step first
    -------                                        -------------------------
    once           depends on references only      before_back  on inputs, states and output gradients, but not
    before         on inputs only                               on the gradient that is carried from step t+1
    loop           leads from state to new state   loop_back    leads from carried gradient to carried gradient
    after          leads to outputs only           after_back   leads to gradients of inputs and parameters only

Only `loop` and `loop_back` must run step by step. All else runs for all steps at once: what stands before the loop is
one bulk operator over T x N rows, and a parameter's gradient is one product or sum after the loop, never an addition
per step. Hand-written kernels do so for the LSTM (cuDNN: Appleyard et al., arXiv 1604.01946); here it is derived.
"""

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from torch import fx

from weft.recurrent.captured import Captured, Value

INPUT, STATE, CARRIED, GIVEN = "input", "state", "carried gradient", "output gradient"


@dataclass(frozen=True)
class Parts:
    """Each operator of the joint graph in exactly one part, in an order in which they can run."""

    once: list[fx.Node]
    before: list[fx.Node]
    loop: list[fx.Node]
    after: list[fx.Node]
    before_back: list[fx.Node]
    loop_back: list[fx.Node]
    after_back: list[fx.Node]


def dependences(captured: Captured, passing: str = STATE) -> dict[fx.Node, frozenset[str]]:
    """For every node, what it depends on of INPUT, STATE, CARRIED and GIVEN; nothing for references.

    A state that every step hands on as it is counts as `passing`.
    """
    roles = captured.roles
    found: dict[fx.Node, frozenset[str]] = {node: frozenset() for node in captured.module.graph.nodes}
    starts = [
        (INPUT, roles.inputs),
        (STATE, roles.states),
        (CARRIED, roles.new_state_gradients),
        (GIVEN, roles.output_gradients),
    ]
    for name, nodes in starts:
        found.update({node: frozenset([name]) for node in nodes})
    found.update({roles.states[k]: frozenset([passing]) for k in captured.passing})
    for node in captured.nodes:
        found[node] = frozenset[str]().union(*(found[each] for each in node.all_input_nodes))
    return found


def cut(captured: Captured) -> Parts:
    """Put every operator into its part."""
    roles, on = captured.roles, dependences(captured)
    to_state = leading_to(roles.new_states)
    to_carry = leading_to(roles.state_gradients)
    to_output = leading_to(roles.outputs)
    parts = Parts([], [], [], [], [], [], [])
    placed: dict[fx.Node, str] = {}
    for node in captured.nodes:
        placed[node] = _part_of(on[node], node in to_state, node in to_output, node in to_carry)
        if node.target is operator.getitem:  # one of several results: wherever they are made
            placed[node] = placed[node.all_input_nodes[0]]
        getattr(parts, placed[node]).append(node)
    return parts


def _part_of(on: frozenset[str], to_state: bool, to_output: bool, to_carry: bool) -> str:
    if CARRIED in on:
        return "loop_back" if to_carry else "after_back"
    if GIVEN in on:
        return "before_back"
    if STATE in on:
        return "loop" if to_state else "after" if to_output else "before_back"
    return "before" if on else "once"


def leading_to(ends: Iterable[Value], inside: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """The nodes that some end is computed from, and the ends; looked for among `inside` only, if that is given."""
    found: set[fx.Node] = set()
    stack = [end for end in ends if end is not None]
    while stack:
        node = stack.pop()
        if node not in found and (inside is None or node in inside):
            found.add(node)
            stack += node.all_input_nodes
    return found


def explain(captured: Captured) -> str:
    """For a person: what runs step by step, what was moved out of the loops, and how large it is."""
    parts = cut(captured)
    lines: list[str] = []
    for field in fields(parts):
        nodes: list[fx.Node] = getattr(parts, field.name)
        lines.append(f"{field.name} ({_WHEN[field.name]}): {len(nodes)} operators")
        lines += [f"    {_line(node)}" for node in nodes]
    return "\n".join(lines)


_WHEN = {
    "once": "for all calls with these parameters",
    "before": "before the loop, all steps at once",
    "loop": "step by step",
    "after": "after the loop, all steps at once",
    "before_back": "before the backward loop, all steps at once",
    "loop_back": "step by step, backward",
    "after_back": "after the backward loop, all steps at once",
}


def _line(node: fx.Node) -> str:
    shape = getattr(node.meta.get("val"), "shape", None)
    size = "" if shape is None else f"  [{' x '.join(str(each) for each in shape)}]"
    arguments = ", ".join(str(each) for each in node.args)
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}({arguments}){size}"
