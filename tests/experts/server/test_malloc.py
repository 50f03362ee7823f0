"""Memory that a batch frees is reused by the next one in any thread, on large pages, unless users set otherwise."""

import json
import os
from pathlib import Path

import pytest

from tests.processes import python

_PROGRAM = """
import json, resource, threading
import torch
from torchweft.experts.server import keep_freed_memory

def batches(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        parts = [torch.ones(1 << 22) for _ in range(4)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def work():
    batches(5)
    found.append(batches(10))

found = [keep_freed_memory()]
threads = [threading.Thread(target=work), threading.Thread(target=work)]
for each in threads:
    each.start()
    each.join()
print(json.dumps(found))
"""
PAGES = 10 * 4 * (1 << 24) // os.sysconf("SC_PAGE_SIZE")


def page_faults(**environment: str) -> list[int]:
    """Page faults of each thread in 10 batches of 64 MB."""
    seen = python(_PROGRAM, THP_MEM_ALLOC_ENABLE="0", **environment)
    assert seen.returncode == 0, seen.stderr
    done, *found = json.loads(seen.stdout)
    if not done:
        pytest.skip("keep_freed_memory: needs glibc")
    return found


@pytest.mark.long
def test_next_batch_causes_few_page_faults() -> None:
    assert max(page_faults()) < PAGES / 10, "fewer faults than one batch has pages"


@pytest.mark.long
def test_malloc_settings_of_the_environment_are_respected() -> None:
    limits = {"MALLOC_TRIM_THRESHOLD_": "100000", "MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_ARENA_MAX": "8"}
    assert min(page_faults(**limits)) > PAGES / 2


_PAGES = """
import os, torch
from torchweft.experts.server import use_large_pages
from torchweft.experts.server.command import serve  # with all its imports, which must not create a tensor

before = dict(os.environ)
use_large_pages()
assert os.environ == before
kept = torch.ones(1 << 24)
print(*[line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")])
"""


@pytest.mark.long
@pytest.mark.parametrize(("said", "large"), [(None, True), ("0", False)])
def test_large_tensors_use_large_pages(said: str | None, large: bool) -> None:
    """A setting in the environment is respected."""
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[madvise]" not in switch.read_text():
        pytest.skip("use_large_pages: needs transparent huge pages in mode madvise")
    seen = python(_PAGES, THP_MEM_ALLOC_ENABLE=said)
    assert seen.returncode == 0, seen.stderr
    assert (int(seen.stdout) > 50_000) == large, "kB in large pages, of 65,536"
