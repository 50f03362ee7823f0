"""A C++ compiler, if there is one, and its results on disk.

    text + flags + compiler + processor  ->  hash  ->  <cache>/<hash>.so      compiled to a name of its own, then
                                                                             renamed: nobody sees half a file

The cache is `$WEFT_CACHE`, or `weft` in `$XDG_CACHE_HOME`, or `~/.cache/weft`; where none of them can be written, a
directory that ends with the process. It is the user's own: a folder that others may write to is not used.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from weft.core.errors import WeftError

FLAGS = (
    *("-O2", "-ftree-vectorize", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-fvisibility=default", "-w"),
)
"""What must be unrolled, the texts say themselves: -O3 takes up to twice the time for the same speed of loops."""
EXACT = ("-ffp-contract=off",)
"""For loops: the same expression gives the same bits wherever it stands."""
SECONDS = 120.0
"""What one compilation may take."""


class CompileError(WeftError, RuntimeError):
    """There is no compiler, or it refused; the message says which, and what it said."""


@cache
def compiler() -> str | None:
    """The compiler's path: `$CXX`, g++, c++ or clang++; None if there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def load(text: str, *, exact: bool) -> ctypes.CDLL:
    """The compiled text as a library, from the disk if it was compiled before. Raises CompileError."""
    path = compiler()
    if path is None:
        raise CompileError("there is no C++ compiler: install g++ or clang++, or set CXX to one")
    flags = _flags(path, exact)
    name = hashlib.sha256("\n".join([text, *flags, _version(path), _processor()]).encode()).hexdigest()[:32]
    target = folder() / f"{name}.so"
    if not target.exists():
        _compile(path, flags, text, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError:  # torn or of another machine: once more
        _compile(path, flags, text, target)
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:
            raise CompileError(f"the compiled library {target} cannot be loaded: {error}") from error


def vector_bytes() -> int:
    """What a vector register of this machine holds."""
    known = _processor().split()
    return 64 if "avx512f" in known else 32 if "avx" in known else 16


def _flags(path: str, exact: bool) -> tuple[str, ...]:
    wide = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
    costs = () if "clang" in _version(path) else ("-fvect-cost-model=dynamic",)  # clang weighs them so by itself
    return (*FLAGS, *wide, *costs, *(EXACT if exact else ()))


def _compile(path: str, flags: tuple[str, ...], text: str, target: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="compiling-") as place:
            source, made = Path(place) / "loop.cpp", Path(place) / "loop.so"
            source.write_text(text)
            command = [path, *flags, str(source), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise CompileError(f"{path} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
            os.replace(made, target)
    except (OSError, subprocess.TimeoutExpired) as error:  # no room on the disk is such an error as well
        raise CompileError(f"{path} did not finish: {error}") from error


@cache
def folder() -> Path:
    """Where compiled libraries are kept."""
    home = os.environ.get("WEFT_CACHE")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = base.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    own = tempfile.mkdtemp(prefix="weft-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


@cache
def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{path} --version did not answer: {error}") from error
    return f"{path} {done.stdout}"


@cache
def _processor() -> str:
    """What `-march=native` stands for: a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
