"""Which operators run forward and which backward, in C or by PyTorch, and what forward saves for backward.

    inputs, states --> [ front ] --> new states, outputs
                           |
                     saved | bases: what `back` reads of `front`, before any views of it
                           v
    gradients      --> [ back  ] --> gradients of inputs and states, and what is summed over time for parameters

New states and outputs are kept anyway; only other bases are saved.

C must know what is carried from step to step. An operator beside that which it does not know runs by PyTorch, for all
steps of a chunk at once, before or after the loops in C; with it go the operators that it waits for, or that wait for
it:

    before        on inputs only                             before_back   not on the gradient of the step t+1
    front         in C                                       back          in C
    after         leads to outputs, or to backward, only     after_back    leads to gradients of inputs and parameters
"""

from collections.abc import Callable, Iterable

import torch
from torch import fx

from weft.recurrent.captured import Captured
from weft.recurrent.native.c_types import TYPES, Unsupported
from weft.recurrent.native.live import live
from weft.recurrent.native.lower import refusal
from weft.recurrent.native.operators import is_view
from weft.recurrent.native.totals import Sought, place_of, sought
from weft.recurrent.parts import CARRIED, INPUT, STATE, dependences, leading_to


class Halves:
    """A captured step, cut in two. Raises Unsupported if what is carried needs an operator that C does not know."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self._on = dependences(captured, passing=INPUT)
        roles, nodes = captured.roles, captured.nodes
        ends = [each for each in (*roles.outputs, *roles.new_states) if each is not None]
        front = self.leading(ends, {*roles.inputs, *roles.states})
        pieces = [self._pieces(node, front) for node in roles.parameter_gradients]
        gradients = [each for each in (*roles.input_gradients, *roles.state_gradients) if each is not None]
        wanted = {*gradients, *(each for some in pieces for piece in some for each in piece.read)}
        given = {*roles.inputs, *roles.states, *roles.new_state_gradients, *roles.output_gradients}
        back = self.leading(wanted, given | front)
        results = {user for node in front for user in node.users if user in back and _is_result(user)}
        front, back = front | results, back - results  # what one operator yields is made at one time
        unknown = self._unknown(front, back)
        early = _with_waited(unknown, front, lambda node: STATE not in self._on[node])
        late = _with_waiting(unknown, front, lambda node: STATE in self._on[node])
        early_back = _with_waited(unknown, back, lambda node: CARRIED not in self._on[node])
        late_back = _with_waiting(unknown, back, lambda node: CARRIED in self._on[node])
        self.before, self.after, self.before_back, self.after_back = (
            [node for node in nodes if node in some] for some in (early, late, early_back, late_back)
        )
        self.torch = early | late | early_back | late_back
        """All that PyTorch runs; the lists are in order of running."""
        self.front: set[fx.Node] = front - self.torch
        self.back: set[fx.Node] = back - self.torch
        self.totals = [[piece for piece in some if not self._sums(piece, late_back)] for some in pieces]
        """For each parameter, what C must sum over time."""
        self.sums = [(j, piece) for j, some in enumerate(pieces) for piece in some if self._sums(piece, late_back)]
        """What PyTorch sums over time, with the number of the parameter."""
        self.views: set[fx.Node] = set()
        """Operators of `front` that only view what is saved: backward views it once more."""
        self.torch_views: set[fx.Node] = set()
        """Likewise, of what PyTorch reads."""
        self.bases: list[fx.Node] = []
        """Of `front`, what `back` and PyTorch read; to be saved, unless it is a new state or an output."""
        self.kept: list[fx.Node] = []
        """Of what PyTorch makes forward, what backward reads."""
        self._read(wanted)
        self.live = live(captured, self.varies)
        stored = {*roles.new_states, *roles.outputs}
        self.saved = [node for node in self.bases if node not in stored]

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

    def _pieces(self, node: fx.Node | None, front: set[fx.Node]) -> list[Sought]:
        return [] if node is None else sought(node, place_of(node), self.varies, front.__contains__)

    # -- by PyTorch -------------------------------------------------------------------------------------------------

    def _unknown(self, front: set[fx.Node], back: set[fx.Node]) -> set[fx.Node]:
        """Operators that C does not know. Raises Unsupported if what is carried needs one."""
        roles, on = self.captured.roles, self._on
        carried = {node for node in leading_to(roles.new_states) if STATE in on[node]}
        carried |= {node for node in leading_to(roles.state_gradients) if CARRIED in on[node]}
        needed = [node for node in self.captured.nodes if node in front or node in back]
        reasons = {node: why for node in needed if (why := refusal(node, self.captured, self.varies)) is not None}
        stuck = dict.fromkeys(why for node, why in reasons.items() if node in carried)
        if stuck:
            raise Unsupported(f"{'; '.join(stuck)}; what is carried from step to step needs it")
        return {*reasons}

    def _sums(self, piece: Sought, late: set[fx.Node]) -> bool:
        """Whether PyTorch sums it: what it makes itself, what is made of what it makes last, and small dtypes."""
        if piece.kind == "value" and piece.node in self.torch:
            return True
        small = piece.at.dtype not in (torch.float32, torch.float64)
        return small or any(each in late for each in piece.read)

    @property
    def summed(self) -> list[fx.Node]:
        """The nodes that PyTorch sums, and makes anew for it."""
        return list(dict.fromkeys(piece.node for _, piece in self.sums))

    @property
    def made(self) -> list[fx.Node]:
        """What PyTorch reads of what C makes backward, or carries there."""
        last = [*self.after_back, *(node for node in self.summed if node not in self.torch)]
        read = inputs_of(last) | {node for node in self.summed if node in self.back}
        carried = [node for node in self.captured.roles.new_state_gradients if node in read]
        return [*carried, *(node for node in self.captured.nodes if node in read and node in self.back)]

    def outside(self, node: fx.Node) -> bool:
        """Whether C cannot tell a value: PyTorch makes it, or it is given in a dtype that C does not have."""
        return node in self.torch or node.meta["val"].dtype not in TYPES

    # -- what is saved ----------------------------------------------------------------------------------------------

    def _read(self, wanted: set[fx.Node]) -> None:
        """Find what is read of forward, by whom."""
        by_c = wanted | inputs_of(self.back)
        by_torch_back = {*self.summed} | inputs_of([*self.before_back, *self.after_back, *self.summed])
        by_torch = by_torch_back | inputs_of(self.after)
        made = {*self.before, *self.after}
        bases: dict[fx.Node, None] = {}
        kept: dict[fx.Node, None] = {}
        for node in [each for each in self.captured.nodes if each in self.front or each in made]:
            views: list[fx.Node] = []
            base = node
            while base in self.front and is_view(base):
                views.append(base)
                base = base.all_input_nodes[0]
            for readers, seen in ((by_c, self.views), (by_torch, self.torch_views)):
                if node in readers:
                    seen.update(views)
                    bases.update({base: None} if base in self.front else {})
            if base in made and (node in by_c or node in by_torch_back):
                kept[base] = None
        self.bases, self.kept = [*bases], [*kept]


def _with_waited(unknown: set[fx.Node], half: set[fx.Node], early: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Operators that run before the loops in C, with what they wait for; several results of one go together."""
    found = leading_to([node for node in unknown if node in half and early(node)], half)
    return found | {user for node in found for user in node.users if user in half and _is_result(user)}


def _with_waiting(unknown: set[fx.Node], half: set[fx.Node], late: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Operators that run after the loops in C, with what waits for them."""
    found: set[fx.Node] = set()
    stack = [node for node in unknown if node in half and late(node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [user for user in node.users if user in half]
    return found


def inputs_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What these nodes read."""
    return {each for node in nodes for each in node.all_input_nodes}


def _is_result(node: fx.Node) -> bool:
    """Whether a node is one of an operator's several results."""
    return getattr(node.target, "__name__", "") == "getitem"
