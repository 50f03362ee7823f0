"""Public names that are loaded on first access, so that importing a package stays cheap."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_attributes(
    package: str, places: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    `places` maps the modules to load from to their names; `modules` are modules of the package itself. Define both
    under ``if not TYPE_CHECKING``, with imports for the type checker in the other branch: for a type checker, a module
    with ``__getattr__`` has every name.
    """
    module_of = {name: place for place, names in places.items() for name in names}
    namespace = vars(sys.modules[package])

    def load(name: str) -> object:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        # Stored in the namespace, so that Python does not call `__getattr__` for this name again.
        namespace[name] = value = getattr(import_module(module_of[name]), name)
        return value

    def listed() -> list[str]:
        # Without the names that the package itself imports, unless they are public.
        own = (name for name in namespace if name.startswith("__"))
        return sorted({*own, *namespace.get("__all__", ()), *module_of, *modules})

    return load, listed
