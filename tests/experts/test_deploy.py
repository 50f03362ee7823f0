"""The files below deploy/ are what systemd and Kubernetes can read, and fit together."""

import re
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from tests.experts.certificates import Authority
from tests.experts.status_page.panel_cases import get
from torchweft import cli
from torchweft.experts.address import parse_address
from torchweft.experts.discovery.etcd import EtcdDirectory, EtcdTls, open_directory
from torchweft.experts.registry import expert_kinds, make_expert
from torchweft.experts.server import Server
from torchweft.experts.server.config import build
from torchweft.experts.server.options import listen_faults

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "torchweft-experts.service"


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="there is no PyYAML here, which reads the manifests")
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text("utf-8")))


def check_configuration(text: str) -> None:
    """It names a directory, kinds of experts that there are, and an address that clients can call."""
    table = tomllib.loads(text)
    assert listen_faults(table["address"], table.get("advertise"), listed_there=True) == []
    directory = open_directory(table["directory"])
    assert isinstance(directory, EtcdDirectory)
    directory.close()
    EtcdTls(**table["directory_tls"])
    for entry in table["experts"]:
        assert entry["kind"] in expert_kinds()
        make_expert(entry["kind"], **entry["arguments"])


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT, "utf-8")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    assert unit["Service"]["ExecStart"].split()[1:] == ["serve", "/etc/torchweft/experts.toml"]
    assert int(unit["Service"]["TimeoutStopSec"]) > 5  # longer than the server takes to drain
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no `systemd-analyze` on the path, which checks the rest")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace("/opt/torchweft/bin/torchweft", sys.executable))
    seen = subprocess.run([tool, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert seen.returncode == 0 and UNIT.name not in seen.stderr, seen.stderr


def test_systemd_rates_the_unit_as_well_confined() -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("there is no `systemd-analyze` on the path, which rates units")
    # In tenths: 1.4 when this was written; 7.5 before the unit was confined.
    command = [tool, "security", "--offline=true", "--threshold=15", str(UNIT)]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "offline" in seen.stderr:
        pytest.skip("this `systemd-analyze` rates no files: " + seen.stderr.strip())
    assert seen.returncode == 0, seen.stdout


def test_configuration_reads_keys_that_the_unit_loads() -> None:
    text = (DEPLOY / "experts.toml").read_text("utf-8")
    check_configuration(text)
    table = tomllib.loads(text)
    where = f"/run/credentials/{UNIT.name}"
    loaded = re.findall(r"^LoadCredential=([^:]+):", UNIT.read_text("utf-8"), re.MULTILINE)
    read = {*table["tls"].values(), *table["directory_tls"].values()}
    assert read == {f"{where}/{name}" for name in loaded}


@pytest.mark.parametrize("name", ["etcd.yaml", "experts.yaml"])
def test_a_manifest_is_what_the_schema_of_kubernetes_wants(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra `manifests` brings the schemas")
    for document in documents(name):
        kubernetes_validate.validate(document, "1.32", strict=True)


@pytest.mark.parametrize("name", ["etcd.yaml", "experts.yaml"])
def test_the_pods_of_a_manifest_are_confined(name: str) -> None:
    found = {document["kind"]: document for document in documents(name)}
    template = found["StatefulSet"]["spec"]["template"]
    pod = template["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        image, _, tag = container["image"].rpartition(":")
        assert image and re.fullmatch(r"v?\d+\.\d+\.\d+", tag), f"{container['image']} is not of one version"
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule.get("from") for rule in policy["ingress"]), "a rule without `from` lets everybody in"
    # and all its parts fit together
    assert all({"apiVersion", "kind", "metadata"} <= document.keys() for document in found.values())
    workload, service, labels = found["StatefulSet"]["spec"], found["Service"], template["metadata"]["labels"]
    assert workload["serviceName"] == service["metadata"]["name"]
    assert labels == workload["selector"]["matchLabels"] == service["spec"]["selector"]
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in workload["volumeClaimTemplates"]}
    ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for port in service["spec"]["ports"]:
        assert ports[port["name"]] == port["port"]


def test_the_configuration_of_a_pod_names_what_there_is() -> None:
    text = pod_configuration()
    check_configuration(text)
    assert tomllib.loads(text)["experts"][0]["name"] == "ffn.3.{}"
    members = found_members()
    assert [f"{member}.etcd:2379" for member in members] == tomllib.loads(text)["directory"].split("/")[2].split(",")


def pod_configuration() -> str:
    found = {document["kind"]: document for document in documents("experts.yaml")}
    return str(found["ConfigMap"]["data"]["experts.toml"]).replace("@NAME@", "torchweft-3").replace("@NUMBER@", "3")


SHIPPED = {"systemd": (DEPLOY / "experts.toml").read_text, "a pod": pod_configuration}
TOKEN = "0123456789abcdef"


def served_here(text: str, folder: Path, authority: Authority) -> Server:
    """The server of a shipped configuration, with certificates of this test, free ports, and without a directory."""
    table = tomllib.loads(text)
    for name in ("directory", "directory_tls", "advertise", "checkpoints"):
        del table[name]
    key, certificate = authority.issue("torchweft-server")
    for name, pem in {"key": key, "certificate": certificate, "authority": authority.pem}.items():
        path = folder / Path(table["tls"][name]).name
        path.write_bytes(pem)
        table["tls"][name] = str(path)
    if "token_file" in table["panel"]:
        (folder / "token").write_text(TOKEN + "\n", "utf-8")
        table["panel"]["token_file"] = str(folder / "token")
    table["panel"]["address"] = f"{parse_address(table['panel']['address'])[0]}:0"
    return build({**table, "address": "localhost:0", "experts": [{**table["experts"][0], "count": 1}]})


@pytest.mark.parametrize("where", SHIPPED)
def test_torchweft_status_works_as_shipped(
    where: str, tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever has a server's certificate reads the status, as the docs say; a trainer does not."""
    text = SHIPPED[where]()
    admins = [grant["client"] for grant in tomllib.loads(text)["grants"] if grant["role"] == "admin"]
    users = re.findall(r"^\$etcdctl user add (\S+)", (DEPLOY / "etcd-users.sh").read_text("utf-8"), re.MULTILINE)
    assert admins == ["torchweft-server"] and set(admins) <= set(users)

    def ask(client: str) -> None:
        words = ["status", server.address]
        key, certificate = authority.issue(client)
        for name, pem in {"key": key, "certificate": certificate, "authority": authority.pem}.items():
            (tmp_path / name).write_bytes(pem)
            words += [f"--{name}", str(tmp_path / name)]
        assert cli.main(words) == 0

    with served_here(text, tmp_path, authority) as server:
        for client in admins:
            ask(client)
            assert server.address in capsys.readouterr().out
        with pytest.raises(SystemExit):
            ask("trainer")
        assert "which takes role ADMIN" in capsys.readouterr().err


def test_metrics_have_one_port_as_shipped(tmp_path: Path, authority: Authority) -> None:
    """The panel's port is that of the pod, the service and the policy, and is open to one label and to the token."""
    ports = {parse_address(tomllib.loads(text())["panel"]["address"])[1] for text in SHIPPED.values()}
    found = {document["kind"]: document["spec"] for document in documents("experts.yaml") if "spec" in document}
    (container,) = found["StatefulSet"]["template"]["spec"]["containers"]
    ports |= {each["containerPort"] for each in container["ports"] if each["name"] == "metrics"}
    ports |= {each["port"] for each in found["Service"]["ports"] if each["name"] == "metrics"}
    (port,) = ports
    rules = [rule for rule in found["NetworkPolicy"]["ingress"] if port in [each["port"] for each in rule["ports"]]]
    assert rules == [
        {
            "from": [{"podSelector": {"matchLabels": {"torchweft-metrics": "true"}}}],
            "ports": [{"protocol": "TCP", "port": port}],
        }
    ]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(tomllib.loads(pod_configuration())["panel"]["token_file"]).parent) in mounts
    with served_here(pod_configuration(), tmp_path, authority) as server:
        assert server.panel_url is not None
        url = server.panel_url.replace("0.0.0.0", "127.0.0.1")
        status, _, body = get(url, "/metrics", Host="10.0.0.7:9090", Authorization=f"Bearer {TOKEN}")
        assert status == 200 and "torchweft_expert_steps_total" in body
        assert get(url, "/metrics", Host="10.0.0.7:9090")[0] == 401


def found_members() -> list[str]:
    workload = next(each for each in documents("etcd.yaml") if each["kind"] == "StatefulSet")
    return [f"{workload['metadata']['name']}-{i}" for i in range(workload["spec"]["replicas"])]


def test_etcd_knows_every_option_that_it_is_given() -> None:
    workload = next(each for each in documents("etcd.yaml") if each["kind"] == "StatefulSet")
    arguments = workload["spec"]["template"]["spec"]["containers"][0]["args"]
    cluster = next(word for word in arguments if word.startswith("--initial-cluster="))
    assert [word.split("=")[0] for word in cluster.removeprefix("--initial-cluster=").split(",")] == found_members()
    tool = shutil.which("etcd")
    if tool is None:
        pytest.skip("there is no `etcd` on the path, which says what options it has")
    said = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=20, check=False)
    known = set((said.stdout + said.stderr).split())
    assert [word for word in arguments if word.split("=")[0] not in known] == []
