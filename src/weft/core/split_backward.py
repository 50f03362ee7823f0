"""Backward in two parts: the gradients that others wait for now (I), those of the parameters later (W).

Zero-bubble schedules (Qi et al., arXiv 2401.10241) fill idle time with W. The graph says where to part it: at the
*frontier*, the nodes that lie on a way to the inputs and have an edge into a part that leads to parameters only.

    root --- N2 --------- N1 --------- input         I: walk to the inputs; catch what arrives at N2 and N1
              |            |
              M2 = p2      M1 -- p1                  W: from each N over its edge to M, then on to the parameters

So no operator works twice: an addmm computes its input's gradient in I and its weight's in W. A Python autograd
function computes all its gradients whenever it is called, so what it has for the parameters is caught in I.
Where one M hangs on several N (a weight that is used twice), the same way would be walked twice; then I does all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any
"""A node of the autograd graph; torch has no one public type for them."""


class _Frontier(NamedTuple):
    """One node of the frontier: the outputs at which gradients arrive, and its edges to parameters."""

    node: Node
    arriving: list[GradientEdge]
    leaving: list[GradientEdge]


class SplitBackward:
    """One backward of one graph: `inputs` now, `parameters` when asked."""

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        seeds: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        self._parameters = list(parameters)
        self._roots, self._seeds, self._inputs = list(roots), list(seeds), list(inputs)
        self._frontier = _frontier(roots, inputs, parameters) if inputs else None
        self._caught: list[Tensor | None] = []
        self._whole: list[Tensor | None] | None = None

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the inputs. The graph stays for `parameter_gradients`."""
        if not self._inputs:
            return []  # nobody waits: all is left for later
        if self._frontier is None:
            found = _grad(self._roots, [*self._inputs, *self._parameters], self._seeds)
            self._whole = found[len(self._inputs) :]
        else:
            edges = [edge for each in self._frontier for edge in _caught_edges(each)]
            found = _grad(self._roots, [*self._inputs, *edges], self._seeds, keep=True)
            self._caught = found[len(self._inputs) :]
        result = found[: len(self._inputs)]
        self._roots, self._seeds, self._inputs = [], [], []
        return result

    def parameter_gradients(self) -> list[Tensor | None]:
        """The gradients of the parameters, in their order; the graph is free afterwards."""
        if self._whole is not None:
            return self._whole
        if self._frontier is None:
            return _grad(self._roots, self._parameters, self._seeds)
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        caught = iter(self._caught)
        for each in self._frontier:
            arrived = [next(caught) for _ in _caught_edges(each)]
            found = arrived if _computes_all(each.node) else _across(each, arrived)
            for edge, gradient in zip(each.leaving, found, strict=True):
                if gradient is not None:
                    edges.append(edge)
                    gradients.append(gradient)
        self._frontier, self._caught = [], []
        if not edges:
            return [None] * len(self._parameters)
        return _grad(edges, self._parameters, gradients)


def _grad(
    roots: Sequence[Tensor | GradientEdge],
    wanted: Sequence[Tensor | GradientEdge],
    seeds: Sequence[Tensor],
    *,
    keep: bool = False,
) -> list[Tensor | None]:
    grad = cast(Any, torch.autograd.grad)  # its hints know tensors or edges, not both in one list
    return list(grad(roots, wanted, seeds, retain_graph=keep, allow_unused=True))


def _computes_all(node: Node) -> bool:
    """Whether a node computes all its gradients whenever it is called: a Python autograd function."""
    return isinstance(node, BackwardCFunction)


def _caught_edges(each: _Frontier) -> list[GradientEdge]:
    """What I has to catch for this node: its weights' gradients themselves, or what they are computed from."""
    return each.leaving if _computes_all(each.node) else each.arriving


def _across(each: _Frontier, arrived: Sequence[Tensor | None]) -> list[Tensor | None]:
    """From what arrived at a node to the gradients on its edges to parameters."""
    present = [(edge, gradient) for edge, gradient in zip(each.arriving, arrived, strict=True) if gradient is not None]
    if not present:
        return [None] * len(each.leaving)
    return _grad([edge for edge, _ in present], each.leaving, [gradient for _, gradient in present])


def _frontier(
    first: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[_Frontier] | None:
    """The frontier of a graph; None where it cannot be parted."""
    order = children_first([edge.node for edge in first])
    to_inputs = _reaching(order, [get_gradient_edge(tensor).node for tensor in inputs])
    to_parameters = _reaching(order, [get_gradient_edge(tensor).node for tensor in parameters])
    if any(edge.node not in to_inputs and edge.node in to_parameters for edge in first):
        return None  # an output that depends on parameters only
    arriving: dict[Node, set[int]] = {}
    for edge in first:
        arriving.setdefault(edge.node, set()).add(edge.output_nr)
    found: list[_Frontier] = []
    owners: dict[Node, Node] = {}
    for node in reversed(order):
        for child, number in node.next_functions:
            if child is not None:
                arriving.setdefault(child, set()).add(number)
        if node not in to_inputs:
            continue
        leaving = [
            GradientEdge(child, number)
            for child, number in dict.fromkeys(node.next_functions)
            if child in to_parameters and child not in to_inputs
        ]
        if leaving:
            found.append(_Frontier(node, [GradientEdge(node, n) for n in sorted(arriving[node])], leaving))
        for edge in leaving:
            if owners.setdefault(edge.node, node) is not node:
                return None
    return found


def children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes of the graph, each after all that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def _reaching(order: Sequence[Node], goals: Sequence[Node]) -> set[Node]:
    """The nodes from which a way leads to one of the goals."""
    found = set(goals)
    for node in order:
        if any(child in found for child, _ in node.next_functions):
            found.add(node)
    return found
