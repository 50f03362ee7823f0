"""Which operators run forward and which backward, and what forward saves for backward.

    inputs, states --> [ front ] --> new states, outputs
                           |
                     saved | bases: what `back` reads of `front`, before any views of it
                           v
    gradients      --> [ back  ] --> gradients of inputs and states, and what is summed over time for parameters

New states and outputs are kept anyway; only other bases are saved.
"""

from collections.abc import Iterable, Sequence

from torch import fx

from weft.recurrent.captured import Captured
from weft.recurrent.native.live import live
from weft.recurrent.native.operators import RESHAPES
from weft.recurrent.native.totals import Sought, place_of, sought
from weft.recurrent.parts import dependences


class Halves:
    """A captured step, cut in two."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._on = dependences(captured)
        roles = captured.roles
        ends = [each for each in (*roles.outputs, *roles.new_states) if each is not None]
        self.front = self.leading(ends, {*roles.inputs, *roles.states})
        self.totals = [self._pieces(node) for node in roles.parameter_gradients]
        """For each parameter, what must be summed over time."""
        wanted = [each for each in (*roles.input_gradients, *roles.state_gradients) if each is not None]
        wanted += [each for pieces in self.totals for piece in pieces for each in piece.read]
        given = {*roles.inputs, *roles.states, *roles.new_state_gradients, *roles.output_gradients}
        self.back = self.leading(wanted, given | self.front)
        self.views: set[fx.Node] = set()
        """Operators of `front` that only view what is saved: backward views it once more."""
        self.bases = self._bases({each for node in self.back for each in node.all_input_nodes} | {*wanted})
        """Of `front`, what `back` reads; to be saved, unless it is a new state or an output."""
        self.live = live(captured, self.varies)
        kept = {*roles.new_states, *roles.outputs}
        self.saved = [node for node in self.bases if node not in kept]

    def varies(self, node: fx.Node) -> bool:
        """Whether a node's value is another in each step."""
        return bool(self._on[node])

    def leading(self, ends: Iterable[fx.Node], stops: set[fx.Node]) -> set[fx.Node]:
        """The operators that lead to the ends, but for constants."""
        found: set[fx.Node] = set()
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node in found or node in stops or node.op != "call_function" or not self.varies(node):
                continue
            found.add(node)
            stack += node.all_input_nodes
        return found

    def _pieces(self, node: fx.Node | None) -> Sequence[Sought]:
        return [] if node is None else sought(node, place_of(node), self.varies, self.front.__contains__)

    def _bases(self, read: set[fx.Node]) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for node in self.captured.nodes:
            if node in read and node in self.front:
                while is_view(node) and node in self.front:
                    self.views.add(node)
                    node = node.all_input_nodes[0]
                if node in self.front:
                    found[node] = None
        return list(found)


def is_view(node: fx.Node) -> bool:
    """Whether an operator only looks at another's value, or at one of its several."""
    if node.op != "call_function":
        return False
    if node.target in RESHAPES or getattr(node.target, "__name__", "") == "getitem":
        return True
    return views(node)


def views(node: fx.Node) -> bool:
    """Whether an operator's schema says that it views its first argument, and does not write into it."""
    schema = getattr(node.target, "_schema", None)
    info = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return info is not None and not info.is_write
