"""A C++ compiler, if there is one, and its results on disk.

    text + flags + compiler + processor  ->  key      <cache>/<key>-<digest of the library>.so

A library is compiled in a folder of its own, flushed to disk and renamed, and its digest is compared before it is
loaded. A check after loading would be too late: mapping a truncated file ends the process with a bus error, which
cannot be caught. A file that does not match its name is removed and compiled again.

The cache is `compiled` in `$TORCHWEFT_CACHE`, else in `$XDG_CACHE_HOME/torchweft`, else in `~/.cache/torchweft`. If
that folder cannot be written, or other users could change it, a directory that ends with the process takes its place.
Past `$TORCHWEFT_CACHE_MIB` (256) the libraries that were used longest ago are removed. `$TORCHWEFT_CXXFLAGS` are
further flags for the loops of cells.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from torchweft.core.errors import UsageError, WeftError

# Loops to unroll are marked in the source: -O3 takes up to twice the time to compile for the same speed.
FLAGS = (
    *("-O2", "-ftree-vectorize", "-march=native", "-std=c++17", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-fvisibility=default", "-w"),
)
# Without this, the compiler fuses a product and a sum in one place and not in another. Then forward and recompute would
# differ in the last bit.
EXACT = ("-ffp-contract=off",)
SECONDS = 120.0  # time limit of one compilation
MEBIBYTES = 256.0  # size limit of the cache, unless `$TORCHWEFT_CACHE_MIB` sets another


class CompileError(WeftError, RuntimeError):
    """The compiler is missing, or it failed. The message has its output."""


@cache
def find_compiler() -> str | None:
    """The compiler's path: `$CXX`, g++, c++ or clang++, or None if they are not installed."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def load(text: str, *, exact: bool) -> ctypes.CDLL:
    """The compiled text as a library, from the disk if it was compiled before. Raises CompileError and UsageError.

    With `exact`, the same expression gives the same bits wherever it stands.
    """
    path = find_compiler()
    if path is None:
        raise CompileError("there is no C++ compiler: install g++ or clang++, or set CXX to one")
    flags, limit = _all_flags(path, exact), _cache_limit()
    key = _digest_of("\n".join([text, *flags, compiler_version(path), processor_flags()]).encode())
    library = _find_cached(key)
    # Without a lock: two processes can compile the same text, and the name of the second replaces that of the first.
    if library is None:
        try:
            library = _load_library(_compile_to_cache(path, flags, text, key))
        except OSError as error:
            raise CompileError(f"the compiled library cannot be loaded: {error}") from error
        _trim_cache(cache_folder(), limit)
    return library


def vector_bytes() -> int:
    known = processor_flags().split()
    return 64 if "avx512f" in known else 32 if "avx" in known else 16


def _all_flags(path: str, exact: bool) -> tuple[str, ...]:
    # GCC prefers 256 bits even if the processor has 512. Its default cost model at -O2 rejects most loops here, while
    # Clang's accepts them.
    wide = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
    costs = () if "clang" in compiler_version(path) else ("-fvect-cost-model=dynamic",)
    # The user's flags come before EXACT, which they must not undo. They are not for the matrix products: without
    # optimization their tiles fuse products and sums in other places, and a plan would have other bits.
    more = (*shlex.split(os.environ.get("TORCHWEFT_CXXFLAGS", "")), *EXACT) if exact else ()
    return (*FLAGS, *wide, *costs, *more)


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _load_library(path: Path) -> ctypes.CDLL:
    """Load a library, and mark it as the last used one. Raises OSError."""
    library = ctypes.CDLL(str(path))
    with suppress(OSError):  # another process can have trimmed the cache
        os.utime(path)
    return library


def _find_cached(key: str) -> ctypes.CDLL | None:
    """The library of this key, if an intact one is on disk. Others, torn or of another machine, are removed."""
    for path in sorted(cache_folder().glob(f"{key}-*.so")):
        with suppress(OSError):
            if path.stem == f"{key}-{_digest_of(path.read_bytes())}":
                return _load_library(path)
        with suppress(OSError):
            path.unlink()
    return None


def _compile_to_cache(path: str, flags: tuple[str, ...], text: str, key: str) -> Path:
    try:
        with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="compiling-") as place:
            source, output = Path(place) / "loop.cpp", Path(place) / "loop.so"
            source.write_text(text)
            command = [path, *flags, str(source), "-o", str(output), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise CompileError(f"{path} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
            output.chmod(0o600)
            # Content first, then the name: otherwise, after a crash, the name could exist without the content.
            _flush_to_disk(output)
            target = cache_folder() / f"{key}-{_digest_of(output.read_bytes())}.so"
            output.replace(target)
            _flush_to_disk(cache_folder())
            return target
    except (OSError, subprocess.TimeoutExpired) as error:  # a full disk is an OSError too
        raise CompileError(f"{path} did not finish: {error}") from error


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _trim_cache(place: Path, limit: float) -> None:
    """Remove the libraries used longest ago beyond so many bytes, and leftovers of killed compilations."""
    for leftover in place.glob("compiling-*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 10 * SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
    libraries: list[tuple[float, int, Path]] = []
    for path in place.glob("*.so"):
        with suppress(OSError):
            status = path.stat()
            libraries.append((status.st_mtime, status.st_size, path))
    for _, size, path in sorted(libraries, reverse=True):  # last used first
        limit -= size
        # A process that has loaded a removed library keeps it: the file disappears with its last mapping.
        if limit < 0:
            with suppress(OSError):
                path.unlink()


def _cache_limit() -> float:
    setting = os.environ.get("TORCHWEFT_CACHE_MIB") or str(MEBIBYTES)
    try:
        limit = float(setting)
    except ValueError:
        limit = -1.0
    if not limit >= 0:  # NaN compares false
        raise UsageError(f"TORCHWEFT_CACHE_MIB is {setting!r}, wanted a number of mebibytes, 0 or more")
    return limit * 2**20


@cache
def cache_folder() -> Path:
    """The folder of compiled libraries: in the user's cache, or a temporary one if that is unsafe or read-only."""
    home = os.environ.get("TORCHWEFT_CACHE")
    try:
        base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchweft"
        place = base.absolute() / "compiled"
        for parent in (*reversed(place.parents), place):
            if not parent.exists():
                parent.mkdir(mode=0o700, exist_ok=True)
        place = place.resolve()  # from here on without links, which others could redirect after the check
        fault = why_changeable(place)
        if fault is not None:
            warnings.warn(
                f"compiled loops are not cached in {place}, because other users could change the code that this "
                f"process would run: {fault}; set TORCHWEFT_CACHE to a folder that only you can write to",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            place.chmod(0o700)
            if os.access(place, os.W_OK):
                return place
    except (OSError, RuntimeError):  # a user without a home is a RuntimeError
        pass
    temporary = tempfile.mkdtemp(prefix="torchweft-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def why_changeable(place: Path) -> str | None:
    """The reason why other users could change or replace a resolved folder, or None. Raises OSError."""
    # Write permission for a folder on the path from the root is enough to rename its entries. An exception are folders
    # with the sticky bit, such as /tmp: there, other users can add entries, but not replace ours.
    user = os.getuid()
    for folder in (*reversed(place.parents), place):
        status = folder.stat()
        if status.st_uid not in ((user,) if folder == place else (0, user)):
            return f"{folder} belongs to user {status.st_uid}"
        if status.st_mode & 0o022 and (folder == place or not status.st_mode & stat.S_ISVTX):
            return f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


@cache
def compiler_version(path: str) -> str:
    """The compiler's path and the output of its `--version`. Raises CompileError."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{path} --version did not answer: {error}") from error
    return f"{path} {done.stdout}"


@cache
def processor_flags() -> str:
    # What `-march=native` uses is part of the key, because machines of different kinds can share a home folder.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
