"""What a batch frees is there for the next one, in whatever thread it runs; and what the user has set stays."""

import json
import os

import pytest

from tests.apart import python

_PROGRAM = """
import json, resource, threading
import torch
from weft.experts.server import keep_freed_memory

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


def faults(**environment: str) -> list[int]:
    """Of page, in 10 batches of 64 MB, by thread."""
    seen = python(_PROGRAM, **environment)
    assert seen.returncode == 0, seen.stderr
    done, *found = json.loads(seen.stdout)
    if not done:
        pytest.skip("keep_freed_memory: there is no glibc to tell")
    return found


def test_the_next_batch_pages_nothing_in() -> None:
    assert max(faults()) < PAGES / 10, "less than one batch in ten; some until the heap has its shape"


def test_otherwise_it_would_and_what_the_environment_says_holds() -> None:
    limits = {"MALLOC_TRIM_THRESHOLD_": "100000", "MALLOC_MMAP_THRESHOLD_": "100000", "MALLOC_ARENA_MAX": "8"}
    assert min(faults(**limits)) > PAGES / 2
