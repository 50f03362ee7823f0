"""The environment of all tests.

    run-time type checks    every function of torchweft checks the types of its arguments and results
    one intra-op thread     so that results are bit-equal in every thread
    hypothesis profiles     "ci" if CI is set, else "torchweft"; fewer examples without --all
    cuda marker             skipped, by name, without a GPU
    long marker             omitted without --all, unless the file or the test is named
    grids                   likewise without --all: at most three points of the parameters of a test
    compiled cells          not optimized in a quick run, unless a test uses the fixture `optimized_cells`
    Ctrl-C                  works as in a shell, even if the tests were started in the background, which ignores it
    progress                by time, with each failure when it happens, if --progress is given
    threads                 a test that leaves a thread of torchweft alive fails
    signals                 a test that leaves another handler for SIGINT or SIGTERM fails

The import hook must be installed before any import of torchweft, hence at the top of this file.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import combinations

import pytest
import torch
from beartype import BeartypeConf
from beartype.claw import beartype_package
from hypothesis import HealthCheck, settings

from tests.progress import Progress
from tests.type_checks import TypeCheckWarning

if any(name == "torchweft" or name.startswith("torchweft.") for name in sys.modules):
    raise pytest.UsageError("torchweft was imported before tests/conftest.py, so its run-time checks would be off")
# The checks examine the first item of a list and not a random one, because hypothesis forbids draws from `random`
# within a strategy, and a pipe that is collected there ends its threads through checked functions. Two modules are left
# out: a checked operator loses its methods, and uvicorn calls an application without arguments to see whether it is a
# factory, which a checked coroutine function seems to be.
beartype_package(
    "torchweft",
    conf=BeartypeConf(
        is_random=False,
        claw_is_pep526=False,
        claw_skip_package_names=("torchweft.recurrent.custom_op", "torchweft.experts.status_page.http"),
        violation_type=TypeCheckWarning,
    ),
)

# `weft.experts` sets this on import, but a test can import gRPC before.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Triton reads this when it is imported. Without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The division of an operator over threads decides its rounding. The laws compare executors bit by bit, so a worker
# thread must not round differently because the thread pool was busy.
torch.set_num_threads(1)

# A shell starts background commands with SIGINT ignored, and Python and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline, because the machine can be shared. CI always draws the same examples, so that only a change makes it
# fail. Elsewhere, every run draws new examples.
settings.register_profile("torchweft", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("torchweft"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "torchweft")

POINTS = 3  # of the parameters of each test in a quick run
GRACE = 5.0  # seconds that the threads of a test can take to end
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--all``, for the slow tests too, and ``--progress``."""
    parser.addoption("--all", action="store_true", help="run tests that take long, too (marker `long`)")
    show = "print failures at once, and a line of progress every so many seconds"
    parser.addoption("--progress", type=float, metavar="SECONDS", help=show)


def is_quick(config: pytest.Config) -> bool:
    """Whether this run omits slow tests: it has neither --all nor the name of a file or test."""
    return not config.getoption("--all") and not any("::" in word or word.endswith(".py") for word in config.args)


@pytest.hookimpl(trylast=True)  # after the terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Configure fewer examples and quick compilation for a quick run, before the tests are imported."""
    seconds, terminal = config.getoption("--progress"), config.pluginmanager.get_plugin("terminalreporter")
    if seconds and terminal and config.get_verbosity() <= 0 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(terminal, seconds))
    if is_quick(config):
        # Compilation of a cell takes a fraction of the time, and the bits are the same: see EXACT in cpp/compiler.py.
        os.environ.setdefault("TORCHWEFT_CXXFLAGS", "-O0")
        settings.register_profile("quick", settings.default, max_examples=8)
        settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests, unless requested by ``--all`` or by name. Skip tests for a GPU without one, with a reason
    that names the test, because -rs folds equal reasons."""
    if is_quick(config):
        quick = set(sample_grids(item for item in items if not item.get_closest_marker("long")))
        config.hook.pytest_deselected(items=[item for item in items if item not in quick])
        items[:] = [item for item in items if item in quick]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            why = f"{item.name}: needs a CUDA GPU, and torch.cuda.is_available() is False"
            item.add_marker(pytest.mark.skip(reason=why))


def sample_grids(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """At most `POINTS` points of the parameters of each test; all tests without parameters.

    Each point adds as many pairs of values as it can that did not occur yet. Points that add equally many, such as all
    of a single parameter, are spread evenly over the list.
    """
    grids: dict[object, dict[pytest.Item, set[object]]] = {}
    for item in items:
        if point := getattr(item, "callspec", None):
            plain = (str, int, bool, type(None))
            values = [
                (name, value if isinstance(value, plain) else point.indices[name])
                for name, value in point.params.items()
            ]
            grids.setdefault((item.parent, getattr(item, "originalname", "")), {})[item] = set(combinations(values, 2))
        else:
            yield item
    for grid in grids.values():
        points = list(grid)
        seen: set[object] = set()
        for number in range(min(POINTS, len(points))):
            begin = number * len(points) // POINTS
            left = [item for item in points[begin:] + points[:begin] if item in grid]
            best = max(left, key=lambda item: len(grid[item] - seen))  # the first of equals
            seen |= grid.pop(best)
            yield best


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record on the test whether it failed, for the fixture below."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


def threads_of_torchweft() -> set[threading.Thread]:
    """The living threads that torchweft started."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("torchweft-")}


def survivors(threads: set[threading.Thread]) -> list[str]:
    """The names of the threads that are still alive after a garbage collection and the grace time."""
    if threads:
        gc.collect()
    end = time.monotonic() + GRACE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return sorted(thread.name for thread in threads if thread.is_alive())


@pytest.fixture(autouse=True)
def no_thread_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread of torchweft alive, started by itself or by one of its fixtures."""
    before = threads_of_torchweft()
    yield
    if request.node.stash.get(_failed, False):
        return  # the traceback keeps the objects of the test, and so their threads, alive
    if left := survivors(threads_of_torchweft() - before):
        pytest.fail(f"threads outlive the test by {GRACE:g} s: {', '.join(left)}", pytrace=False)


@pytest.fixture
def optimized_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are compiled as for users, even in a quick run."""
    monkeypatch.delenv("TORCHWEFT_CXXFLAGS", raising=False)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """Fail a test that leaves another signal handler, which would break Ctrl-C in later tests."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], "handlers differ"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the process even if a failed test left a thread that Python would wait for forever."""

    def end() -> None:
        main = threading.main_thread()
        left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
        print(f"these threads keep the process from ending: {', '.join(left)}", file=sys.stderr, flush=True)
        os._exit(1)

    watchdog = threading.Timer(60.0, end)
    watchdog.daemon = True
    watchdog.start()
