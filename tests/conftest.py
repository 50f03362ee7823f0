"""What every test runs under.

    run-time shape checks   every function of weft checks the types of its arguments and results
    one intra-op thread     so that equal means bit-equal, whoever computes
    hypothesis profiles     "ci" where CI is set, else "weft"; without --all, fewer examples
    cuda marker             skipped, by name, where there is no GPU
    long marker             left out without --all, unless the file or the test is named
    grids                   without --all, so many points that each pair of values occurs, likewise
    Ctrl-C                  as in a shell, also where the tests were started in the background, which ignores it
    no thread left behind   a test that leaves a thread of weft alive fails
    signals                 a test that leaves another handler for SIGINT or SIGTERM fails

The import hook must be in place before anything imports weft, hence at the top of this file.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import combinations

import pytest
import torch
from beartype._check.code import codemain
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

if any(name == "weft" or name.startswith("weft.") for name in sys.modules):
    raise pytest.UsageError("weft was imported before tests/conftest.py, so its run-time checks would be off")
# The checks look at one random item of a list. They get a generator of their own: hypothesis wants `random`
# untouched within a strategy, and a pipe that is collected there dismisses its threads through checked functions.
codemain.getrandbits = random.Random(0).getrandbits
install_import_hook("weft", "beartype.beartype")

# As `weft.experts` sets it when it is imported; but a test may import gRPC before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How torch splits one operator over threads decides how it rounds. The laws compare executors bit by bit, and
# a worker thread must not round otherwise than the main thread just because the pool was busy.
torch.set_num_threads(1)

# A shell starts a command in the background with SIGINT ignored, and Python keeps that, for its children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the machine may be shared. CI draws the same examples every time, so that it fails for a change
# and not by chance; elsewhere new examples keep coming.
settings.register_profile("weft", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("weft"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "weft")

GRACE = 5.0  # seconds that the threads of a test may take to end
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all``: the tests that take long as well."""
    parser.addoption("--all", action="store_true", help="run tests that take long, too (marker `long`)")


def is_quick(config: pytest.Config) -> bool:
    """Whether this is a run of everything without what takes long: neither --all nor the name of a file or test."""
    return not config.getoption("--all") and not any("::" in word or word.endswith(".py") for word in config.args)


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples in a quick run, before the tests are imported."""
    if is_quick(config):
        settings.register_profile("quick", settings.default, max_examples=8)
        settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless it was asked for, by ``--all`` or by name; skip what needs a GPU where there is
    none. The reason names the test, since -rs folds equal reasons."""
    if is_quick(config):
        quick = set(pairwise(item for item in items if not item.get_closest_marker("long")))
        config.hook.pytest_deselected(items=[item for item in items if item not in quick])
        items[:] = [item for item in items if item in quick]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            why = f"{item.name}: needs a CUDA GPU, and torch.cuda.is_available() is False"
            item.add_marker(pytest.mark.skip(reason=why))


def pairwise(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of every grid of parameters, few points in which each pair of values occurs (greedily, those with the most new
    pairs first); of what has one parameter or none, all."""
    grids: dict[object, dict[pytest.Item, set[object]]] = {}
    for item in items:
        if point := getattr(item, "callspec", None):
            plain = (str, int, bool, type(None))
            values = [
                (name, each if isinstance(each, plain) else point.indices[name]) for name, each in point.params.items()
            ]
            pairs = set(combinations(values, 2)) or {tuple(values)}
            grids.setdefault((item.parent, getattr(item, "originalname", "")), {})[item] = pairs
        else:
            yield item
    for grid in grids.values():
        missing = set().union(*grid.values())
        while missing:
            best = max(grid, key=lambda item: len(grid[item] & missing))
            missing -= grid[best]
            yield best


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on the test whether it failed, for the fixture below."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


def threads_of_weft() -> set[threading.Thread]:
    """The living threads that weft started."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("weft-")}


def survivors(threads: set[threading.Thread]) -> list[str]:
    """The names of those threads that are still alive after a collection and the grace time."""
    if threads:
        gc.collect()
    end = time.monotonic() + GRACE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return sorted(thread.name for thread in threads if thread.is_alive())


@pytest.fixture(autouse=True)
def no_thread_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread of weft alive, its own or one that a fixture of it started."""
    before = threads_of_weft()
    yield
    if request.node.stash.get(_failed, False):
        return  # the traceback holds the test's objects, and so their threads; one failure is enough
    if left := survivors(threads_of_weft() - before):
        pytest.fail(f"threads outlive the test by {GRACE:g} s: {', '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """Fail a test that takes Ctrl-C from those behind it."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert before == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)], "a handler was left behind"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the process even if a failed test left a thread that Python would wait for, for ever; all is reported."""

    def end() -> None:
        main = threading.main_thread()
        left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
        print(f"these threads keep the process from ending: {', '.join(left)}", file=sys.stderr, flush=True)
        os._exit(1)

    watchdog = threading.Timer(60.0, end)
    watchdog.daemon = True
    watchdog.start()
