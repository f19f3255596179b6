"""The deployment files under their own tools' eyes: compose's specification, Kubernetes' API, kustomize, hadolint."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import vllm_mc2
from tests.deploy.pair import compose_file, documents, quantity
from tests.deploy.places import COMPOSE, DEPLOY, DOCKERFILE, KUSTOMIZATIONS, broken, manifests

BIN = Path(sys.executable).parent
KUBERNETES = ("1.30", "1.34", "1.37")
"""The oldest that has `preStop.sleep` without being asked, one between, the newest of the tool."""

ONE = "kubernetes/one-pod/deployment.yaml"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, timeout=60)


def compose_schema(path: Path) -> subprocess.CompletedProcess[str]:
    return run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def kubernetes_schema(version: str, *paths: Path) -> str:
    """What Kubernetes' own schemas say against these files; empty when nothing."""
    done = run(BIN / "kubernetes-validate", "--strict", "--quiet", "--kubernetes-version", version, *paths)
    said = done.stdout + done.stderr
    # A kind or API version that it does not know is a warning to it, and a mistake to us.
    return said if done.returncode != 0 or "WARN" in said else ""


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    return run(BIN / "hadolint", "--no-color", path)


@pytest.mark.parametrize("filled_in", [False, True], ids=["as it is", "filled in"])
def test_compose(filled_in: bool, tmp_path: Path) -> None:
    path = DEPLOY / COMPOSE
    if filled_in:
        path = tmp_path / COMPOSE
        path.write_text(yaml.safe_dump(compose_file(DEPLOY / COMPOSE)))
    done = compose_schema(path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  read_only: true", "  readonly: true"),
        ("condition: service_healthy", "condition: healthy"),
        ("      retries: 6", "      retries: [6]"),
        ("volumes:\n  #", "volume:\n  #"),
    ],
)
def test_compose_that_is_wrong_is_refused(old: str, new: str, tmp_path: Path) -> None:
    done = compose_schema(broken(tmp_path, COMPOSE, {old: new}) / COMPOSE)
    assert done.returncode == 1, done.stdout


def test_compose_by_docker_itself() -> None:
    docker = shutil.which("docker")
    if docker is None or run(docker, "compose", "version").returncode != 0:
        pytest.skip("docker's compose plugin is not installed here")
    done = run(docker, "compose", "--file", DEPLOY / COMPOSE, "config", "--quiet")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests(version: str) -> None:
    paths = manifests(DEPLOY)
    assert len(paths) == 8
    assert kubernetes_schema(version, *paths) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("readOnlyRootFilesystem: true", "readOnlyRootFileSystem: true"),
        ("terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 60s"),
        ("emptyDir: {sizeLimit: 20Gi}", "emptyDir: {size: 20Gi}"),
        ("apiVersion: apps/v1", "apiVersion: apps/v2"),
        ("            - {name: http, containerPort: 8000}", "            - {name: http}"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(old: str, new: str, tmp_path: Path) -> None:
    assert kubernetes_schema(KUBERNETES[-1], broken(tmp_path, ONE, {old: new}) / ONE)


@pytest.fixture
def kubectl() -> str:
    """Its `kustomize` needs no cluster."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("no kubectl here")
    return found


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kustomizations(name: str, kubectl: str, tmp_path: Path) -> None:
    done = run(kubectl, "kustomize", DEPLOY / "kubernetes" / name)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "built.yaml"
    built.write_text(done.stdout)
    for version in KUBERNETES:
        assert kubernetes_schema(version, built) == ""
    resources = list(yaml.safe_load_all(done.stdout))
    pods = [r["spec"]["template"]["spec"] for r in resources if r["kind"] == "Deployment"]
    containers = {c["name"]: c for pod in pods for c in pod["containers"]}
    assert {c["image"] for c in containers.values()} == {f"vllm-mc2:{vllm_mc2.__version__}"}
    # The generated ConfigMap has a hash in its name, which must be the one that is asked for.
    (settings,) = (r for r in resources if r["kind"] == "ConfigMap")
    asked = {e["configMapRef"]["name"] for c in containers.values() for e in c.get("envFrom", [])}
    assert asked == {settings["metadata"]["name"]}
    # Anchors and merged keys mean to kustomize what they mean to our own checks.
    folder = DEPLOY / "kubernetes" / name.replace("huge-pages", "one-pod")
    written = [r["spec"]["template"]["spec"] for r in documents(folder) if r["kind"] == "Deployment"]
    for container in (c for pod in written for c in pod["containers"]):
        made = containers[container["name"]]
        for key in container.keys() - {"image", "envFrom", "resources"}:
            assert made[key] == container[key], key
    pages = {role: c["resources"]["limits"].get("hugepages-2Mi") for role, c in containers.items()}
    if name != "huge-pages":
        assert not any(pages.values())
        return
    assert [role for role, size in pages.items() if size] == ["prefill"]
    resource = containers["prefill"]["resources"]
    assert resource["requests"]["hugepages-2Mi"] == resource["limits"]["hugepages-2Mi"]
    assert quantity(pages["prefill"]) > int(settings["data"]["VLLM_CPU_KVCACHE_SPACE"]) * 2**30


def test_a_kustomization_that_is_wrong_is_refused(kubectl: str, tmp_path: Path) -> None:
    copy = broken(tmp_path, "kubernetes/two-pods/kustomization.yaml", {"- proxy.yaml": "- proxies.yaml"})
    assert run(kubectl, "kustomize", copy / "kubernetes" / "two-pods").returncode != 0


def test_dockerfile() -> None:
    done = hadolint(DEPLOY / DOCKERFILE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [("WORKDIR /tmp/install", "WORKDIR install"), ("USER 10001:10001", "USER root"), ("CMD [", "COMMAND [")],
)
def test_a_dockerfile_that_is_wrong_is_refused(old: str, new: str, tmp_path: Path) -> None:
    done = hadolint(broken(tmp_path, DOCKERFILE, {old: new}) / DOCKERFILE)
    assert done.returncode != 0, done.stdout
