"""Every Python block of README and docs runs as printed; the blocks of one page run one after another."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if "from transformers import" in text and importlib.util.find_spec("transformers") is None:
        pytest.skip(f"{page.name} needs transformers; the extra `hf` brings it")
    names: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        exec(compile("\n" * line + match.group(1), str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []
