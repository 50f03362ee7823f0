#!/usr/bin/env python3
"""Write the API reference from the docstrings: `python3 do.py docs`.

    python tools/reference.py [FOLDER]

FOLDER is build/api by default. A page shows the names in the `__all__` of its module.
"""

import importlib
import sys
from pathlib import Path

import pdoc

LOADED = ("torchweft", "torchweft.errors")
"""Packages that load their names on first access. pdoc sees only names that are loaded."""
PAGES = (
    "torchweft",
    "torchweft.recurrent.cells",
    "torchweft.recurrent.layers",
    *(f"torchweft.experts.{name}" for name in ("client", "discovery", "mixture", "replication", "server")),
)
"""pdoc follows from a package to the modules in its `__all__`. The other modules are listed here."""


def main() -> None:
    """Write the pages and print the path of the first one."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/api").resolve()
    for module in map(importlib.import_module, LOADED):
        for name in module.__all__:
            getattr(module, name)
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PAGES, output_directory=folder)
    print(folder / "torchweft.html")


if __name__ == "__main__":
    main()
