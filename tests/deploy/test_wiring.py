"""What leads where: labels, selectors, policies and the folder on the node; and the proxy's container, run for real."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import pair
from tests.deploy.places import COMPOSE, DEPLOY, ROOT
from tests.support.ports import own_ports

TWO = DEPLOY / "kubernetes" / "two-pods"


def pods(kind: str) -> dict[str, dict[str, Any]]:
    """Pod templates by their Deployment's name."""
    resources = pair.documents(DEPLOY / "kubernetes" / kind)
    return {r["metadata"]["name"]: r["spec"]["template"] for r in resources if r["kind"] == "Deployment"}


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(rule["key"]) in rule["values"] and rule["operator"] == "In"
        for rule in selector.get("matchExpressions", [])
    )


@pytest.mark.parametrize("kind", ["one-pod", "two-pods"])
def test_selectors_choose_their_own_pods(kind: str) -> None:
    resources = pair.documents(DEPLOY / "kubernetes" / kind)
    templates = pods(kind)
    for deployment in (r for r in resources if r["kind"] == "Deployment"):
        chosen = [n for n, t in templates.items() if selected(deployment["spec"]["selector"], t["metadata"]["labels"])]
        assert chosen == [deployment["metadata"]["name"]]
    for service in (r for r in resources if r["kind"] == "Service"):
        labels = {"matchLabels": service["spec"]["selector"]}
        (chosen,) = (t for t in templates.values() if selected(labels, t["metadata"]["labels"]))
        names = {port["name"] for c in chosen["spec"]["containers"] for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@pytest.mark.parametrize(("kind", "open_to_all"), [("one-pod", {8000}), ("two-pods", set())])
def test_only_the_proxy_is_for_everybody(kind: str, open_to_all: set[int]) -> None:
    (policy,) = (r for r in pair.documents(DEPLOY / "kubernetes" / kind) if r["kind"] == "NetworkPolicy")
    spec, templates = policy["spec"], pods(kind)
    covered = {n for n, t in templates.items() if selected(spec["podSelector"], t["metadata"]["labels"])}
    engines = {n for n, t in templates.items() if any(c["command"][0] == "vllm" for c in t["spec"]["containers"])}
    assert covered == engines
    anybody = {port["port"] for rule in spec["ingress"] if "from" not in rule for port in rule["ports"]}
    assert anybody == open_to_all
    # Who else is let in is the proxy, by its labels, to the ports that it asks.
    for rule in (rule for rule in spec["ingress"] if "from" in rule):
        assert {port["port"] for port in rule["ports"]} == {8100, 8200}
        peers = [peer["podSelector"] for peer in rule["from"] if "podSelector" in peer]
        (proxy,) = (n for n, t in templates.items() if any(selected(p, t["metadata"]["labels"]) for p in peers))
        assert proxy == "mc2-proxy"


def test_decode_is_put_beside_prefill() -> None:
    templates = pods("two-pods")
    decode, prefill = templates["mc2-decode"]["spec"], templates["mc2-prefill"]
    (term,) = decode["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    chosen = [n for n, t in templates.items() if selected(term["labelSelector"], t["metadata"]["labels"])]
    assert chosen == ["mc2-prefill"]
    assert decode["nodeSelector"] == prefill["spec"]["nodeSelector"]
    # With a user namespace of its own (`hostUsers: false`) a Pod is another user to its peer.
    assert decode["hostUsers"] is prefill["spec"]["hostUsers"] is True


def test_the_folder_on_the_node_is_made_as_the_documentation_says() -> None:
    """An engine refuses one of another user or mode; the kubelet would make one that is root's."""
    (volume,) = (v for v in pods("two-pods")["mc2-prefill"]["spec"]["volumes"] if "hostPath" in v)
    assert volume["hostPath"]["type"] == "Directory"
    uid = pair.load(DEPLOY, "two-pods")["prefill"].user.partition(":")[0]
    text = (ROOT / "docs" / "deployment.md").read_text()
    assert f"d {volume['hostPath']['path']} 0700 {uid} {uid}" in text
    for name, value in pods("two-pods")["mc2-prefill"]["spec"]["nodeSelector"].items():
        assert f"{name}={value}" in text


def test_the_volume_of_compose_belongs_to_the_containers_user() -> None:
    options = pair.compose_file(DEPLOY / COMPOSE)["volumes"]["sockets"]["driver_opts"]
    said = dict(option.split("=") for option in options["o"].split(","))
    user = pair.load(DEPLOY, "compose")["prefill"].user
    assert f"{said['uid']}:{said['gid']}" == user
    assert (options["type"], said["mode"]) == ("tmpfs", "0700")


def test_the_proxys_command_starts_a_proxy_that_its_probe_finds_well() -> None:
    """The container's own arguments; only its port, and the address that it listens on, are ours."""
    with own_ports(1) as (port,):
        start_and_probe(port)


def start_and_probe(port: int) -> None:
    proxy = pair.load(DEPLOY, "compose")["proxy"]
    own = [*proxy.argv[2:], f"--port={port}", "--host=127.0.0.1"]
    probe = pair.compose_file(DEPLOY / COMPOSE)["services"]["proxy"]["healthcheck"]["test"]
    assert probe[:3] == ["CMD", "python", "-c"]
    asks = [sys.executable, "-c", probe[3].replace(":8000/", f":{port}/")]
    assert subprocess.run(asks, check=False, capture_output=True, timeout=60).returncode != 0  # nobody there yet
    command = [sys.executable, str(ROOT / "examples" / "proxy.py"), *own]
    # One that cannot import from this checkout: in the image it has only its own file.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, cwd=Path("/"), env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while (done := subprocess.run(asks, check=False, capture_output=True, timeout=60)).returncode != 0:
            assert process.poll() is None, "the proxy ended"
            assert time.monotonic() < deadline, done.stderr
    finally:
        process.terminate()
        process.wait(60)
