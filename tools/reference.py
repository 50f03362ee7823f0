"""Extension of Sphinx: the navigation, the pages of the API reference, and links from docs/ into the repository.

`autodoc` documents one object. Nothing in it decides which objects share a page, and a page for a whole package would
list every name as often as it is exported. This extension therefore writes docs/reference/ with a page for each package
of the API, with each public name once: on the first page whose `__all__` has it.

A file under docs/ links to code by relative paths, as GitHub needs them. Files outside docs/ are not part of the site,
so such links become addresses in the repository.

In docstrings, a name in single backticks becomes a link if the reference has it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGE = "torchweft"
PAGES = {
    "pipeline": "Pipelines: models in stages",
    "pipeline.schedule": "Schedules",
    "pipeline.simulate": "Forecasts of time and memory",
    "pipeline.skip": "Skip connections",
    "checkpoint": "Checkpoints of pipes and plain modules",
    "report": "Recordings and pictures of a step",
    "compat.torchgpipe": "The interface of torchgpipe",
    "recurrent": "Recurrent networks from any cell",
    "recurrent.layers": "Layers in place of those of torch.nn",
    "recurrent.cells": "Known cells, and wrappers around cells",
    "experts": "Experts in this process",
    "experts.server": "The server",
    "experts.client": "The client",
    "experts.mixture": "Mixtures of experts",
    "experts.discovery": "Directories of servers",
    "experts.replication": "Replicas",
    "errors": "Errors and warnings",
}
"""Packages and modules with a page, and their subjects."""
PLACES = {
    "core.context": "pipeline",
    "pipeline.tracing": "report",
    "core.spec": "experts",
    "core.errors": "errors",
    "experts.errors": "errors",
    "experts.telemetry": "experts.server",
}
"""Modules without a page whose public names have one, by the package of that page."""

# A link with a relative target.
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Raises|Returns|Yields):$")

log = logging.getLogger(__name__)


@cache
def documented_names() -> dict[str, dict[str, Any]]:
    """For each page its classes and functions, by the names in the headings.

    A name of the top package is documented under that name, because users write ``weft.Pipe``.
    """
    seen: set[str] = set()
    pages: dict[str, dict[str, Any]] = {page: {} for page in PAGES}
    for package in ("", *PAGES):
        module = import_module(f"{PACKAGE}.{package}".rstrip("."))
        for name in sorted(getattr(module, "__all__", ()), key=str.lower):
            thing = getattr(module, name)
            path = f"{thing.__module__}.{thing.__qualname__}" if is_documented(thing) else None
            if path and path not in seen:
                seen.add(path)
                page = max(package, page_of(path), key=len) if package else page_of(path)
                pages[page][".".join(filter(None, ("weft", package, name)))] = thing
    return pages


def is_documented(thing: Any) -> bool:
    """Whether a public name has a place in the reference. Modules have a page, or belong to one."""
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.startswith(PACKAGE)


def page_of(path: str) -> str:
    """The page for an object of the package, by the longest prefix of its path."""
    module = path.removeprefix(f"{PACKAGE}.")
    places = {**{page: page for page in PAGES}, **PLACES}
    return places[max((place for place in places if f"{module}.".startswith(f"{place}.")), key=len)]


def index_page() -> str:
    """The first page: the names of the top package, and the other pages."""
    names = [name for page in documented_names().values() for name in page if name.count(".") == 1]
    links = [f"   weft.{page}: {subject} <{page}>" for page, subject in PAGES.items()]
    text = "Names of the package, for ``import torchweft as weft``:"
    return "\n".join([*heading("API reference"), text, *table(names), "Packages:", "", ".. toctree::", "", *links, ""])


def package_page(page: str) -> str:
    """The page of one package: its names in a table, and then each of them in full."""
    names = documented_names()[page]
    lines = [*heading(PAGES[page].partition(":")[0]), f"``{PACKAGE}.{page}``", *table(names)]
    for name, thing in names.items():
        error = inspect.isclass(thing) and issubclass(thing, BaseException)
        kind = "exception" if error else "class" if inspect.isclass(thing) else "function"
        lines += ["", f".. auto{kind}:: {name}"]
    return "\n".join(lines) + "\n"


def heading(text: str) -> list[str]:
    """The lines of a title."""
    return [text, "=" * len(text), ""]


def table(names: Any) -> list[str]:
    """The lines of a table of names with their first sentences."""
    return ["", ".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names), ""]


def write_pages(app: Any) -> None:
    """Write docs/reference/, which git ignores. Equal files stay, so that Sphinx does not read them again."""
    # Headings and links have the name that users write. Without this, Python would load the package once more.
    documented_names()
    for name, module in [*sys.modules.items()]:
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            sys.modules[f"weft{name.removeprefix(PACKAGE)}"] = module
    pages = {"index": index_page()} | {page: package_page(page) for page in PAGES}
    folder = DOCS / "reference"
    folder.mkdir(exist_ok=True)
    for page, text in pages.items():
        file = folder / f"{page}.rst"
        if not file.exists() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
    for file in folder.glob("*.rst"):
        if file.stem not in pages:
            file.unlink()


def rewrite_page(app: Any, page: str, source: list[str]) -> None:
    """Redirect links to files outside docs/ into the repository, and add the navigation to the first page."""
    folder = PurePosixPath("docs", page).parent
    repository = app.config.html_theme_options["source_repository"]

    def into_repository(link: re.Match[str]) -> str:
        path, anchor = link.groups(default="")
        parts = list(resolved_parts(folder / path))
        if parts[0] == "docs":
            return link.group()
        target = ROOT.joinpath(*parts)
        if not target.exists():
            log.warning("%s links to %s, which is not in the repository", page, path)
        return f"]({repository}/{'tree' if target.is_dir() else 'blob'}/main/{'/'.join(parts)}{anchor})"

    if not page.startswith("reference/"):
        source[0] = _LINK.sub(into_repository, source[0])
    if page == "index":
        for caption, links in app.config.navigation.items():
            lines = [f"{title} <{target}>" for title, target in links.items()]
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```", ""])


def resolved_parts(path: PurePosixPath) -> Iterator[str]:
    """The parts of a path, after its ``..`` have been followed."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return iter(parts)


def mark_drawings(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Mark indented blocks of a docstring, which are drawings, as literal text."""
    marked: list[str] = []
    for number, line in enumerate(lines):
        marked.append(line)
        following = lines[number + 1 : number + 3]
        is_text = line and not line.startswith((" ", "- ")) and not _SECTION.match(line)
        if is_text and len(following) == 2 and not following[0] and following[1].startswith("    "):
            marked += ["", "::"]
    lines[:] = marked


def skip_fields(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples that have no text of their own."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else None


def hide_object(app: Any, name: str, thing: Any, options: Any, bases: list[Any]) -> None:
    """Show only bases that say something."""
    bases[:] = [base for base in bases if base is not object]


def link_short_name(app: Any, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """A link for a name without its package, if exactly one documented name ends so."""
    if node.get("refdomain") != "py":
        return None
    first, _, rest = node["reftarget"].removeprefix(f"{PACKAGE}.").removeprefix("weft.").partition(".")
    full = [name for names in documented_names().values() for name in names if name.rpartition(".")[2] == first]
    paths = [f"{name}.{rest}" if rest else name for name in full]
    found = [entry for path in paths if (entry := env.domains["py"].objects.get(path))]
    if len(found) != 1:
        return None
    return make_refnode(app.builder, node["refdoc"], found[0].docname, found[0].node_id, content)


def hide_source(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Leave out the links to the source of a page that is not in the repository."""
    if page.startswith("reference/") or page in ("genindex", "py-modindex", "search"):
        context["theme_top_of_page_buttons"] = []


def setup(app: Any) -> dict[str, bool]:
    """Connect the functions of this module."""
    app.add_config_value("navigation", {}, "env")
    app.connect("builder-inited", write_pages)
    app.connect("source-read", rewrite_page)
    app.connect("autodoc-process-docstring", mark_drawings, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-bases", hide_object)
    app.connect("missing-reference", link_short_name)
    app.connect("html-page-context", hide_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
