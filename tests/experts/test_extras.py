"""An installation with torch only reports which packages to install, under their names for pip."""

import pytest

from tests.processes import python

PARTS = ("client", "server", "checkpoint", "mixture", "replication", "wire", "discovery.etcd")
HIDDEN = ("google", "grpc", "grpc_health", "grpc_reflection", "numpy", "prometheus_client", "safetensors")
HIDE = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN!r})); "


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_missing_packages_are_named_for_pip(part: str) -> None:
    seen = python(f"{HIDE}import torchweft.experts.{part}")
    *_, last = seen.stderr.splitlines()
    assert last.startswith("ModuleNotFoundError") and last.endswith(
        "grpcio, grpcio-health-checking, grpcio-reflection, numpy, protobuf, prometheus-client, safetensors "
        "cannot be found: pip install 'torchweft[experts]'"
    )


def test_command_reports_them_in_one_line() -> None:
    seen = python(f"{HIDE}from torchweft.cli import main; main(['serve', '--expert', 'f=ffn'])")
    assert seen.returncode == 2 and "pip install 'torchweft[experts]'" in seen.stderr
    assert len([line for line in seen.stderr.splitlines() if line.startswith("torchweft: ")]) == 1


@pytest.mark.long
def test_other_parts_need_only_torch() -> None:
    seen = python(f"{HIDE}import torchweft.experts.status_page, torchweft.recurrent, torchweft.experts.discovery")
    assert seen.returncode == 0, seen.stderr
