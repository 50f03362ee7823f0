"""Hook of MkDocs: the pages of the API reference, and links from docs/ into the repository.

mkdocstrings renders one object. Nothing in it decides which objects share a page, and a page for a whole package would
list every name as often as it is exported. This hook therefore writes a page for each package of the API, with each
public name once: on the first page whose `__all__` has it. `griffe` reads the sources without importing them.

A file under docs/ links to code by relative paths, as GitHub needs them. Files outside docs/ are not part of the site,
so such links become addresses in the repository.

The class `NameLinks` is an extension of griffe: in docstrings, a name in single backticks becomes a link.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/torchweft-ml/torchweft"
PACKAGE = "torchweft"
PAGES = {
    "pipeline": "Pipelines: models in stages",
    "pipeline.schedule": "Schedules",
    "pipeline.simulate": "Forecasts of time and memory",
    "pipeline.skip": "Skip connections",
    "checkpoint": "Checkpoints of pipes and plain modules",
    "report": "Recordings and pictures of a step",
    "recurrent": "Recurrent networks from any cell",
    "recurrent.layers": "Layers in place of those of torch.nn",
    "recurrent.cells": "Known cells, and wrappers around cells",
    "experts": "Experts in this process",
    "experts.server": "The server",
    "experts.client": "The client",
    "experts.mixture": "Mixtures of experts",
    "experts.discovery": "Directories of servers",
    "experts.replication": "Replicas",
    "compat.torchgpipe": "The interface of torchgpipe",
    "errors": "Errors and warnings",
}
"""Packages and modules with a page, and their subjects. `mkdocs.yml` has the same pages in its navigation."""
PLACES = {
    "core.context": "pipeline",
    "pipeline.tracing": "report",
    "core.spec": "experts",
    "core.errors": "errors",
    "experts.errors": "errors",
    "experts.telemetry": "experts.server",
}
"""Modules without a page whose public names have one, by the package of that page."""

# A link with a relative target, and the fence of the blocks that the tests run on several ranks.
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_RANK_FENCE = re.compile(r"^```python torchrun$", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):(?=`)")
_SINGLE = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*)(\(\))?`(?!`)")

log = logging.getLogger("mkdocs.hooks.reference")


@cache
def public_api() -> griffe.Object:
    """The package, read from its sources."""
    loaded = griffe.load(PACKAGE, search_paths=[ROOT / "src"], resolve_aliases=True, resolve_external=False)
    assert isinstance(loaded, griffe.Object)
    return loaded


def exports_of(package: str) -> list[str]:
    """The `__all__` of a package of the API, "" for the top."""
    module = public_api()[package] if package else public_api()
    return sorted((str(name) for name in module.exports or ()), key=str.lower)


@cache
def documented_names() -> dict[str, dict[str, str]]:
    """For each page its names: the name in the heading -> the identifier for mkdocstrings.

    A name of the top package is documented under that name, because users write ``weft.Pipe``.
    """
    seen: set[str] = set()
    pages: dict[str, dict[str, str]] = {page: {} for page in PAGES}
    for name in exports_of(""):
        target, identifier = exported(name)
        if not target.is_module:
            pages[page_of(target.canonical_path)][f"weft.{name}"] = identifier
            seen.add(target.canonical_path)
    for package in PAGES:
        for name in exports_of(package):
            target, identifier = exported(f"{package}.{name}")
            path = target.canonical_path
            # Constants can lack a docstring, and modules have a page or belong to one.
            if path not in seen and not target.is_module and target.has_docstring:
                page = max(package, page_of(path), key=len)
                pages[page][f"weft.{package}.{name}"] = identifier
                seen.add(path)
    return pages


def exported(path: str) -> tuple[griffe.Object | griffe.Alias, str]:
    """The object of a public name, and its identifier for mkdocstrings."""
    target, name = public_api()[path], path.rpartition(".")[2]
    if target.is_module and name in target.members and not target[name].is_module:
        # For a function with the name of its module, such as `skippable`, griffe finds the module.
        return target[name], target[name].canonical_path
    return target, f"{PACKAGE}.{path}"


def page_of(path: str) -> str:
    """The page for an object of the package, by the longest prefix of its canonical path."""
    module = path.removeprefix(f"{PACKAGE}.")
    places = {**{page: page for page in PAGES}, **PLACES}
    return places[max((place for place in places if f"{module}.".startswith(f"{place}.")), key=len)]


def summary(text: str) -> str:
    """The first sentence of a docstring, in one line, without the single backticks that `NameLinks` turns to links."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s(?=[A-Z`])", _ROLE.sub("", paragraph))[0].rstrip(":").replace("|", "\\|")


def index_page() -> str:
    """The first page: the names of the top package, and the other pages."""
    lines = [
        "# API reference",
        "",
        "Names of the package, for `import torchweft as weft`:",
        "",
        "| name | |",
        "|---|---|",
    ]
    for names in documented_names().values():
        for name, path in names.items():
            if name.count(".") == 1:
                lines.append(f"| [`{name}`][{path}] | {summary(docstring(path))} |")
    lines += ["", "Packages:", "", "| package | |", "|---|---|"]
    lines += [f"| [`weft.{page}`]({page}.md) | {subject} |" for page, subject in PAGES.items()]
    return "\n".join(lines) + "\n"


def package_page(page: str) -> str:
    """The page of one package: its names in a table, and then each of them in full."""
    lines = [f"# {PAGES[page].partition(':')[0]}", "", f"`{PACKAGE}.{page}`", "", "| name | |", "|---|---|"]
    names = documented_names()[page]
    lines += [f"| [`{name}`][{path}] | {summary(docstring(path))} |" for name, path in names.items()]
    for name, path in names.items():
        label = name.rpartition(".")[2]
        lines += ["", f"::: {path}", "    options:", f'      heading: "{name}"', f'      toc_label: "{label}"']
    return "\n".join(lines) + "\n"


def docstring(path: str) -> str:
    """The docstring of an object of the package."""
    found = public_api()[path.removeprefix(f"{PACKAGE}.")].docstring
    return found.value if found else ""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the reference, which exist only in memory."""
    pages = {"index": index_page()} | {page: package_page(page) for page in PAGES}
    for page, text in pages.items():
        files.append(File.generated(config, f"reference/{page}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Redirect links to files outside docs/ into the repository, and rewrite fences for MkDocs."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def into_repository(link: re.Match[str]) -> str:
        path, anchor = link.groups(default="")
        parts = list(resolved_parts(folder / path))
        if parts[0] == "docs":
            return link.group()
        target = ROOT.joinpath(*parts)
        if not target.exists():
            log.warning(f"{page.file.src_uri} links to {path}, which is not in the repository")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{'/'.join(parts)}{anchor})"

    return _LINK.sub(into_repository, _RANK_FENCE.sub("```python", markdown))


def resolved_parts(path: PurePosixPath) -> Iterator[str]:
    """The parts of a path, after its ``..`` have been followed."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return iter(parts)


class NameLinks(griffe.Extension):
    """Links from the docstrings to the names that they mention, and headings for their examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is None:
            return
        text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = _ROLE.sub("", text)
        owner = obj if obj.is_class else obj.parent
        obj.docstring.value = _SINGLE.sub(lambda name: link_to(name.group(1), name.group(2) or "", owner), text)


def link_to(name: str, call: str, owner: griffe.Object | None) -> str:
    """A name in code, as a link if the reference has it. `owner` is the class or module around the docstring."""
    label = f"`{name}{call}`"
    for path in candidates(name, owner):
        if path in identifiers():
            # With `optional`, a name that turns out to be on no page is plain code, and not a warning.
            return f'<autoref optional identifier="{path}">{label}</autoref>'
    return label


def candidates(name: str, owner: griffe.Object | None) -> Iterator[str]:
    """The paths that a name in a docstring can stand for: `weft.Pipe`, `Pipe.step`, or `step` in the class itself."""
    if name.startswith(("weft.", f"{PACKAGE}.")):
        yield f"{PACKAGE}.{name.partition('.')[2]}"
    elif owner is not None:
        if owner.is_class:
            yield f"{owner.canonical_path}.{name}"
        yield f"{owner.module.path}.{name}"
    first, _, rest = name.partition(".")
    yield from (f"{path}{rest and f'.{rest}'}" for path in shortest().get(first, ()))


@cache
def identifiers() -> frozenset[str]:
    """All paths of documented names and of their members, by every way to import them."""
    paths: set[str] = set()
    for names in documented_names().values():
        for path in names.values():
            target = public_api()[path.removeprefix(f"{PACKAGE}.")]
            members = [name for name in target.members if not name.startswith("_")] if target.is_class else []
            for prefix in (path, target.canonical_path):
                paths |= {prefix, *(f"{prefix}.{name}" for name in members)}
    return frozenset(paths)


@cache
def shortest() -> dict[str, list[str]]:
    """The documented paths for a name without its package."""
    found: dict[str, list[str]] = {}
    for names in documented_names().values():
        for path in names.values():
            found.setdefault(path.rpartition(".")[2], []).append(path)
    return found
