"""The Kubernetes manifest of a pipeline fits the schemas and the options of torchrun, and is consistent."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

MANIFEST = Path(__file__).parents[3] / "deploy" / "kubernetes" / "pipeline.yaml"


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """The documents of the manifest by kind."""
    yaml = pytest.importorskip("yaml", reason="there is no PyYAML here, which reads the manifests")
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text("utf-8"))}


def test_the_manifest_fits_the_schemas(documents: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra `manifests` brings the schemas")
    for document in documents.values():
        kubernetes_validate.validate(document, "1.32", strict=True)


def test_torchrun_takes_the_arguments(documents: dict[str, Any]) -> None:
    job = documents["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    parsed = get_args_parser().parse_args(container["args"])
    assert container["command"] == ["torchrun"] and parsed.training_script == "/app/train.py"
    assert int(parsed.nnodes) == job["completions"] == job["parallelism"]
    host, port = parsed.rdzv_endpoint.split(":")
    assert host == f"{documents['Job']['metadata']['name']}-0.{job['template']['spec']['subdomain']}"
    assert int(port) == container["ports"][0]["containerPort"] == documents["Service"]["spec"]["ports"][0]["port"]


def test_pods_of_the_job_reach_only_each_other(documents: dict[str, Any]) -> None:
    template = documents["Job"]["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    policy = documents["NetworkPolicy"]["spec"]
    peers = [{"podSelector": {"matchLabels": labels}}]
    assert policy["podSelector"]["matchLabels"] == labels == documents["Service"]["spec"]["selector"]
    assert policy["ingress"] == [{"from": peers}]
    assert [rule for rule in policy["egress"] if {port["port"] for port in rule.get("ports", [])} != {53}] == [
        {"to": peers}
    ]
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is False and pod["securityContext"]["runAsNonRoot"] is True
    context = pod["containers"][0]["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "emptyDir" not in volume]
    assert claims == [documents["PersistentVolumeClaim"]["metadata"]["name"]]
