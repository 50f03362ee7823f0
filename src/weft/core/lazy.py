"""Public names that are loaded when they are first touched, so that importing a package stays cheap."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def attributes(
    package: str, places: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package: names by the module that they are loaded from, and modules of
    the package itself.

    Both belong under ``if not TYPE_CHECKING``, beside imports for the type checker: a module with a ``__getattr__`` has
    every name, for all that it knows.
    """
    home = {name: place for place, names in places.items() for name in names}
    known = vars(sys.modules[package])

    def load(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        known[name] = value = getattr(import_module(home[name]), name)
        return value

    return load, lambda: sorted({*known, *home, *modules})
