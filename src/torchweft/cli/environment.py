"""``torchweft env``: versions, devices and settings, as a list to paste into an issue, or as JSON.

A broken installation is the usual reason to ask for this list. If a row fails, such as the import of PyTorch, it shows
the error, and the other rows are printed all the same.
"""

import json
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from torchweft.core.version import __version__

_PACKAGES = (
    *("numpy", "safetensors", "grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "pydantic"),
    *("prometheus-client", "starlette", "uvicorn", "transformers", "accelerate", "shtab"),
)
_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CXX")


def print_environment(chosen: Namespace) -> None:
    rows = {name: _described(describe) for name, describe in _ROWS.items()}
    if chosen.json:
        print(json.dumps(rows, indent=2))
        return
    print("Paste this into your issue:\n")
    for name, row in rows.items():
        print(f"- {name}: {row if isinstance(row, str) else ', '.join(map(' '.join, row.items()))}")


def _described(describe: Callable[[], str | dict[str, str]]) -> str | dict[str, str]:
    try:
        return describe()
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _describe_processor() -> str:
    # Only Linux names the model. The cores that this process can use are fewer in a container.
    info = Path("/proc/cpuinfo").read_text("utf-8", "replace") if Path("/proc/cpuinfo").is_file() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{(models or [platform.machine()])[0]}, {usable} of {os.cpu_count()} cores"


def _describe_torch() -> str:
    torch: Any = import_module("torch")
    builds = [f"{name} {number}" for name in ("cuda", "hip") if (number := getattr(torch.version, name))]
    return f"{torch.__version__}, for {(builds or ['the CPU'])[0]}, {torch.get_num_threads()} threads"


def _describe_devices() -> str:
    cuda: Any = import_module("torch").cuda
    cards = [cuda.get_device_properties(number) for number in range(cuda.device_count())]
    names = [f"cuda:{number} {card.name} {card.total_memory / 2**30:.1f} GiB" for number, card in enumerate(cards)]
    return ", ".join(["cpu", *names])


def _describe_compiler() -> str:
    from torchweft.recurrent.cpp.compiler import cache_folder, compiler_version, find_compiler  # noqa: PLC0415

    path, folder = find_compiler(), cache_folder()
    if path is None:
        return "none, so recurrent nets run without compiled loops: install g++ or clang++, or set CXX"
    # The folder has another name if the user's cache cannot be written to.
    where = folder if folder.name == "compiled" else "none: set TORCHWEFT_CACHE to a folder that you can write to"
    return f"{compiler_version(path).splitlines()[0]}, cache: {where}"


def _describe_packages() -> dict[str, str]:
    # Metadata spell a name with "-" or with "_".
    numbers = {found.name.lower().replace("_", "-"): found.version for found in distributions()}
    return {name: numbers.get(name, "missing") for name in _PACKAGES}


def _describe_settings() -> dict[str, str]:
    ours = sorted(name for name in os.environ if name.startswith("TORCHWEFT_"))
    # The token of `torchweft status` is a secret, and this list will be published.
    return {name: "(secret)" if "TOKEN" in name else os.environ.get(name, "unset") for name in (*_SETTINGS, *ours)}


_ROWS: dict[str, Callable[[], str | dict[str, str]]] = {
    "torchweft": lambda: f"{__version__}, in {Path(__file__).parents[1]}",
    "Python": lambda: f"{platform.python_version()}, {sys.executable}",
    "platform": platform.platform,
    "processor": _describe_processor,
    "PyTorch": _describe_torch,
    "devices": _describe_devices,
    "C++ compiler": _describe_compiler,
    "packages": _describe_packages,
    "environment": _describe_settings,
}
