"""The files below deploy/ are valid for systemd, Kubernetes and Docker, and are consistent with each other."""

import json
import re
import shlex
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
from torchweft.experts.tls import ServerTls

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "torchweft-experts.service"


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which reads the manifests, is not installed")
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text("utf-8")))


def stateful_set(name: str) -> dict[str, Any]:
    return next(document for document in documents(name) if document["kind"] == "StatefulSet")


def check_configuration(text: str) -> None:
    """Assert that a config names a directory, known kinds of experts and an address that clients can call."""
    table = tomllib.loads(text)
    assert listen_faults(table["address"], table.get("advertise"), listed_there=True) == []
    directory = open_directory(table["directory"])
    assert isinstance(directory, EtcdDirectory)
    directory.close()
    EtcdTls(**table["directory_tls"])
    for entry in table["experts"]:
        assert entry["kind"] in expert_kinds()
        make_expert(entry["kind"], **entry["arguments"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT, "utf-8")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    assert unit["Service"]["ExecStart"].split()[1:] == ["serve", "/etc/torchweft/experts.toml"]
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) > 5  # longer than the draining of the server
    assert service["Type"] == "notify" and service["TimeoutStartSec"] == "15min"  # restoring can take minutes
    # `torchweft serve` exits with 2 for an invalid configuration, which a restart cannot fix.
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("always", "2")
    assert service["MemoryMax"] == "80%"
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("`systemd-analyze`, which checks the rest, is not on the path")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace("/opt/torchweft/bin/torchweft", sys.executable))
    seen = subprocess.run([tool, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert seen.returncode == 0 and UNIT.name not in seen.stderr, seen.stderr


def test_systemd_rates_the_unit_as_well_confined() -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("`systemd-analyze`, which rates units, is not on the path")
    # The threshold is in tenths. The rating is 1.4, and was 7.5 before the unit was confined.
    command = [tool, "security", "--offline=true", "--threshold=15", str(UNIT)]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "offline" in seen.stderr:
        pytest.skip("this `systemd-analyze` cannot rate files: " + seen.stderr.strip())
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
def test_manifest_matches_the_kubernetes_schema(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra `manifests` brings the schemas")
    for document in documents(name):
        kubernetes_validate.validate(document, "1.32", strict=True)


@pytest.mark.parametrize("name", ["etcd.yaml", "experts.yaml"])
def test_the_pods_of_a_manifest_are_confined(name: str) -> None:
    by_kind = {document["kind"]: document for document in documents(name)}
    template = by_kind["StatefulSet"]["spec"]["template"]
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
    policy = by_kind["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule.get("from") for rule in policy["ingress"]), "a rule without `from` admits every client"
    # The parts of the manifest refer to each other.
    assert all({"apiVersion", "kind", "metadata"} <= document.keys() for document in by_kind.values())
    workload, service, labels = by_kind["StatefulSet"]["spec"], by_kind["Service"], template["metadata"]["labels"]
    assert workload["serviceName"] == service["metadata"]["name"]
    assert labels == workload["selector"]["matchLabels"] == service["spec"]["selector"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in workload["volumeClaimTemplates"]}
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for port in service["spec"]["ports"]:
        assert ports[port["name"]] == port["port"]


def test_pod_configuration_names_existing_members() -> None:
    text = pod_configuration()
    check_configuration(text)
    assert tomllib.loads(text)["experts"][0]["name"] == "ffn.3.{}"
    members = etcd_members()
    assert [f"{member}.etcd:2379" for member in members] == tomllib.loads(text)["directory"].split("/")[2].split(",")


def pod_configuration() -> str:
    by_kind = {document["kind"]: document for document in documents("experts.yaml")}
    return str(by_kind["ConfigMap"]["data"]["experts.toml"]).replace("@NAME@", "torchweft-3").replace("@NUMBER@", "3")


SHIPPED = {"systemd": (DEPLOY / "experts.toml").read_text, "a pod": pod_configuration}
TOKEN = "0123456789abcdef"


def served_here(text: str, folder: Path, authority: Authority) -> Server:
    """Server of a shipped configuration with test certificates and free ports, but without a directory."""
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
    """A client with a server's certificate can read the status, as the docs say. A trainer cannot."""
    text = SHIPPED[where]()
    admins = [grant["client"] for grant in tomllib.loads(text)["grants"] if grant["role"] == "admin"]
    users = re.findall(r"^ensure user add (\S+)", (DEPLOY / "etcd-users.sh").read_text("utf-8"), re.MULTILINE)
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
    """Panel, pod, service and policy agree on the port, which is open to one label and needs the token."""
    ports = {parse_address(tomllib.loads(text())["panel"]["address"])[1] for text in SHIPPED.values()}
    by_kind = {document["kind"]: document["spec"] for document in documents("experts.yaml") if "spec" in document}
    (container,) = by_kind["StatefulSet"]["template"]["spec"]["containers"]
    ports |= {port["containerPort"] for port in container["ports"] if port["name"] == "metrics"}
    ports |= {port["port"] for port in by_kind["Service"]["ports"] if port["name"] == "metrics"}
    (port,) = ports
    rules = [rule for rule in by_kind["NetworkPolicy"]["ingress"] if port in [other["port"] for other in rule["ports"]]]
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


def probe_command(container: dict[str, Any], name: str = "$HOSTNAME") -> list[str]:
    """Command line of the liveness probe in a pod of this name."""
    shell, option, text = container["livenessProbe"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    return shlex.split(text.replace("$HOSTNAME", name))


def test_liveness_probe_runs_against_the_server_as_shipped(
    tmp_path: Path, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe connects to the loopback address and passes the name in the certificate."""
    spec = stateful_set("experts.yaml")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    run, command, *words = probe_command(container, "torchweft-1")
    assert (run, command, words[0]) == ("exec", "torchweft", "health")
    assert words[words.index("--server-name") + 1] == f"torchweft-1.{spec['serviceName']}"
    table = tomllib.loads(pod_configuration())
    for option, path in table["tls"].items():
        assert words[words.index(f"--{option}") + 1] == path
    probe = container["livenessProbe"]
    assert float(words[words.index("--timeout") + 1]) < probe["timeoutSeconds"] < probe["periodSeconds"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    with served_here(pod_configuration(), tmp_path, authority) as server:
        assert words[1].rpartition(":")[2] == str(parse_address(table["address"])[1])
        words[1] = server.address.replace("localhost", "127.0.0.1")
        words[words.index("--server-name") + 1] = "localhost"
        words = [str(tmp_path / Path(word).name) if word.startswith("/tls/") else word for word in words]
        assert cli.main(words) == 0 and "takes work" in capsys.readouterr().out
        server.drain()
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 1


def test_work_ends_within_the_grace_period() -> None:
    """An end that is killed loses answers that its clients wait for. Saving needs time after the accepted work."""
    unit = UNIT.read_text("utf-8")
    graces = {"systemd": int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])}  # type: ignore[index]
    graces["a pod"] = stateful_set("experts.yaml")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for name, grace in graces.items():
        drain = tomllib.loads(SHIPPED[name]())["options"]["drain_seconds"]
        assert 20 <= drain <= grace - 10


@pytest.mark.parametrize("name", ["etcd.yaml", "experts.yaml"])
def test_drained_nodes_take_one_server_at_a_time(name: str) -> None:
    by_kind = {document["kind"]: document["spec"] for document in documents(name) if "spec" in document}
    template = by_kind["StatefulSet"]["template"]
    selector = {"matchLabels": template["metadata"]["labels"]}
    assert by_kind["PodDisruptionBudget"] == {"maxUnavailable": 1, "selector": selector}
    (rules,) = template["spec"]["affinity"]["podAntiAffinity"].values()
    (term,) = (rule.get("podAffinityTerm", rule) for rule in rules)
    assert term["topologyKey"] == "kubernetes.io/hostname" and term["labelSelector"] == selector


DOCKERFILE = DEPLOY / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile and their arguments, with continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines()]


def test_dockerfile_builds_the_images_of_the_manifests() -> None:
    """The commands in its comments build them from existing stages."""
    text = DOCKERFILE.read_text("utf-8")
    built = dict(reversed(pair) for pair in re.findall(r"--target (\w+) -t (\S+) \.", text))
    stages = [argument.split()[-1] for name, argument in instructions() if name == "FROM"]
    assert set(built.values()) <= set(stages) and stages[-1] == "experts"
    images: dict[str, Any] = {}
    for manifest, target in (("experts.yaml", "experts"), ("pipeline.yaml", "train")):
        workload = next(document for document in documents(manifest) if document["kind"] in ("StatefulSet", "Job"))
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        images[container["image"]] = target
        user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
        assert ("USER", user) in instructions()
    assert built == images
    version = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert all(image.endswith(f":{version}") for image in images)


def test_dockerfile_copies_what_the_context_holds() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    patterns = [line for line in ignore if line and not line.startswith("#")]
    assert patterns[0] == "*"  # everything except the exceptions that follow
    sent = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    assert all((DEPLOY.parent / name).exists() for name in sent)
    defaults = dict(argument.split("=", 1) for name, argument in instructions() if name == "ARG" and "=" in argument)
    copied: list[str] = []
    for name, argument in instructions():
        if name == "COPY" and not argument.startswith("--from="):
            *sources, _ = argument.split()
            copied += [re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], source) for source in sources]
    assert copied and all((DEPLOY.parent / source).exists() for source in copied), copied
    assert {source.removeprefix("./").split("/")[0] for source in copied} == sent


def test_dockerfile_keeps_to_good_practice() -> None:
    names = [name for name, _ in instructions()]
    assert {"USER", "HEALTHCHECK", "ENTRYPOINT", "CMD"} <= set(names)
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert set(names) <= known  # excludes ADD, MAINTAINER and misspelt names
    users = [argument for name, argument in instructions() if name == "USER"]
    assert not {user.split(":")[0] for user in users} & {"root", "0"}
    for name, argument in instructions():
        if name in ("CMD", "ENTRYPOINT"):  # as lists, so that SIGTERM reaches the program and not a shell
            assert json.loads(argument)
        if name == "FROM" and not argument.split()[0].isalpha():
            assert re.match(r"python:\$\{PYTHON\}-slim-\w+ AS \w+$", argument), argument
    (check,) = (argument for name, argument in instructions() if name == "HEALTHCHECK")
    *_, command = json.loads(check.partition(" CMD ")[2])
    words = shlex.split(re.sub(r"\$\{\w+:-(.*?)\}", r"\1", command))
    assert words[:3] == ["exec", "torchweft", "health"] and cli.parse(words[2:]).address == "127.0.0.1:7070"
    entry = {name: json.loads(argument) for name, argument in instructions() if name in ("ENTRYPOINT", "CMD")}
    assert cli.parse([*entry["ENTRYPOINT"], *entry["CMD"]][1:]).config == Path("/etc/torchweft/experts.toml")


def test_hadolint_accepts_the_dockerfile() -> None:
    tool = shutil.which("hadolint")
    if tool is None:
        pytest.skip("`hadolint`, which lints Dockerfiles, is not on the path")
    seen = subprocess.run([tool, str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert seen.returncode == 0, seen.stdout


ETCDCTL = """#!/bin/sh
# Like etcd: adding an existing user or role is an error, every other repetition succeeds.
echo "$*" >>"$STATE/calls"
case "$1 $2" in
"user add" | "role add")
    if [ -e "$STATE/$1-$3" ]; then
        echo "Error: etcdserver: $1 name already exists" >&2
        exit 1
    fi
    touch "$STATE/$1-$3"
    ;;
esac
[ "$FAIL" != "$1 $2" ] || { echo "Error: context deadline exceeded" >&2; exit 1; }
"""


def test_etcd_users_script_can_be_repeated(tmp_path: Path) -> None:
    """A repeated run changes nothing. A run after an interruption completes the rest. Other errors end it."""
    tool = tmp_path / "etcdctl"
    tool.write_text(ETCDCTL)
    tool.chmod(0o700)

    def run(fail: str = "") -> "subprocess.CompletedProcess[str]":
        env = {"ETCDCTL": str(tool), "STATE": str(tmp_path), "FAIL": fail, "PATH": "/usr/bin:/bin"}
        words = ["sh", str(DEPLOY / "etcd-users.sh")]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)

    failed = run("role grant-permission")
    assert failed.returncode == 1 and "context deadline exceeded" in failed.stderr
    assert "auth enable" not in (tmp_path / "calls").read_text()
    for _ in range(2):
        done = run()
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "calls").read_text().splitlines()[-1] == "auth enable"
    assert "user add root --no-password exists already" in done.stdout


STUB = """#!/bin/sh
# Stub for a program of another machine that checks the files in its arguments.
echo "${0##*/} $*" >>"$LOG"
for word; do
    case $word in
    --from-file=*) test -s "${word##*=}" || exit 3 ;;
    deploy/*) test -f "$word" || exit 3 ;;
    port-forward) exec /bin/sleep 60 ;;
    esac
done
case "${0##*/} $1 $2" in
"python3 -m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/pip" && cp "$0" "$3/bin/torchweft" ;;
esac
"""
INSTALL = """#!/bin/sh
# Ignores the owner, a user of another machine.
if [ "$1" = -o ]; then shift 4; fi
exec /usr/bin/install "$@"
"""
PROGRAMS = ("apt-get", "systemctl", "kubectl", "docker", "etcdctl", "curl", "python3", "sleep")


def test_blocks_of_the_page_can_be_pasted_in_order(tmp_path: Path, authority: Authority) -> None:
    """Runs all of docs/experts_etcd.md with stubs for programs of other machines, but real certificates and files."""
    if shutil.which("openssl") is None:
        pytest.skip("`openssl`, which creates the certificates, is not on the path")
    tools, root = tmp_path / "bin", tmp_path / "root"
    for folder in ("etc/default", "etc/systemd/system", "opt"):
        (root / folder).mkdir(parents=True)
    tools.mkdir()
    for name in (*PROGRAMS, "install"):
        (tools / name).write_text(INSTALL if name == "install" else STUB)
        (tools / name).chmod(0o700)
    (tmp_path / "deploy").symlink_to(DEPLOY)
    page = (DEPLOY.parent / "docs" / "experts_etcd.md").read_text("utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = re.sub(r"(?<![\w./-])/(etc|opt)/", rf"{root}/\1/", "set -eu\n" + "".join(blocks))
    env = {"PATH": f"{tools}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "log").read_text("utf-8")
    assert calls.count("etcdctl ") == 24 and "docker build -f deploy/Dockerfile --target experts" in calls
    assert all(f"kubectl create secret generic {name} " in calls for name in secrets_of_the_manifests())
    # The commands create all files that the unit loads and the configuration reads.
    loaded = re.findall(r"^LoadCredential=[^:]+:/etc/(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert len(loaded) == 6 and all((root / "etc" / path).stat().st_size for path in loaded)
    table = tomllib.loads((root / "etc/torchweft/experts.toml").read_text("utf-8"))
    names = {Path(path).name: path for path in (*table["tls"].values(), *table["directory_tls"].values())}
    folder = root / "etc/torchweft/tls"
    ServerTls(*(folder / name for name in ("tls.key", "tls.crt", "ca.crt"))).credentials()
    EtcdTls(*(folder / name for name in ("etcd-ca.crt", "etcd.key", "etcd.crt"))).credentials()
    assert {path.name for path in folder.iterdir()} == set(names)
    # etcd on machines has the options of etcd in pods.
    settings = dict(line.split("=", 1) for line in (root / "etc/default/etcd").read_text("utf-8").splitlines())
    workload = stateful_set("etcd.yaml")
    options = [word[2:].split("=")[0] for word in workload["spec"]["template"]["spec"]["containers"][0]["args"]]
    in_pods_only = {"ETCD_DATA_DIR", "ETCD_LISTEN_METRICS_URLS"}
    assert {f"ETCD_{name.upper().replace('-', '_')}" for name in options} - in_pods_only == set(settings)


def secrets_of_the_manifests() -> set[str]:
    workloads = [stateful_set(name) for name in ("etcd.yaml", "experts.yaml")]
    volumes = [volume for workload in workloads for volume in workload["spec"]["template"]["spec"]["volumes"]]
    return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def etcd_members() -> list[str]:
    workload = stateful_set("etcd.yaml")
    return [f"{workload['metadata']['name']}-{i}" for i in range(workload["spec"]["replicas"])]


def test_etcd_knows_every_option_of_the_manifest() -> None:
    arguments = stateful_set("etcd.yaml")["spec"]["template"]["spec"]["containers"][0]["args"]
    cluster = next(word for word in arguments if word.startswith("--initial-cluster="))
    assert [word.split("=")[0] for word in cluster.removeprefix("--initial-cluster=").split(",")] == etcd_members()
    tool = shutil.which("etcd")
    if tool is None:
        pytest.skip("`etcd`, which lists its options, is not on the path")
    output = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=20, check=False)
    known = set((output.stdout + output.stderr).split())
    assert [word for word in arguments if word.split("=")[0] not in known] == []
