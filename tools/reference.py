#!/usr/bin/env python3
"""Write the API reference from the docstrings: `python3 do.py docs`.

    python tools/reference.py [FOLDER]

FOLDER is build/api by default. What a module shows is what its `__all__` names.
"""

import importlib
import sys
from pathlib import Path

import pdoc

LOADED = ("weft", "weft.errors")
"""Packages that load their names when they are touched; pdoc sees only what has been loaded."""
PAGES = (
    "weft",
    "weft.recurrent.cells",
    "weft.recurrent.layers",
    *(f"weft.experts.{name}" for name in ("client", "discovery", "mixture", "replication", "server")),
)
"""A package brings along those modules that its `__all__` names; the others are named here."""


def main() -> None:
    """Write the pages and say where the first one lies."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/api").resolve()
    for module in map(importlib.import_module, LOADED):
        for name in module.__all__:
            getattr(module, name)
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PAGES, output_directory=folder)
    print(folder / "weft.html")


if __name__ == "__main__":
    main()
