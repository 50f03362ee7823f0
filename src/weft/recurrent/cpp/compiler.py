"""A C++ compiler, if there is one, and its results on disk.

    text + flags + compiler + processor  ->  key      <cache>/<key>-<digest of the library>.so

A library is compiled in a folder of its own, flushed to disk and renamed, and its digest is compared before it is
loaded: memory mapped from a file that was cut short ends the process with a bus error, which nobody can catch. What
does not match its name is removed and compiled anew.

The cache is `compiled` in `$WEFT_CACHE`, else in `$XDG_CACHE_HOME/weft`, else in `~/.cache/weft`; where that cannot be
written, or others could change it, a directory that ends with the process. Past `$WEFT_CACHE_MIB` (256) the libraries
that were used longest ago are removed.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from weft.core.errors import UsageError, WeftError

FLAGS = (
    *("-O2", "-ftree-vectorize", "-march=native", "-std=c++17", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-fvisibility=default", "-w"),
)
"""Loops to unroll are marked in the source: -O3 takes up to twice the time to compile for the same speed."""
EXACT = ("-ffp-contract=off",)
"""For loops: the same expression gives the same bits wherever it stands."""
SECONDS = 120.0
"""Time limit of one compilation."""
MEBIBYTES = 256.0
"""Size limit of the cache, unless `$WEFT_CACHE_MIB` sets another."""


class CompileError(WeftError, RuntimeError):
    """There is no compiler, or it failed; the message has its output."""


@cache
def compiler() -> str | None:
    """The compiler's path: `$CXX`, g++, c++ or clang++; None if there is none."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def load(text: str, *, exact: bool) -> ctypes.CDLL:
    """The compiled text as a library, from the disk if it was compiled before. Raises CompileError and UsageError."""
    path = compiler()
    if path is None:
        raise CompileError("there is no C++ compiler: install g++ or clang++, or set CXX to one")
    flags, bound = _flags(path, exact), _bound()
    key = _digest("\n".join([text, *flags, _version(path), _processor()]).encode())
    library = _cached(key)
    if library is None:
        try:
            library = _library(_compile(path, flags, text, key))
        except OSError as error:
            raise CompileError(f"the compiled library cannot be loaded: {error}") from error
        _trim(folder(), bound)
    return library


def vector_bytes() -> int:
    """The width of this machine's vector registers."""
    known = _processor().split()
    return 64 if "avx512f" in known else 32 if "avx" in known else 16


def _flags(path: str, exact: bool) -> tuple[str, ...]:
    wide = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
    costs = () if "clang" in _version(path) else ("-fvect-cost-model=dynamic",)  # clang weighs them so by itself
    return (*FLAGS, *wide, *costs, *(EXACT if exact else ()))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _library(path: Path) -> ctypes.CDLL:
    """Load a library, which makes it the last used one. Raises OSError."""
    library = ctypes.CDLL(str(path))
    with suppress(OSError):  # another process may have trimmed the cache
        os.utime(path)
    return library


def _cached(key: str) -> ctypes.CDLL | None:
    """The library of this key, if a whole one is on disk; what is torn, or was linked for another machine, goes."""
    for path in sorted(folder().glob(f"{key}-*.so")):
        with suppress(OSError):
            if path.stem == f"{key}-{_digest(path.read_bytes())}":
                return _library(path)
        with suppress(OSError):
            path.unlink()
    return None


def _compile(path: str, flags: tuple[str, ...], text: str, key: str) -> Path:
    """Compile into the cache. Raises CompileError."""
    try:
        with tempfile.TemporaryDirectory(dir=folder(), prefix="compiling-") as place:
            source, made = Path(place) / "loop.cpp", Path(place) / "loop.so"
            source.write_text(text)
            command = [path, *flags, str(source), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise CompileError(f"{path} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
            made.chmod(0o600)
            _flush(made)  # the name must not outlive a crash that the content did not
            target = folder() / f"{key}-{_digest(made.read_bytes())}.so"
            made.replace(target)
            _flush(folder())
            return target
    except (OSError, subprocess.TimeoutExpired) as error:  # no room on the disk is such an error as well
        raise CompileError(f"{path} did not finish: {error}") from error


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _trim(place: Path, room: float) -> None:
    """Remove the libraries used longest ago past so many bytes, and what a killed compilation left behind.

    A process that has loaded a removed library keeps it: the file goes with its last mapping.
    """
    for left in place.glob("compiling-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 10 * SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    libraries: list[tuple[float, int, Path]] = []
    for path in place.glob("*.so"):
        with suppress(OSError):
            about = path.stat()
            libraries.append((about.st_mtime, about.st_size, path))
    for _, size, path in sorted(libraries, reverse=True):  # last used first
        room -= size
        if room < 0:
            with suppress(OSError):
                path.unlink()


def _bound() -> float:
    """The size limit of the cache, in bytes. Raises UsageError."""
    asked = os.environ.get("WEFT_CACHE_MIB") or str(MEBIBYTES)
    try:
        bound = float(asked)
    except ValueError:
        bound = -1.0
    if not bound >= 0:
        raise UsageError(f"WEFT_CACHE_MIB is {asked!r}, wanted a number of mebibytes, 0 or more")
    return bound * 2**20


@cache
def folder() -> Path:
    """The folder of compiled libraries: in the user's cache, or a temporary one if that is unsafe or read-only."""
    home = os.environ.get("WEFT_CACHE")
    try:
        base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
        place = base.absolute() / "compiled"
        for each in (*reversed(place.parents), place):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
        place = place.resolve()  # used without links, which others might repoint
        fault = changeable(place)
        if fault is not None:
            warnings.warn(
                f"compiled loops are not kept in {place}, since others could change what this process would run: "
                f"{fault}; set WEFT_CACHE to a folder of yours that nobody else may write to",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            place.chmod(0o700)
            if os.access(place, os.W_OK):
                return place
    except (OSError, RuntimeError):  # a user without a home is a RuntimeError
        pass
    own = tempfile.mkdtemp(prefix="weft-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def changeable(place: Path) -> str | None:
    """Why others could change the content of a resolved folder, or replace the folder; None if they cannot.

    Whoever may write to a folder on the path from the root can rename what is in it, but for a folder with the sticky
    bit (`/tmp`), where others may make entries and not replace ours. Raises OSError.
    """
    user = os.getuid()
    for here in (*reversed(place.parents), place):
        about = here.stat()
        if about.st_uid not in ((user,) if here == place else (0, user)):
            return f"{here} belongs to user {about.st_uid}"
        if about.st_mode & 0o022 and (here == place or not about.st_mode & stat.S_ISVTX):
            return f"others may write to {here} (mode {stat.S_IMODE(about.st_mode):04o})"
    return None


@cache
def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{path} --version did not answer: {error}") from error
    return f"{path} {done.stdout}"


@cache
def _processor() -> str:
    """The target of `-march=native`: a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
