"""The layer that may stash and pop: a shell around the user's module.

    Sequential ──calls──> Skippable ──calls──> the user's module
                              │ <──yields commands──┘
                              └──save, load──> current skip tracker

The shell is an ordinary `nn.Module`: hooks, ``.train()``, `copy.deepcopy` and pickling work on it as on any
other.
"""

import sys
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast

import torch
from torch import nn

from weft.core.errors import SkipWiringError
from weft.pipeline.skip import state_keys
from weft.pipeline.skip.exchange import Exchange, Talk
from weft.pipeline.skip.namespace import Key, Namespace
from weft.pipeline.skip.tracker import current_skip_tracker

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


class Skippable(nn.Module, Generic[P, M]):
    """Base of all classes made by `skippable`; takes the constructor arguments of the user's class.

    ``module_cls`` is the user's class, ``stashable_names`` and ``poppable_names`` are what it declares, and
    ``.module`` is the user's instance. State-dict keys are those of the bare module (see `state_keys`).

    Calling it raises SkipError if the layer breaks its declaration, and SkipWiringError (a TypeError) if it
    yields anything but `stash` and `pop`. The user's ``forward`` may be a plain
    function if nothing is declared.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()
    module: M

    def __init__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        super().__init__()
        if not hasattr(type(self), "module_cls"):
            raise SkipWiringError(
                f"{type(self).__name__} was constructed, but wraps no module: "
                "decorate a class with @skippable(stash=[...], pop=[...])"
            )
        self.add_module("module", self.module_cls(*args, **kwargs))
        self.register_state_dict_post_hook(state_keys.shorten)
        self.register_load_state_dict_pre_hook(state_keys.lengthen)
        self.register_load_state_dict_post_hook(state_keys.shorten_faults)
        self._keys: dict[str, Key] = {name: (None, name) for name in self._declared()}

    @classmethod
    def _declared(cls) -> list[str]:
        return sorted(cls.stashable_names | cls.poppable_names)

    def isolate(self, ns: Namespace | None, only: Iterable[str] | None = None) -> "Skippable[P, M]":
        """Put all skip tensors of this layer, or those in `only`, into a namespace; gives the layer back.

        Raises SkipWiringError if `only` has names that the layer does not declare.
        """
        names = self._declared() if only is None else distinct_names("only", only)
        unknown = sorted(set(names) - self._keys.keys())
        if unknown:
            raise SkipWiringError(
                f"{self.module_cls.__name__} cannot isolate {unknown}: it declares {self._declared()}; "
                "correct only=, or the names in @skippable"
            )
        self._keys = {**self._keys, **{name: (ns, name) for name in names}}
        return self

    def stashable(self) -> Iterator[Key]:
        """The (namespace, name) of each tensor that this layer stashes, by name."""
        return iter([self._keys[name] for name in sorted(self.stashable_names)])

    def poppable(self) -> Iterator[Key]:
        """The (namespace, name) of each tensor that this layer pops, by name."""
        return iter([self._keys[name] for name in sorted(self.poppable_names)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module, answer the commands that it yields, and return what it returns."""
        tracker = current_skip_tracker()
        exchange = Exchange(self.module_cls.__name__, self._keys, self.stashable_names, self.poppable_names, tracker)
        output: Any = self.module(*args, **kwargs)
        if isinstance(output, Generator):
            try:
                output = exchange.drive(cast(Talk, output))
            finally:
                tracker.stashed_by(self, [self._keys[name] for name in exchange.stashed])
        exchange.finish()
        return output

    def __getattr__(self, name: str) -> Any:
        """Called for what is not found; says where it is, if the user's module has it."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is not None and hasattr(inner, name):
                raise AttributeError(
                    f"{error}, since it is a skippable layer around {self.module_cls.__name__}, which has one: "
                    f"write .module.{name}"
                ) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """As for any module, but a tensor is refused: it belongs to the user's module.

        This also keeps `torch.func.functional_call` with the keys of a state dict from silently setting an
        attribute that nobody reads; it wants the names of `named_parameters`.
        """
        if isinstance(value, torch.Tensor):
            raise SkipWiringError(
                f"tensor {name!r} was set on a skippable layer around {self.module_cls.__name__}, which "
                f"holds none of its own: set it on .module, or name it 'module.{name}'"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer though its class and the user's class have one name between them."""
        owner = next(cls for cls in type(self).__mro__ if "module_cls" in vars(cls))
        if _found_by_name(owner):  # @skippable: the name is ours, the user's class hangs below it
            owner.module_cls.__qualname__ = f"{owner.__qualname__}.module_cls"
        elif type(self) is owner:  # skippable(...)(Class): the name is the user's class, ours is made again
            return _blank, (owner.module_cls, owner.stashable_names, owner.poppable_names), self.__dict__
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"@skippable({self.module!r})"


def distinct_names(what: str, names: Iterable[str]) -> frozenset[str]:
    """The names as a set. Raises SkipWiringError for a bare string, whose letters would each be a name."""
    if isinstance(names, str):
        raise SkipWiringError(f"{what}={names!r} is one string, wanted a list of names: [{names!r}]")
    return frozenset(names)


_classes: weakref.WeakValueDictionary[
    tuple[type[nn.Module], frozenset[str], frozenset[str]], type[Skippable[..., Any]]
] = weakref.WeakValueDictionary()


def class_around(
    module_cls: type[nn.Module], stashed: frozenset[str], popped: frozenset[str]
) -> type[Skippable[..., Any]]:
    """The subclass of `Skippable` for these declarations: one and the same while it lives."""
    known = _classes.get((module_cls, stashed, popped))
    if known is not None:
        return known
    attributes = {
        "module_cls": module_cls,
        "stashable_names": stashed,
        "poppable_names": popped,
        "__module__": module_cls.__module__,
        "__qualname__": module_cls.__qualname__,
        "__doc__": module_cls.__doc__,
    }
    made = type(module_cls.__name__, (Skippable,), attributes)
    return _classes.setdefault((module_cls, stashed, popped), made)


def _blank(module_cls: type[nn.Module], stashed: frozenset[str], popped: frozenset[str]) -> Skippable[..., Any]:
    """A layer without its state, which unpickling and deepcopy fill in."""
    cls = class_around(module_cls, stashed, popped)
    return cls.__new__(cls)


def _found_by_name(cls: type) -> bool:
    """True if module and qualified name of a class lead to it, as pickle wants."""
    place: object = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        place = getattr(place, part, None)
    return place is cls
