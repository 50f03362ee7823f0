"""Skippable layers: modules that stash tensors for later layers, and pop those of earlier ones.

The decorator replaces the class by a class of shells around the user's module, so the code of a model does not change.
Outside of such a ``forward`` the two commands do nothing. A shell is an ordinary `nn.Module`, for which hooks,
``.train()``, `copy.deepcopy` and pickling work.

    Sequential --calls--> Skippable --calls--> the user's module      a generator
                              | <--yields commands--+
                              +--save, load--> current skip tracker

The user's module is the attribute ``.module`` of the shell. Two hooks remove that from state-dict keys on saving and
add it on loading, so the wrapped and the bare model can load each other's state. `named_parameters` has the real names
(``0.module.weight``).
"""

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

from torch import Tensor, nn

from torchweft.core.errors import SkipError, SkipWiringError, join_faults
from torchweft.pipeline.skip.tracker import Key, Namespace, SkipTracker, current_skip_tracker, describe

INNER = "module."


def shorten(layer: nn.Module, state: MutableMapping[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """Hook after saving: ``<prefix>module.weight`` becomes ``<prefix>weight``, in place and in order."""
    long = prefix + INNER
    for key in [key for key in state if key.startswith(long)]:
        state[prefix + key.removeprefix(long)] = state.pop(key)
    versions: dict[str, dict[str, Any]] = getattr(state, "_metadata", None) or {}
    # Layers read their format version under their own name. A bare model looks up the short name, and a wrapped model
    # the long one, so both are written.
    for name in [name for name in versions if f"{name}.".startswith(long)]:
        short = prefix + f"{name}.".removeprefix(long)
        versions[short.removesuffix(".")] = dict(versions[name])


def lengthen(layer: nn.Module, state: MutableMapping[str, Any], prefix: str, *lists: Any) -> None:
    """Hook before loading: ``<prefix>weight`` becomes ``<prefix>module.weight``, in place. Long keys stay."""
    layer.__dict__["_loading"] = (prefix, lists[-1])
    inner = layer.get_submodule("module")
    owns_module = any(name == "module" for name, _ in inner.named_children())
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if owns_module or not name.startswith(INNER):
            state[prefix + INNER + name] = state.pop(key)


def shorten_faults(layer: nn.Module, faults: Any) -> None:
    """Hook after loading: faults name ``<prefix>weight``, as `state_dict` does."""
    # `faults` has neither the prefix nor the messages, so `lengthen` has noted both.
    prefix, messages = layer.__dict__.pop("_loading")
    long = prefix + INNER
    for keys in (faults.missing_keys, faults.unexpected_keys):
        keys[:] = [prefix + key.removeprefix(long) if key.startswith(long) else key for key in keys]
    for quote in (" ", '"'):
        messages[:] = [message.replace(quote + long, quote + prefix) for message in messages]


@dataclass(frozen=True, slots=True)
class stash:
    """Store a tensor, or None, for the layers that declare ``pop=[name]``.

    Example:
        >>> weft.stash("early", torch.ones(1))  # to be yielded: see `skippable`
        stash(name='early', tensor=tensor([1.]))
    """

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True)
class pop:
    """Request the tensor that was stashed under this name.

    Example:
        >>> weft.pop("early")  # to be yielded: see `skippable`
        pop(name='early')
    """

    name: str


class CommandHandler:
    def __init__(self, layer: "Skippable[..., Any]", tracker: SkipTracker) -> None:
        self._layer, self._tracker = layer, tracker
        self._name = layer.module_cls.__name__
        self.stashed: set[str] = set()
        self._popped: dict[str, Tensor | None] = {}

    def drive(self, commands: Generator[Any, Any, Any]) -> Any:
        advance: Callable[[], object] = partial(next, commands)
        while True:
            try:
                command = advance()
            except StopIteration as stop:
                return stop.value
            # A fault is raised at the yield, so that the traceback ends in the line of the user's layer.
            try:
                advance = partial(commands.send, self._answer(command))
            except (SkipError, SkipWiringError) as fault:
                advance = partial(commands.throw, fault)

    def _answer(self, command: object) -> Tensor | None:
        if not isinstance(command, (stash, pop)):
            raise SkipWiringError(
                f"{self._name} yielded {type(command).__name__}; yield stash(name, tensor) or pop(name), and return "
                "the output of the layer instead of yielding it"
            )
        name, layer = command.name, self._layer
        declared = layer.stashable_names if isinstance(command, stash) else layer.poppable_names
        if name not in declared:
            did, word = ("stashed", "stash") if isinstance(command, stash) else ("popped", "pop")
            raise SkipError(
                f"{self._name} {did} {name!r}, which it does not declare: its {word}= has "
                f"{', '.join(map(repr, sorted(declared))) or 'no name'}; add {name!r} to the {word}= of @skippable"
            )
        key = layer.key(name)
        if isinstance(command, stash):
            return self._stash(key, command.tensor)
        if name not in self._popped:
            try:
                self._popped[name] = self._tracker.load(*key)
            except SkipError as fault:
                raise SkipError(f"{self._name}: {fault}") from None
        return self._popped[name]

    def _stash(self, key: Key, value: object) -> None:
        if key[1] in self.stashed:
            raise SkipError(
                f"{self._name} stashed {describe(key)} twice in one forward; stash the second tensor under another name"
            )
        if not (value is None or isinstance(value, Tensor)):
            raise SkipError(
                f"{self._name} stashed a {type(value).__name__} as {describe(key)}; stash a tensor or None, and "
                "several tensors under several names"
            )
        self._tracker.save(*key, value)
        self.stashed.add(key[1])

    def finish(self) -> None:
        layer = self._layer
        missing = [("stashable but not stashed", name) for name in sorted(layer.stashable_names - self.stashed)]
        missing += [("poppable but not popped", name) for name in sorted(layer.poppable_names - self._popped.keys())]
        if missing:
            faults = [f"{describe(layer.key(name))} was declared as {what}" for what, name in missing]
            raise SkipError(
                join_faults(f"{self._name} broke its skip declaration by the end of its forward:", faults)
                + "\nstash and pop on every path through forward (None can be stashed), "
                "or remove the names from @skippable"
            )


P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


class Skippable(nn.Module, Generic[P, M]):
    """Base of all classes made by `skippable`: a shell around ``module``, an instance of ``module_cls``. Calling it
    raises SkipError if the layer breaks its declaration, and SkipWiringError (a TypeError) if it yields anything except
    `stash` and `pop`. Without declarations, the user's ``forward`` can be a plain function."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()
    module: M

    def __init__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        super().__init__()
        self.add_module("module", self.module_cls(*args, **kwargs))
        self.register_state_dict_post_hook(shorten)
        self.register_load_state_dict_pre_hook(lengthen)
        self.register_load_state_dict_post_hook(shorten_faults)
        self._keys: dict[str, Key] = {name: (None, name) for name in sorted(self.stashable_names | self.poppable_names)}

    def key(self, name: str) -> Key:
        return self._keys[name]

    def isolate(self, ns: Namespace | None, only: Iterable[str] | None = None) -> "Skippable[P, M]":
        """Put all skip tensors of this layer, or those in `only`, into a namespace. Returns the layer. Raises
        SkipWiringError if `only` has names that the layer does not declare."""
        names = self._keys.keys() if only is None else _distinct_names("only", only)
        unknown = sorted(set(names) - self._keys.keys())
        if unknown:
            raise SkipWiringError(
                f"{self.module_cls.__name__} cannot isolate {unknown}: it declares {list(self._keys)}; "
                "correct only=, or the names in @skippable"
            )
        self._keys = {**self._keys, **{name: (ns, name) for name in names}}
        return self

    def stashable(self) -> Iterator[Key]:
        return map(self.key, sorted(self.stashable_names))

    def poppable(self) -> Iterator[Key]:
        return map(self.key, sorted(self.poppable_names))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tracker = current_skip_tracker()
        handler = CommandHandler(self, tracker)
        output: Any = self.module(*args, **kwargs)
        if isinstance(output, Generator):
            try:
                output = handler.drive(cast("Generator[Any, Any, Any]", output))
            finally:
                # Also after an error, or the tensors of a failed forward would stay until the next one.
                tracker.stashed_by(self, [self._keys[name] for name in handler.stashed])
        handler.finish()
        return output

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises SkipWiringError for a tensor, which belongs to the user's module."""
        # functional_call needs the names of named_parameters(). With the keys of a state dict it would set an attribute
        # of the shell, which no code reads.
        if isinstance(value, Tensor):
            raise SkipWiringError(
                f"tensor {name!r} was set on the shell of a skippable {self.module_cls.__name__}, which has no "
                f"tensors: set it on .module, or name it 'module.{name}'"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer, although its class and the user's class have the same name."""
        owner = next(cls for cls in type(self).__mro__ if "module_cls" in vars(cls))
        place: object = sys.modules.get(owner.__module__)
        for part in owner.__qualname__.split("."):
            place = getattr(place, part, None)
        if place is owner:  # @skippable: the name refers to the shell, so pickle finds the user's class through it
            owner.module_cls.__qualname__ = f"{owner.__qualname__}.module_cls"
        elif type(self) is owner:  # skippable(...)(Class): the name refers to the user's class, so the shell is rebuilt
            return _blank, (owner.module_cls, owner.stashable_names, owner.poppable_names), self.__dict__
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"@skippable({self.module!r})"


def _distinct_names(what: str, names: Iterable[str]) -> frozenset[str]:
    # Each of its letters would be a name.
    if isinstance(names, str):
        raise SkipWiringError(f"{what}={names!r} is one string; give a list of names: [{names!r}]")
    return frozenset(names)


_Shells = weakref.WeakValueDictionary[tuple[frozenset[str], frozenset[str]], type[Skippable[..., Any]]]
# Shells by the user's class. One table with the class in its keys would keep every class alive, and with it the globals
# of its methods: each run of a notebook's cell would leak its pipes.
_shells_of: weakref.WeakKeyDictionary[type[nn.Module], _Shells] = weakref.WeakKeyDictionary()


def _class_around(
    module_cls: type[nn.Module], stashed: frozenset[str], popped: frozenset[str]
) -> type[Skippable[..., Any]]:
    # One class for equal declarations, because isinstance and pickle compare classes.
    shells = _shells_of.setdefault(module_cls, weakref.WeakValueDictionary())
    known = shells.get((stashed, popped))
    if known is not None:
        return known
    attributes = {"module_cls": module_cls, "stashable_names": stashed, "poppable_names": popped}
    attributes |= {name: getattr(module_cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    shell = type(module_cls.__name__, (Skippable,), attributes)
    # Another thread can have made the same class at this moment.
    return shells.setdefault((stashed, popped), shell)


def _blank(module_cls: type[nn.Module], stashed: frozenset[str], popped: frozenset[str]) -> Skippable[..., Any]:
    cls = _class_around(module_cls, stashed, popped)
    return cls.__new__(cls)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Callable[P, M]], type[Skippable[P, M]]]:
    """Declare the skip tensors that a module class stashes and pops.

    The ``forward`` of the class is a generator. The result is a subclass of `Skippable` with its constructor. One
    layer stashes a name, and any number of later layers can pop it. Raises SkipWiringError (a TypeError) for a bare
    string, or for an object that is not a module class. The idea is torchgpipe's (Kim et al., arXiv 2004.09910).

    Example:
        >>> @weft.skippable(stash=["early"])
        ... class Encode(nn.Module):
        ...     def forward(self, x):
        ...         yield weft.stash("early", x)
        ...         return x.relu()
        >>> @weft.skippable(pop=["early"])
        ... class Decode(nn.Module):
        ...     def forward(self, x):
        ...         return x + (yield weft.pop("early"))
        >>> nn.Sequential(Encode(), nn.Tanh(), Decode())(torch.zeros(2))
        tensor([0., 0.])
    """
    stashed, popped = _distinct_names("stash", stash), _distinct_names("pop", pop)

    def decorate(module_cls: Callable[P, M]) -> type[Skippable[P, M]]:
        if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
            raise SkipWiringError(f"skippable was applied to {module_cls!r}; apply it to a subclass of nn.Module")
        return cast(type[Skippable[P, M]], _class_around(module_cls, stashed, popped))

    return decorate
