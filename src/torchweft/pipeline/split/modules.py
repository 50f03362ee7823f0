"""The modules of a model by name, and the open ones among them: those with a forward() that is recorded.

A module is open if a split point is inside of it, or if it had to be opened because a tensor left it by another way
than its return value. Only a run shows the latter, so the set grows from run to run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from torch import Tensor, nn

from torchweft.core.errors import SplitError, join_faults
from torchweft.core.validation import is_whole
from torchweft.pipeline.split.user_code import call_site

MOVE = "move that into a submodule"
_OPENED = (
    "the code around it reads {}, which its block makes and does not return, so the block was opened: return that "
    "tensor from the block instead of storing it"
)


class OpenModules:
    """The modules of a model, its split points, and its open modules. Raises SplitError for wrong names."""

    def __init__(self, model: nn.Module, split: Sequence[str]) -> None:
        self.model, self._split_names = model, list(split)
        self.open: set[nn.Module] = set()
        self.exits: dict[nn.Module, str] = {}  # the way in which a tensor left a block that was then opened, in words
        self._running: list[nn.Module] = []  # open modules whose forward() is running
        self.resolve()

    def resolve(self) -> None:
        """Look up the names again, because modules can be replaced between two recordings."""
        check_names(self.model, self._split_names)
        modules = dict(named_modules(self.model, again=True))
        self.all = list(dict.fromkeys(modules.values()))
        self.split = {modules[name]: name for name in self._split_names}
        paths = [name.split(".") for name in self._split_names]
        around = {modules[".".join(path[:k])] for path in paths for k in range(len(path))}
        self.open = self.open.intersection(modules.values()) | around
        # Reversed, so that a module with several names gets the first one.
        self.names = {id(module): name for name, module in reversed(modules.items())}

    def open_blocks(self, exits: Mapping[nn.Module, str]) -> None:
        """Open these blocks, each with the way in which a tensor left it, in words."""
        self.open.update(exits)
        self.exits = {**exits, **self.exits}

    def run_open(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._running.append(module)
        try:
            return plain(module, *args, **kwargs)
        finally:
            self._running.pop()

    def describe(self, module: nn.Module) -> str:
        return f"{self.names[id(module)] or 'the model'} ({type(module).__name__})"

    def reject_backward_hooks(self) -> None:
        if hooked := [self.describe(m) for m in self.open if m._backward_hooks or m._backward_pre_hooks]:
            headline = (
                "backward hooks of a module that is cut would not run, because no backward goes through it as a whole; "
                "attach the hooks to submodules that are not cut:"
            )
            raise SplitError(join_faults(headline, hooked))

    def refusal(self, fault: str, instead: str = MOVE) -> SplitError:
        """The error for code that cannot be recorded, with its file and line."""
        return SplitError(f"{call_site()}: {fault} between blocks, where the model is cut; {self.advice(instead)}")

    def advice(self, instead: str) -> str:
        """Advice for the running code: `instead`, unless it belongs to a block that had to be opened."""
        exits = dict.fromkeys(self.exits[module] for module in self._running if module in self.exits)
        return _OPENED.format(" and ".join(exits)) if exits else instead

    def path_of(self, block: nn.Module, tensor: Tensor) -> str:
        """The way in which code around a block got a tensor that the block made and did not return, in words."""
        name = self.names[id(block)]
        modules = cast("Iterable[tuple[str, nn.Module]]", cast(Any, block).named_modules(prefix=name))
        paths = (f"{path}.{key}" for path, module in modules for key, x in vars(module).items() if x is tensor)
        return next(paths, f"a tensor that a hook or a global took out of {name}")


def check_names(model: nn.Module, split: Sequence[str]) -> None:
    """Raise SplitError that lists the split points that are not modules of the model."""
    known = [name for name, _ in named_modules(model, again=True) if name]
    if wrong := [name for name in split if name not in known]:
        near = [f"{name!r}; near it: {get_close_matches(name, known, 3, 0.0)}" for name in wrong]
        raise SplitError(join_faults(f"these entries of split are not modules of {type(model).__name__}:", near))


def suggest_split(model: nn.Module, given: Any) -> str:
    """The end of an error about a `split` that is not a list of names: ``; did you mean split=['blocks.2']?``"""
    if is_whole(given):
        return f"; did you mean split='auto', devices={given}?"
    several = isinstance(given, list | tuple | set | Mapping)
    entries: list[Any] = list(cast("Iterable[Any]", given)) if several else [given]
    if isinstance(given, Mapping) and any(f"{value}".endswith("END") for value in cast("Any", given).values()):
        return "; a stage begins at each name, so for SplitPoint.END give the name of the module after it"
    name_of = {id(module): name for name, module in named_modules(model) if name}
    names = [name_of.get(id(entry), entry) for entry in entries]
    if several and names and all(isinstance(name, str) for name in names):
        return f"; did you mean split={names}?"
    if any(isinstance(entry, nn.Module) for entry in entries):
        known = [name_of[id(entry)] for entry in entries if id(entry) in name_of]
        return f"; did you mean split={known}?" if known else "; the model has no such module"
    near = get_close_matches(f"{given}", [*name_of.values(), "auto"], 1)
    if near == ["auto"]:
        return "; did you mean split='auto'?"
    items = model.get_submodule(near[0]) if near else None
    if isinstance(items, nn.ModuleList | nn.Sequential) and len(items) > 1:
        near = [f"{near[0]}.{len(items) // 2}"]  # a list of blocks is not called itself
    last = list(name_of.values())[-1:]
    return f"; did you mean split={near}?" if near else f", such as split={last}" * bool(last)


def named_modules(model: nn.Module, *, again: bool = False) -> "Iterable[tuple[str, nn.Module]]":
    """All modules with their names. With `again`, a module that has several names is listed under each of them."""
    return cast(Any, model).named_modules(remove_duplicate=not again)
