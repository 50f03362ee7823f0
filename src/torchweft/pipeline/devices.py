"""The `devices` of a Pipe: as a user writes them, and as tensors report them."""

import re
from collections.abc import Iterable
from itertools import combinations, starmap
from typing import Any, cast

import torch

from torchweft.core.errors import UsageError
from torchweft.core.rng import require_supported
from torchweft.core.validation import Validator, is_whole

_NAME = re.compile(r"(gpu|cuda|cpu)?[ :_-]*(\d*)", re.IGNORECASE)


def cuda_devices() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def requested_devices(devices: Any, *, grouped: bool) -> Any:
    """`devices`, with ``"auto"`` as None and a number of devices as their list. With `grouped`, a number is that of the
    device of this rank."""
    if isinstance(devices, str) and devices == "auto":
        return None
    if grouped or not is_whole(devices):
        return devices
    return [f"cuda:{index}" for index in range(devices)] if cuda_devices() else ["cpu"] * devices


def places_of(devices: Any) -> list[torch.device]:
    """Devices as tensors report them. Raises UsageError that lists every entry that is not a device of this machine."""
    given: Any = [devices] if isinstance(devices, str | int | torch.device) else devices
    headline = "devices are names such as 'cpu' or 'cuda:1', numbers, or torch.device, one per stage; but"
    if not isinstance(given, Iterable):
        raise UsageError(f"{headline} it is {devices!r}")
    entries = list(cast("Iterable[Any]", given))
    if not entries:
        raise UsageError(f"{headline} it is {devices!r}; give at least one, as in devices=['cuda:0']")
    places: list[torch.device] = []
    unknown: list[str] = []
    absent: list[str] = []
    with Validator(headline) as check:
        for stage, entry in enumerate(entries):
            device = _device_of(entry)
            if device is None:
                unknown.append(f"devices[{stage}] is {entry!r}")
            elif device.type != "cuda" or (device.index or 0) < torch.cuda.device_count():
                places.append(_indexed(device))
            else:
                absent.append(f"devices[{stage}] is {entry!r}")
        meant = [_meant_names(entry) for entry in entries]
        if unknown and all(meant):
            unknown[-1] += f"; did you mean devices={[name for names in meant for name in names]}?"
        check.add(*unknown)
        if absent:
            cpus = ["cpu"] * (len(places) + len(absent))
            check.add(f"{' and '.join(absent)}, but {reason_without_cuda()}, or give devices={cpus}")
        for place in dict.fromkeys(places):
            check.call(require_supported, place)
        for pair in combinations([place for place in dict.fromkeys(places) if place.type == "cuda"], 2):
            check.call(require_peer_access, *pair)
    return places


def _device_of(entry: Any) -> torch.device | None:
    try:
        # A build for the CPU rejects a number without saying that CUDA is missing.
        return None if isinstance(entry, bool) else torch.device(f"cuda:{entry}" if is_whole(entry) else entry)
    except (TypeError, RuntimeError):
        return None


def _meant_names(entry: Any) -> list[str]:
    """The names of devices in an entry such as ``"gpu:0"`` or ``"cpu,cpu"``. Empty if it has none."""
    found = [_NAME.fullmatch(word.strip()) for word in str(entry).split(",")]
    pairs = [name.groups("") for name in found if name and any(name.groups())]
    return ["cpu" if kind.lower() == "cpu" else f"cuda:{index or 0}" for kind, index in pairs]


def reason_without_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"PyTorch {torch.__version__} is a build for the CPU (torch.version.cuda is None); install one with CUDA "
            "(https://pytorch.org/get-started/locally)"
        )
    if not (count := torch.cuda.device_count()):
        return (
            "PyTorch sees no CUDA device (torch.cuda.device_count() is 0); look at nvidia-smi, the driver and the "
            "environment variable CUDA_VISIBLE_DEVICES"
        )
    return f"PyTorch sees {count} (torch.cuda.device_count()); give numbers below {count}"


def reject_absent_cuda(error: Exception) -> None:
    """Raise UsageError if a move of tensors failed with `error` because this machine or PyTorch lacks CUDA."""
    if not cuda_devices() and any(word in str(error) for word in ("CUDA", "NVIDIA")):
        raise UsageError(
            f"this Pipe cannot be moved to CUDA: {reason_without_cuda()}. A Pipe puts each stage on its device, so "
            "give devices= when it is made, in the place of cuda() or to()"
        ) from None


def require_peer_access(one: torch.device, other: torch.device) -> None:
    if not all(starmap(torch.cuda.can_device_access_peer, ((one, other), (other, one)))):
        raise UsageError(
            f"{one} and {other} have no peer access, which torchweft is not tested without; use one of them"
        )


def _indexed(device: torch.device) -> torch.device:
    # Tensors report the CPU without a number, and CUDA devices with theirs. The scan compares with that.
    if device.type == "cuda" and device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
