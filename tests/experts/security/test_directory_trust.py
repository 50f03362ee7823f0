"""A writer of the directory cannot take over clients: server names, tokens and etcd users are restricted."""

import http.client
import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts.certificates import Authority
from tests.experts.concurrency import wait_until
from tests.experts.etcd_cases import WHERE, free_ports, wait_for_port
from tests.experts.expert_cases import fussy_backend, weights
from tests.experts.server.replica_cases import expert, make
from tests.type_checks import without_type_checks
from torchweft.core.errors import UsageError
from torchweft.experts.client import NEVER, ClientTls, Connections, GrpcTransport, RemoteExpert
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.discovery.etcd import EtcdDirectory, EtcdTls, RefusedByEtcdError
from torchweft.experts.errors import DirectoryUnavailableError, UnreachableError
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server import Access, Grant, Role, Server, ServerTls

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.mark.parametrize("address", ["10.0.0.7:7070", "server.example:7070", "[fd00::1]:7070"])
def test_no_token_leaves_without_tls_but_to_this_machine(address: str) -> None:
    with pytest.raises(UsageError, match=r"a token would be sent to .* in plain text; give tls="):
        GrpcTransport(address, token="s3cret")
    for here in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"):
        GrpcTransport(here, token="s3cret").close()
    GrpcTransport(address).close()  # no token


def test_token_is_never_sent_in_plain_text(directory: LocalDirectory) -> None:
    directory.declare("fussy", "10.255.0.1:7070", ttl=60.0)
    with Connections(directory, token="s3cret") as connections:
        remote = RemoteExpert("fussy", connections, retry=NEVER, timeout=5.0)
        with pytest.raises(UnreachableError, match="in plain text"):
            remote.describe()
        assert not connections.statistics()


def test_client_connects_only_to_matching_servers(authority: Authority) -> None:
    tls = ClientTls(authority.pem, servers=["torchweft-*.torchweft", "LOCALHOST"])
    for address in ("torchweft-0.torchweft:7070", "TorchWeft-17.TORCHWEFT:7070", "localhost:1"):
        GrpcTransport(address, tls=tls).close()
    for address in ("torchweft-0.evil:7070", "trainer.example:7070", "127.0.0.1:1"):
        with pytest.raises(UsageError, match="does not match servers="):
            GrpcTransport(address, tls=tls)
    GrpcTransport("10.0.0.7:1", tls=ClientTls(authority.pem, server_name="localhost", servers=["localhost"])).close()


@pytest.mark.parametrize("wrong", ["torchweft-*", [""], [5]])
def test_invalid_server_patterns_are_rejected(wrong: Any) -> None:
    with without_type_checks(), pytest.raises(UsageError, match="servers is "):
        ClientTls(servers=wrong)


def test_listed_address_of_no_server_is_skipped(authority: Authority) -> None:
    """The false entry comes first and owns the expert."""
    directory = LocalDirectory()
    tls = ClientTls(authority.pem, servers=["localhost"])
    with Server([fussy_backend()], address="localhost:0", tls=ServerTls(*authority.issue("server"))) as server:
        false_entry = directory.declare("fussy", "127.0.0.1:9", ttl=60.0)
        directory.claim("fussy", false_entry)
        with Connections(directory, tls=tls) as connections:
            remote = RemoteExpert("fussy", connections, retry=NEVER, timeout=5.0)
            with pytest.raises(UnreachableError, match="does not match servers="):
                remote.describe()
            directory.declare("fussy", server.address, ttl=60.0)
            assert remote.describe().name == "fussy"
            assert list(connections.statistics()) == [server.address]


def test_shared_directory_with_tls_requires_servers(authority: Authority) -> None:
    mine = authority.client("me")
    directory = EtcdDirectory("127.0.0.1:1", timeout=0.1)
    with pytest.raises(UsageError, match="has no servers="):
        Connections(directory, tls=mine)
    with pytest.raises(UsageError, match="has no servers="):
        Server(directory=directory, replicas=ReplicaOptions(tls=mine))
    for named in (ClientTls(authority.pem, servers=["a"]), ClientTls(authority.pem, server_name="a")):
        with pytest.raises(DirectoryUnavailableError):  # valid options, but no server listens
            Connections(directory, tls=named)
    directory.close()


def test_follower_loads_no_weights_of_an_impostor(authority: Authority) -> None:
    """The impostor owns the expert and has a certificate of the authority, but its name does not match."""
    directory = LocalDirectory()
    access = Access([Grant("server", "*", Role.ADMIN)])
    tls = ServerTls(*authority.issue("server"), authority.pem)

    def replicas(*servers: str) -> ReplicaOptions:
        own = ClientTls(authority.pem, *authority.issue("server"), servers=servers)
        return ReplicaOptions(follow_seconds=0.05, follow_steps=1, first_seconds=0.3, tls=own)

    options = {"tls": tls, "access": access, "address": "localhost:0"}
    with make(directory, expert(), replicas=replicas("localhost"), **options) as impostor:
        wait_until(lambda: impostor.statistics().replicas["fussy"].role == "owner")
        fresh = expert()
        with torch.no_grad():
            for parameter in fresh.module.parameters():
                parameter.add_(1.0)
        before = weights(fresh)
        with make(directory, fresh, replicas=replicas("torchweft-*"), **options) as victim:
            wait_until(lambda: "does not match servers=" in victim.statistics().replicas["fussy"].failure)
            assert weights(fresh) == before
            assert victim.statistics().replicas["fussy"].received == 0


class Certificates:
    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority("etcd-ca")
        (folder / "ca.crt").write_bytes(self.authority.pem)

    def issue(self, name: str) -> tuple[str, str]:
        key, certificate = self.authority.issue(name)
        files = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        for file, data in zip(files, (key, certificate), strict=True):
            file.write_bytes(data)
        return str(files[0]), str(files[1])

    def tls(self, name: str) -> EtcdTls:
        return EtcdTls(str(self.folder / "ca.crt"), *self.issue(name))


ETCDCTL = """#!{python}
import http.client, json, ssl, sys
context = ssl.create_default_context(cafile={authority!r})
context.load_cert_chain({certificate!r}, {key!r})
words = [word for word in sys.argv[1:] if not word.startswith("--")]
encoded = __import__("base64").b64encode
def permission(role, kind, key):
    end = key[:-1] + chr(ord(key[-1]) + 1)
    words = dict(permType=kind.upper(), key=encoded(key.encode()).decode(), range_end=encoded(end.encode()).decode())
    return dict(name=role, perm=words)
path, body = dict([
    ("user add", ("user/add", lambda name: dict(name=name, options=dict(no_password=True)))),
    ("role add", ("role/add", lambda name: dict(name=name))),
    ("user grant-role", ("user/grant", lambda user, role: dict(user=user, role=role))),
    ("role grant-permission", ("role/grant", permission)),
    ("auth enable", ("enable", dict)),
])[" ".join(words[:2])]
connection = http.client.HTTPSConnection({host!r}, {port}, context=context, timeout=20)
connection.request("POST", "/v3/auth/" + path, json.dumps(body(*words[2:])))
answer = connection.getresponse()
text = answer.read().decode()
if answer.status != 200:
    sys.exit(" ".join(words) + ": " + text)
"""
"""The commands of `etcdctl` that the script calls, over etcd's HTTP gateway. `etcdctl` is often not installed."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Certificates]]:
    """Member with the manifest's options and the script's users. Yields client address, peer address, certificates."""
    if WHERE is None:
        pytest.skip("`etcd` is not on the path")
    yaml = pytest.importorskip("yaml", reason="PyYAML, which reads the manifests, is not installed")
    folder = tmp_path_factory.mktemp("etcd")
    certificates = Certificates(folder)
    key, certificate = certificates.issue("etcd")
    manifest = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "etcd.yaml").read_text("utf-8")))
    workload = next(document for document in manifest if document["kind"] == "StatefulSet")
    arguments = workload["spec"]["template"]["spec"]["containers"][0]["args"]
    client, peer, metrics = free_ports(3)
    ours = {  # options that differ from the cluster of three members
        "--name": "m0",
        "--data-dir": str(folder / "data"),
        "--listen-client-urls": f"https://127.0.0.1:{client}",
        "--advertise-client-urls": f"https://localhost:{client}",
        "--listen-peer-urls": f"https://127.0.0.1:{peer}",
        "--initial-advertise-peer-urls": f"https://localhost:{peer}",
        "--initial-cluster": f"m0=https://localhost:{peer}",
        "--listen-metrics-urls": f"http://127.0.0.1:{metrics}",
    }
    files = {"/tls/ca.crt": str(folder / "ca.crt"), "/tls/tls.crt": certificate, "/tls/tls.key": key}
    words = []
    for word in arguments:
        name, _, value = word.partition("=")
        words.append(f"{name}={ours.get(name, files.get(value, value))}" if value else name)
    log = (folder / "log").open("wb")
    process = subprocess.Popen([WHERE, *words, "--log-level=error"], stdout=log, stderr=log)
    try:
        wait_for_port(f"127.0.0.1:{client}")
        root_key, root = certificates.issue("root")
        shim = folder / "etcdctl"
        words_of_shim = {"python": sys.executable, "authority": str(folder / "ca.crt"), "certificate": root}
        shim.write_text(ETCDCTL.format(**words_of_shim, key=root_key, host="localhost", port=client))
        shim.chmod(0o700)
        real = shutil.which("etcdctl")
        options = f"--endpoints=https://localhost:{client} --cacert={folder}/ca.crt --cert={root} --key={root_key}"
        env = {"ETCDCTL": f"{real} {options}" if real else str(shim), "PATH": "/usr/bin:/bin"}
        script = ["sh", str(DEPLOY / "etcd-users.sh")]
        ran = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        yield f"localhost:{client}", f"localhost:{peer}", certificates
    finally:
        process.kill()
        process.wait(10)
        log.close()


@pytest.mark.long
def test_servers_write_their_prefix_and_clients_read_it(secured: tuple[str, str, Certificates]) -> None:
    endpoint, _, certificates = secured
    with EtcdDirectory(endpoint, tls=certificates.tls("torchweft-server")) as servers:
        lease = servers.declare(["ffn.0"], "torchweft-0.torchweft:7070", ttl=30.0)
        owned = servers.claim("ffn.0", lease)
        servers.renew(lease)
        with EtcdDirectory(endpoint, tls=certificates.tls("torchweft-client")) as clients, clients.watch() as watch:
            assert clients.get().addresses("ffn.0") == ("torchweft-0.torchweft:7070",)
            for forbidden in (
                lambda: clients.declare(["ffn.0"], "evil:1", ttl=30.0),
                lambda: clients.claim("ffn.0", lease),
                lambda: clients.release(owned),
                lambda: clients.withdraw(lease),
            ):
                with pytest.raises(RefusedByEtcdError, match="PERMISSION_DENIED"):
                    forbidden()
            assert clients.get().owner("ffn.0") == owned
            servers.declare(["ffn.1"], "torchweft-1.torchweft:7070", ttl=30.0)
            wait_until(lambda: watch.snapshot().addresses("ffn.1") == ("torchweft-1.torchweft:7070",))
        with EtcdDirectory(endpoint, tls=certificates.tls("torchweft-server"), namespace="elsewhere") as other:
            for outside in (lambda: other.declare(["x"], "a:1", ttl=30.0), other.get):
                with pytest.raises(RefusedByEtcdError, match="PERMISSION_DENIED"):
                    outside()


def test_etcd_rejects_other_readers_and_writers(secured: tuple[str, str, Certificates], authority: Authority) -> None:
    endpoint, _, certificates = secured
    for name in ("etcd", "somebody"):  # certified by etcd's authority, but not a user
        with (
            EtcdDirectory(endpoint, tls=certificates.tls(name), timeout=2.0) as directory,
            pytest.raises(DirectoryUnavailableError),
        ):
            directory.get()
    mine = EtcdTls(certificates.authority.pem, *authority.issue("torchweft-server"))  # another authority
    for wrong in (mine, EtcdTls(certificates.authority.pem), EtcdTls(), None):
        with EtcdDirectory(endpoint, tls=wrong, timeout=1.0) as directory, pytest.raises(DirectoryUnavailableError):
            directory.get()
    with pytest.raises(UsageError, match="give both"):
        EtcdTls(key=b"x")


def test_user_certificate_is_rejected_for_a_member(secured: tuple[str, str, Certificates]) -> None:
    _, peer, certificates = secured
    host, port = peer.split(":")

    def members(name: str) -> Any:
        context = ssl.create_default_context(cafile=str(certificates.folder / "ca.crt"))
        key, certificate = certificates.issue(name)
        context.load_cert_chain(certificate, key)
        connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=10.0)
        try:
            connection.request("GET", "/members")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    assert members("etcd")
    with pytest.raises(OSError):
        members("torchweft-server")
