"""All cells of the notebooks run, and the script of the tutorials creates certificates."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SCRIPT = ROOT / "deploy" / "make-certificates.sh"


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_of_a_notebook_run(path: Path) -> None:
    """Cells that install packages (`%pip`) are skipped."""
    notebook = json.loads(path.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": path.stem}
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not re.search(r"^%pip ", source, re.MULTILINE):
            exec(compile(source, f"{path.name}[{number}]", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def make_certificates(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["sh", str(SCRIPT), str(folder), *words], capture_output=True, text=True, check=False)


def test_certificates_are_for_their_hosts_and_uses(tmp_path: Path) -> None:
    hosts = ("gpu7.lab", "10.0.0.7", "::1")
    assert make_certificates(tmp_path, "server", *hosts).returncode == 0
    assert make_certificates(tmp_path, "client", "trainer-0").returncode == 0
    keys = [file for file in tmp_path.iterdir() if file.suffix == ".key"]
    assert len(keys) == 3 and {file.stat().st_mode & 0o777 for file in keys} == {0o600}
    verify = ["openssl", "verify", "-CAfile", str(tmp_path / "ca.crt"), "-purpose"]
    for use, kind, name, valid in (
        ("sslserver", "hostname", "gpu7.lab", True),
        ("sslserver", "hostname", "gpu8.lab", False),
        ("sslserver", "ip", "10.0.0.7", True),
        ("sslserver", "ip", "::1", True),
        ("sslclient", "hostname", "gpu7.lab", True),  # servers call each other, too
    ):
        server = [*verify, use, f"-verify_{kind}", name, str(tmp_path / "server-gpu7.lab.crt")]
        assert (subprocess.run(server, capture_output=True, check=False).returncode == 0) is valid, name
    for use, valid in (("sslclient", True), ("sslserver", False)):  # a client cannot pose as a server
        client = [*verify, use, str(tmp_path / "client-trainer-0.crt")]
        assert (subprocess.run(client, capture_output=True, check=False).returncode == 0) is valid, use


def test_renewed_certificate_keeps_key_and_authority(tmp_path: Path) -> None:
    def contents() -> list[bytes]:
        return [(tmp_path / name).read_bytes() for name in ("ca.crt", "ca.key", "client-a.key", "client-a.crt")]

    make_certificates(tmp_path, "client", "a")
    before = contents()
    make_certificates(tmp_path, "client", "a")
    after = contents()
    assert before[:3] == after[:3] and before[3] != after[3]
    assert not list(tmp_path.glob("draft*"))


@pytest.mark.parametrize(
    "words",
    [("server",), ("client", "a", "b"), ("client", "../a"), ("client", "a\nb"), ("server", ""), ("guest", "a")],
)
def test_wrong_request_for_a_certificate_is_rejected(words: tuple[str, ...], tmp_path: Path) -> None:
    done = make_certificates(tmp_path / "new", *words)
    assert done.returncode == 2 and done.stderr.startswith("make-certificates.sh: ")
    assert not (tmp_path / "new").exists()
