"""A loop over time as Python source: the operators that must run step by step, and nothing else.

    def loop(T, reference..., row lists..., state..., save...):
        for step in range(T):
            v_x = rows_x[step]                what was made for all steps before the loop
            v_h = tanh(addmm(v_x, v_s, v_w))  the part's operators, by PyTorch's own functions
            save_h(v_h)                       what parts after the loop read, if it cannot be written in place
            v_s = v_h                         new state to state
        return [v_s]

Written once per plan, whatever T. The backward loop is made by the same function, with `step` running down.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

_aten = cast(Any, torch.ops.aten)
_QUICK: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.tanh.default: torch.tanh,
    _aten.exp.default: torch.exp,
    _aten.neg.default: torch.neg,
    _aten.rsub.Scalar: torch.rsub,
    _aten.relu.default: torch.relu,
    _aten.addmm.default: torch.addmm,
    _aten.addcmul.default: torch.addcmul,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.t.default: torch.t,
    _aten.split.Tensor: torch.unsafe_split,
}
"""The same operators by a shorter way: a call through the dispatcher's Python object costs about twice as much."""

_INTO: dict[Any, tuple[Any, str]] = {
    **{
        target: (quick, "out")
        for target, quick in _QUICK.items()
        if quick not in (torch.relu, torch.t, torch.rsub, torch.unsafe_split)
    },
    _aten.sigmoid_backward.default: (_aten.sigmoid_backward.grad_input, "grad_input"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
}
"""Operators that can write their result into a given tensor: the function, and the argument's name."""


@dataclass(frozen=True)
class Loop:
    """A loop to be written. Nodes stand for their values in one step.

    `rows` come as one list per node with a value per step; `constants` are the same in all steps; `carried` are
    the values that go from step to step, with `ends` what they become; `saved` are kept for all steps: written into a
    row of a buffer where the operator can do that, else collected into a list. With `added`
    every carried value gets a value of the step added to it before it is read.
    """

    nodes: Sequence[fx.Node]
    constants: Sequence[fx.Node]
    rows: Sequence[fx.Node]
    carried: Sequence[fx.Node]
    ends: Sequence[fx.Node | None]
    saved: Sequence[fx.Node]
    backward: bool
    added: bool = False

    @property
    def written(self) -> list[fx.Node]:
        """The saved nodes whose values are written into rows of a buffer."""
        made = set(self.nodes)
        return [node for node in self.saved if node in made and node.target in _INTO and not node.kwargs]

    def compile(self) -> "CompiledLoop":
        """Write the source and make a function of it."""
        names: dict[str, Any] = {"zero": torch.zeros_like}
        lines = [f"    {_name(node)} = rows_{node}[step]" for node in self.rows]
        if self.added:
            lines += [f"    {_name(node)} = {_name(node)} + added_{node}[step]" for node in self.carried]
        written = self.written
        collected = [node for node in self.saved if node not in written]
        for index, node in enumerate(self.nodes):
            if node in written:
                names[f"op{index}"], into = _INTO[node.target]
                lines.append(f"    {_name(node)} = rows_{node}[step]")
                lines.append(f"    op{index}({_arguments(node, names)}, {into}={_name(node)})")
            else:
                names[f"op{index}"] = _QUICK.get(node.target, node.target)
                lines.append(f"    {_name(node)} = op{index}({_arguments(node, names)})")
        lines += [f"    save_{node}({_name(node)})" for node in collected]
        carried = [_name(each) for each in self.carried]
        ends = [f"zero({kept})" if end is None else _name(end) for kept, end in zip(carried, self.ends, strict=True)]
        if ends:
            lines.append(f"    {', '.join(carried)}, = {', '.join(ends)},")
        parameters = [_name(each) for each in self.constants] + carried
        parameters += [f"rows_{each}" for each in (*self.rows, *written)] + [f"save_{each}" for each in collected]
        parameters += [f"added_{each}" for each in self.carried] if self.added else []
        steps = "range(T - 1, -1, -1)" if self.backward else "range(T)"
        body = "\n".join(lines or ["    pass"])
        source = (
            f"def loop(T, {', '.join(parameters)}):\n  for step in {steps}:\n{body}\n  return [{', '.join(carried)}]\n"
        )
        exec(compile(source, "<recurrent loop>", "exec"), names)  # the source is made of our own names only
        return CompiledLoop(self, source, names["loop"])


@dataclass(frozen=True)
class CompiledLoop:
    """A loop as a function, and the source that it was made of."""

    loop: Loop
    source: str
    function: Callable[..., list[torch.Tensor]]

    def run(
        self,
        steps: int,
        constants: Mapping[fx.Node, Any],
        carried: Sequence[torch.Tensor],
        rows: Mapping[fx.Node, Sequence[torch.Tensor]],
        added: Sequence[Sequence[torch.Tensor]] = (),
    ) -> tuple[list[torch.Tensor], dict[fx.Node, list[torch.Tensor]]]:
        """What is carried out of the last step, and for every collected node its values in the order of time.

        `rows` hold what is read, and for the written nodes what is written to.
        """
        written = self.loop.written
        saved: dict[fx.Node, list[torch.Tensor]] = {node: [] for node in self.loop.saved if node not in written}
        last = self.function(
            steps,
            *(constants[node] for node in self.loop.constants),
            *carried,
            *(rows[node] for node in (*self.loop.rows, *written)),
            *(each.append for each in saved.values()),
            *added,
        )
        if self.loop.backward:
            for each in saved.values():
                each.reverse()
        return last, saved


def _name(node: fx.Node) -> str:
    """The variable that holds the node's value: a node may be called ``t``, or like a function of ours."""
    return f"v_{node}"


def _arguments(node: fx.Node, names: dict[str, Any]) -> str:
    """The arguments as source; what is neither node nor plain number gets a name."""

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _name(value)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(text(each) for each in cast("list[Any]", value)) + "]"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        name = f"k{len(names)}"
        names[name] = value
        return name

    return ", ".join([*map(text, node.args), *(f"{key}={text(value)}" for key, value in node.kwargs.items())])
