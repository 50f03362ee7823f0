"""A recurrent network made of one time step.

`torch.nn` has a few fixed recurrent networks. Any other cell needs a loop over time in Python, which is slow, and whose
padding, resets and truncation every project writes again. Here the user writes one step:

    class Counter(nn.Module):                        net = Recurrent(Counter())
        def forward(self, x_t, state):               result = net(x)              x: T x N x ...
            new = state + x_t                        result.outputs               T x N x ...
            return new.tanh(), new                   result.last, result.states   N x ...,  T x N x ...

The functional form is a step net over named values, with explicit links:

    result = recurrent_net(step, {"x": x}, {"h": h0}, {"h": "hidden"})
    result.outputs["hidden"]    T x N x ...       every output, including those that are not a state
    result.all["h"]             T x N x ...       every state after every step, including those that are not an output
    result.last["h"]            N x ...           usable as the next call's initial state

The idea of a step net that an engine runs over time is from Caffe2 (`recurrent_net`).
"""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from html import escape
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchweft.core.errors import UsageError
from torchweft.core.pytree import flatten, map_leaves, unflatten
from torchweft.core.validation import Validator
from torchweft.recurrent import eager
from torchweft.recurrent.backend_registry import BackendName
from torchweft.recurrent.call_arguments import RecurrentSettings, given_state, is_integer, own_state, read_call
from torchweft.recurrent.cell import Cell, Links, StepNetCell, StepSpec, StoredState, adapt, check_links
from torchweft.recurrent.masking import ALL_ROWS, read_rows, select_nested_rows
from torchweft.recurrent.plan_backends import Memory
from torchweft.recurrent.plan_cache import PlanCache, VerifyMode, check_settings
from torchweft.recurrent.prepared_call import PreparedStep, call_key, form_of
from torchweft.recurrent.sequence import Lengths, batch_first_again, pack_like, read_inputs
from torchweft.recurrent.traced_networks import register_network

MAX_STEPS = 64  # forms of arguments that `Recurrent.step` remembers


class Result(NamedTuple):
    """The results of a recurrent network. Its tensors can share memory: read them, do not write into them.

    Example:
        >>> result = weft.Recurrent(nn.LSTMCell(3, 8), backend="eager")(torch.randn(5, 2, 3))
        >>> hidden, cell = result.last
        >>> result.outputs.shape, hidden.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 8]))
    """

    outputs: Any
    """Nested as ``y_t``, T x N x ...; zero in padding. Packed if the inputs were."""
    last: Any
    """Nested as the state, N x ...: the state after each row's last valid step."""
    states: Any
    """Nested as the state, T x N x ...: the state after every step, without the initial one. None if ``memory`` keeps
    only some of them ("sqrt", or a number of bytes that is too small)."""

    @property
    def all(self) -> Any:
        """The same as ``states``, under Caffe2's name."""
        return self.states


class Recurrent(nn.Module):
    """Runs ``cell(x_t, state) -> (y_t, new_state)`` over time.

    Args:
        cell: a module (it becomes the child ``cell``) or a function. ``nn.LSTMCell``, ``nn.GRUCell`` and
            ``nn.RNNCell`` can be passed directly; their output is the hidden state. Inputs, states and outputs are
            nested tensors; an output can be ``None``. A function closes over everything else that it reads.
        links: makes ``cell`` a step net over named values, ``cell(inputs, states) -> outputs``, all dicts:
            for every state the output that feeds it, or a :class:`Window` over its last values.
        initial: the state before the first step, as tensors (stored as ``initial.0``, ``initial.1``, ... and trained
            if they are parameters), or a function or module of the first input. The default is the cell's method
            ``initial_state(first input)``; torch's own cells start from zeros.
        time_step: the cell gets the number of the step, an int, as its last argument.
        batch_first: inputs, outputs, states, mask and reset are N x T x ...; ``last`` is N x ... in any case.
        truncate: truncated backpropagation: the states' gradients stop before every step whose number is a
            multiple of it. Other gradients are complete.
        memory: the values to keep for backward: ``"full"``, ``"states"``, ``"sqrt"`` (``result.states`` is ``None``),
            or a limit in bytes for a call with its backward. Gradients have the same bits in all modes.
        backend: ``"auto"``: the fastest that can run the cell. ``"c"``, ``"triton"``, ``"python"``: a plan derived
            from the cell (see `explain`). ``"eager"``: the exact loop. A cell that cannot be captured also runs by the
            exact loop, with a warning.
        verify: ``"first"``: check a new plan against the eager loop on a few steps before it is used; ``"never"``.

    Under ``torch.compile`` the whole sequence is one operator. A graph finds its network in the process that traced it,
    as long as the module lives. ``torch.export`` unrolls the loop over T steps instead, so that the program runs
    anywhere. A ``PackedSequence`` and ``export(strict=True)`` are rejected.

    Raises ``UsageError`` that lists all invalid arguments.

    Example:
        >>> class Decay(nn.Module):
        ...     def initial_state(self, x):
        ...         return torch.zeros_like(x)
        ...     def forward(self, x, h):  # (x_t, state) -> (y_t, new state)
        ...         h = 0.9 * h + x.tanh()
        ...         return h, h
        >>> outputs, last, states = weft.Recurrent(Decay())(torch.randn(20, 4, 3), lengths=[20, 7, 0, 3])
        >>> outputs.shape, last.shape
        (torch.Size([20, 4, 3]), torch.Size([4, 3]))
    """

    def __init__(
        self,
        cell: Callable[..., Any],
        *,
        links: Links | None = None,
        initial: Any = None,
        time_step: bool = False,
        batch_first: bool = False,
        truncate: int | None = None,
        memory: Memory = "full",
        backend: BackendName = "auto",
        verify: VerifyMode = "first",
    ) -> None:
        super().__init__()
        check_arguments(cell, links, initial, time_step, truncate, memory, backend, verify)
        self.cell = cell
        self.links = links
        self.time_step = time_step
        self.batch_first = batch_first
        self.truncate = truncate
        self.memory: Memory = memory
        self.backend: BackendName = backend
        self.verify: VerifyMode = verify
        self.initial = initial if initial is None or callable(initial) else StoredState(initial)
        self._register()

    def forward(
        self,
        inputs: Any,
        state: Any = None,
        *,
        lengths: Lengths | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        start: int = 0,
    ) -> Result:
        """Run over a whole sequence, or over the next chunk of one with ``state=result.last``.

        Args:
            inputs: tensors T x N x ..., nested as the cell takes them. T alone for a value that all rows share, T x D
                without rows. Other leaves go to every step whole. Or a ``PackedSequence``.
            state: the state before the first step, N x ... A state with one row, or with fewer axes than the input
                (and so without rows), is shared by all rows and gets the sum of their gradients.
            lengths: N integers from 0 to T. Past its length a row keeps its state and its output is zero.
            mask: T x N bool. Where it is false a row keeps its state and its output is zero. It can have holes.
            reset: T x N bool. Where it is true, the initial state replaces a row's state before the step. It is the
                network's own if it has one, so that chunks agree with the whole sequence, else ``state``.
            start: the number of the first step, for ``time_step`` and ``truncate``.

        Padding is never read: it can hold NaN, and no gradient flows through it. With T = 0 the cell runs once on a
        placeholder, to determine the shapes of its outputs.

        Raises ``SpecError`` or ``UsageError`` that lists all invalid arguments, and ``SpecError`` if the cell returns a
        value that does not fit. Errors of the cell itself get a note that names the step.
        """
        if torch.compiler.is_exporting():
            # Unrolled, because an exported program must run where this network does not exist.
            options: dict[str, Any] = {"lengths": lengths, "mask": mask, "reset": reset, "start": start}
            return self.run_plainly(inputs, state, plans=PlanCache("eager"), **options)
        if torch.compiler.is_compiling():
            # Imported here, because it imports Dynamo. That takes seconds, but under tracing it is already there.
            from torchweft.recurrent.custom_op import traced_call  # noqa: PLC0415

            options = {"lengths": lengths, "mask": mask, "reset": reset}
            options = {name: value for name, value in options.items() if value is not None}
            return Result(*traced_call(self, self._handle, inputs, state, options, start))
        plain = lengths is None and mask is None and reset is None and type(start) is int and start == 0
        if plain and self.truncate is None and self.links is None and not self.time_step:
            return self._run_prepared(inputs, state)
        return self.run_plainly(inputs, state, lengths=lengths, mask=mask, reset=reset, start=start)

    def run_plainly(self, inputs: Any, state: Any = None, *, plans: PlanCache | None = None, **rows: Any) -> Result:
        """`forward` without a check for tracing. `plans` replace the network's own."""
        cell = self._loop_cell()
        settings = self._call_settings(cell, self._current_plans() if plans is None else plans)
        return run_network(cell, settings, inputs, state, **rows)

    def _run_prepared(self, inputs: Any, state: Any) -> Result:
        """`run_plainly` for a call without rows, `truncate` and step numbers. It skips what an earlier one did."""
        plans, initial, made = self._current_plans(), self.initial, None
        key = call_key(self.cell, initial, inputs, state, self.batch_first)
        prepared = None if key is None else plans.find_prepared(key)
        alone = prepared is not None and prepared.one_step is not None and inputs.shape[0] == 1
        tensors = None if prepared is None else [] if alone else prepared.unchanged_tensors()
        if prepared is not None and tensors is not None:
            if state is None and (make := prepared.cell.own_initial() if initial is None else initial) is not None:
                made = make(inputs[0])
            if alone and prepared.one_step is not None and (state is not None or prepared.accepts_own(made)):
                return Result(*prepared.one_step.run_sequence(inputs, made if state is None else state))
            if state is not None or prepared.accepts_own(made):
                return Result(*plans.run_prepared(prepared, inputs, made if state is None else state, tensors))
        cell = self._loop_cell()
        return run_network(cell, self._call_settings(cell, plans), inputs, state, key=key, made=made)

    def __setattr__(self, name: str, value: Any) -> None:
        # Prepared calls would keep a former cell and its tensors alive.
        if name == "cell" and "_plans" in self.__dict__:
            self._plans.forget_prepared()
            self._steps.clear()
        super().__setattr__(name, value)

    def step(self, x: Any, state: Any = None, *, t: int = 0, reset: Tensor | None = None) -> tuple[Any, Any]:
        """One step, number ``t``, of a stream: ``(y, new_state)``, the same numbers as in the whole sequence.

        ``x`` is nested as the cell takes it, N x ...; ``state`` is the one that the step before returned, or ``None``.
        Where ``reset``, N bool, is true, a row starts from the network's own initial state, as in :meth:`forward`.
        """
        key = None
        if state is not None and reset is None and self.truncate is None and self.links is None:
            key = (id(self.cell), id(self.initial), self.time_step, form_of(x), form_of(state))
            prepared = None if None in key else self._steps.get(key)
            if prepared is not None:
                return prepared.run(x, state, t)
        cell = self._loop_cell()
        settings = self._call_settings(cell)
        leaves, structure = flatten(x)
        one_step = [leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with Validator(f"cell {cell.name} cannot take a step on these arguments") as check:
            read = read_inputs(
                unflatten(structure, one_step), batch_first=False, certain=reset is not None, check=check
            )
            table = reset.unsqueeze(0) if isinstance(reset, Tensor) else reset
            flags = read_rows(read, None, None, table, batch_first=False, check=check).reset
            can_reset = reset is None or settings.initial is not None
            check.require(can_reset, f"reset was given, but neither the network nor {cell.name} has an initial state")
            entered = given_state(cell, settings, state, read, check)
        assert read is not None
        fresh = None if state is not None and flags is None else own_state(cell, settings, read, ALL_ROWS, None)
        entered = fresh if state is None else entered
        border = StepSpec.of_states(entered, None if flags is None else read.rows)
        # As in the loop: the cut comes before the reset, because the restored state keeps its gradient.
        if eager.is_cut(t, self.truncate):
            entered = map_leaves(torch.detach, entered)
        if flags is not None and state is not None:
            entered = select_nested_rows(~flags[0], entered, fresh)
        y, new = eager.call_cell(cell, x, entered, t)
        result = y, cell.leave_loop(unflatten(border.structure, border.accept(new, t, cell)))
        if key is not None and None not in key:
            if len(self._steps) >= MAX_STEPS:
                self._steps.clear()
            self._steps[key] = PreparedStep(cell, entered)
        return result

    def forecast(
        self,
        steps: int,
        inputs: Any,
        state: Any = None,
        *,
        lengths: Lengths | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> dict[str, int]:
        """Bytes that a call over ``steps`` steps takes with its backward, for each of ``memory``'s modes by name.

        The other arguments are those of :meth:`forward`, for a sequence of the same kind. One step is enough, because a
        plan does not depend on T. Only the few steps that build a plan are run. Outputs, states and the returned
        gradients count; the arguments do not. For loops in Python it is an upper bound.

        Raises as :meth:`forward`, and ``UsageError`` if the eager loop would run the call, because it keeps all values.
        """
        if not is_integer(steps) or steps < 1:
            raise UsageError(f"steps is {steps!r}, wanted at least 1")
        cell = self._loop_cell()
        job, _ = read_call(cell, self._call_settings(cell), inputs, state, lengths=lengths, mask=mask, reset=reset)
        return self._current_plans().forecast(job, steps)

    def explain(self) -> str:
        """Readable report: for every kind of sequence, the operators that run step by step, those that were moved out
        of the loop, or why the eager loop runs it. Empty until a sequence was run. A notebook folds its parts."""
        return FoldedText("\n\n".join([choice.explain() for choice in self._plans.choices()]))

    def why(self) -> list[tuple[str, str, str]]:
        """For every kind of sequence that was run: the kind, the backend that runs it, and the reason."""
        return [(choice.kind, choice.backend, choice.why) for choice in self._plans.choices()]

    def __getstate__(self) -> dict[str, Any]:
        # Plans refer to these parameters, and the handle to this network. A copy must not share either.
        return {name: value for name, value in self.__dict__.items() if name not in ("_plans", "_steps", "_handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._register()

    def _register(self) -> None:
        self._plans = PlanCache(self.backend, self.memory, self.verify)
        self._steps: dict[Hashable, PreparedStep] = {}  # of `step`, by the form of its arguments
        self._handle = register_network(self)

    def extra_repr(self) -> str:
        options = {"links": self.links, "truncate": self.truncate}
        words = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        words += [f"{name}=True" for name in ("time_step", "batch_first") if getattr(self, name)]
        return ", ".join(words if isinstance(self.cell, nn.Module) else [f"cell={self._loop_cell().name}", *words])

    def _loop_cell(self) -> Cell:
        if self.links is not None:
            return StepNetCell(self.cell, self.links, time_step=self.time_step)
        return adapt(self.cell, time_step=self.time_step)

    def _current_plans(self) -> PlanCache:
        # The plans. They are replaced if an attribute was assigned since they were made.
        settings = (self.backend, self.memory, self.verify)
        if self._plans.settings != settings:
            with Validator("invalid settings of a Recurrent") as check:
                check_settings(check, self.memory, self.backend, self.verify)
            self._plans = PlanCache(*settings)
        return self._plans

    def _call_settings(self, cell: Cell, plans: PlanCache | None = None) -> RecurrentSettings:
        make = cell.own_initial() if self.initial is None else self.initial
        # Both can have been assigned since the constructor checked them.
        if self.truncate is not None or not (make is None or callable(make)):
            with Validator("invalid settings of a Recurrent") as check:
                _check_truncate(check, self.truncate)
                kind = type(make).__name__
                check.require(
                    make is None or callable(make),
                    f"initial is of type {kind}, wanted a function or module; tensors go to a new Recurrent",
                )
        return RecurrentSettings(make, self.batch_first, self.truncate, plans)


def check_arguments(
    cell: Any, links: Any, initial: Any, time_step: bool, truncate: Any, memory: Any, backend: Any, verify: Any
) -> None:
    with Validator("invalid arguments of Recurrent") as check:
        _check_cell(check, cell)
        if links is not None:
            check_links(check, links)
        if isinstance(cell, nn.RNNCellBase):
            kind = type(cell).__name__
            check.require(links is None, f"links need a step net over dicts, but cell is torch's {kind}")
            check.require(not time_step, f"time_step=True, but torch's {kind} takes no step number")
        check_settings(check, memory, backend, verify)
        _check_truncate(check, truncate)
        if initial is not None and not callable(initial):
            kinds = sorted({type(leaf).__name__ for leaf in flatten(initial)[0] if not isinstance(leaf, Tensor)})
            check.require(
                not kinds, f"initial holds {', '.join(kinds)}, wanted nested tensors, or a function of the first input"
            )


def _check_cell(check: Validator, cell: object) -> None:
    if isinstance(cell, nn.RNNBase):
        kind = cell.mode.partition("_")[0]  # RNN_TANH and RNN_RELU are both an RNN
        check.add(
            f"cell is {cell!r}, which runs over time by itself, wanted a module or a function of one time step: "
            f"nn.{kind}Cell, or weft.recurrent.{kind} instead of both"
        )
    elif not callable(cell):
        check.add(f"cell is {cell!r}, wanted a module or a function of one time step")


def _check_truncate(check: Validator, truncate: Any) -> None:
    valid = truncate is None or (is_integer(truncate) and truncate >= 1)
    check.require(valid, f"truncate is {truncate!r}, wanted at least 1 step, or None")


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
    backend: BackendName = "auto",
    verify: VerifyMode = "first",
) -> Result:
    """Run ``step(inputs, states) -> outputs`` over time; every value is a dict by name.

    Args:
        inputs: sequences, T x N x ... each.
        states: for every state its value before the first step, N x ...; 1 x ... is shared by all rows. A windowed one
            is k x N x ..., oldest first.
        links: for every state the name of the output that feeds it, or a :class:`Window`.
        references: passed to ``step`` as the third dict, if given.
        time_step: ``step`` gets the number of the step as its last argument.
        lengths, mask, reset, truncate, start: as for :class:`Recurrent`; a reset restores ``states``.
        memory, backend, verify: as for :class:`Recurrent`. Plans are cached in the process, keyed by ``step`` and all
            that it closes over. Values that the model computes, such as an encoded source, belong in ``references``.

    Returns a :class:`Result` with dicts by name. Raises as :class:`Recurrent` does.

    Example:
        >>> def step(inputs, states):
        ...     return {"level": 0.5 * states["level"] + inputs["x"]}
        >>> start = {"level": torch.zeros(1, 1)}
        >>> result = weft.recurrent_net(step, {"x": torch.ones(3, 1, 1)}, start, {"level": "level"})
        >>> result.outputs["level"].flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    with Validator("invalid arguments of recurrent_net") as check:
        _check_cell(check, step)
        check_links(check, links)
        _check_truncate(check, truncate)
        check_settings(check, memory, backend, verify)
        if not isinstance(cast(object, inputs), Mapping):
            check.mismatch(f"inputs is of type {type(inputs).__name__}, wanted a dict of sequences by name")
    # A new cell at every call. Its plans are found again by the key of `step`, not by this object.
    cell = StepNetCell(step, links, references=references, time_step=time_step)
    settings = RecurrentSettings(truncate=truncate, plans=_shared_plans(backend, memory, verify))
    return run_network(cell, settings, dict(inputs), states, lengths=lengths, mask=mask, reset=reset, start=start)


@lru_cache(maxsize=16)
def _shared_plans(backend: BackendName, memory: Memory, verify: VerifyMode) -> PlanCache:
    # The plans of all step nets in this process with these settings.
    return PlanCache(backend, memory, verify)


def run_network(cell: Cell, settings: RecurrentSettings, inputs: Any, state: Any, **rows: Any) -> Result:
    """Implementation of `Recurrent.forward` and `recurrent_net`."""
    packed = inputs if isinstance(inputs, PackedSequence) else None
    job, lengths = read_call(cell, settings, inputs, state, **rows)
    # A packed input is time first, regardless of `batch_first`. So are its outputs, but not its states.
    outputs, last, states = job.run() if settings.plans is None else settings.plans.run(job)
    if settings.batch_first and states is not None:
        states = map_leaves(partial(batch_first_again, rows=job.inputs.rows), states)
    if packed is not None and isinstance(lengths, Tensor):
        outputs = map_leaves(partial(pack_like, lengths=lengths, packed=packed), outputs)
    elif settings.batch_first:
        outputs = map_leaves(partial(batch_first_again, rows=job.inputs.rows), outputs)
    axis = 2 if settings.batch_first else 1
    return Result(outputs, cell.leave_loop(last), None if states is None else cell.leave_loop(states, axis))


class FoldedText(str):
    """Text that a notebook shows with its indented lines folded below their headings."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        parts: list[tuple[str, list[str]]] = []
        for line in self.splitlines():
            if line[:1].isspace() and parts:
                parts[-1][1].append(line)
            elif line.strip():
                parts.append((line, []))
        folded = [
            f"<details><summary>{escape(heading)}</summary><pre>{escape(chr(10).join(below))}</pre></details>"
            if below
            else f"<p><b>{escape(heading)}</b></p>"
            for heading, below in parts
        ]
        return f"<div>{''.join(folded)}</div>"
