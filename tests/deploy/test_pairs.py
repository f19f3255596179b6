"""The three containers fit each other, vLLM and the connector, in every deployment file."""

import re
from pathlib import Path

import pytest

import vllm_mc2
from tests.deploy import checks, pair
from tests.deploy.places import COMPOSE, DEPLOY, DOCKERFILE, broken

# vLLM's parser is imported by the first of them, which takes long when the machine has other things to do.

ONE = "kubernetes/one-pod/deployment.yaml"
PREFILL, DECODE, PROXY = (f"kubernetes/two-pods/{role}.yaml" for role in pair.ROLES)
TWO = "kubernetes/two-pods/kustomization.yaml"


@pytest.mark.parametrize("kind", pair.KINDS)
def test_a_pair_fits_together(kind: str) -> None:
    assert checks.problems(pair.load(DEPLOY, kind)) == []


BROKEN = [
    ("compose", COMPOSE, {'"socket_dir": "/run/mc2/sockets"': '"socket_dirs": "/run/mc2/sockets"'}, "socket_dirs"),
    ("compose", COMPOSE, {'"socket_dir": "/run/mc2/sockets"': '"socket_dir": "/run/other"'}, "in no volume"),
    ("compose", COMPOSE, {'"socket_dir": "/run/mc2/sockets"': '"socket_dir": "/run/mc2"'}, "is a mount point"),
    ("compose", COMPOSE, {"sockets:/run/mc2\n": "sockets:/run/mc2:ro\n"}, "cannot write its socket directory"),
    ("compose", COMPOSE, {'"kv_role": "kv_consumer"': '"kv_role": "kv_both"'}, "decode: is kv_both"),
    ("compose", COMPOSE, {'"kv_role": "kv_consumer"': '"kv_rule": "kv_consumer"'}, "kv_rule"),
    ("compose", COMPOSE, {"--enforce-eager": "--enforce-eagerly"}, "vLLM refuses its arguments"),
    ("compose", COMPOSE, {"--shutdown-timeout=40": "--shutdown-timeout=55"}, "is killed after 60.0 s"),
    ("compose", COMPOSE, {"--port=8200": "--port=8300"}, "decode: listens on {8300}, is asked at {(8200"),
    ("compose", COMPOSE, {"--decode=http://decode:8200": "--decode=http://decode:8201"}, "proxy: asks"),
    ("compose", COMPOSE, {'"10001:10001"': '"0:0"'}, "runs as root"),
    (
        "compose",
        COMPOSE,
        {"  proxy:\n    <<: *server": '  proxy:\n    <<: *server\n    user: "0"'},
        "proxy: runs as root",
    ),
    (
        "compose",
        COMPOSE,
        {"  decode:\n    <<: *vllm": '  decode:\n    <<: *vllm\n    user: "10002:10002"'},
        "run as different users",
    ),
    ("compose", COMPOSE, {"  read_only: true\n": ""}, "not confined: read-only root"),
    ("compose", COMPOSE, {"${KV_GIB:-2}": "${KV_GIB:-5}"}, "bytes of memory"),
    ("compose", COMPOSE, {'tmpfs: ["/tmp:': 'tmpfs: ["/var/tmp:'}, "cannot write /tmp"),
    ("one-pod", ONE, {'"kv_role": "kv_producer"': '"kv_role": "kv_consumer"'}, "prefill: is kv_consumer"),
    ("one-pod", ONE, {"--prefill=http://127.0.0.1:8100": "--prefill=http://prefill:8100"}, "proxy: asks"),
    ("one-pod", ONE, {"port: http-decode": "port: http-prefill"}, "decode: listens on {8200}, is asked at"),
    ("one-pod", ONE, {"path: /health, port: http}": "path: /healthz, port: http}"}, "proxy: listens on"),
    ("one-pod", ONE, {"runAsNonRoot: true": "runAsNonRoot: false"}, "not privileged"),
    ("one-pod", ONE, {"$(MODEL)": "$(NAME)"}, "a variable is not filled in"),
    ("two-pods", DECODE, {"path: /run/vllm-mc2,": "path: /run/vllm-mc3,"}, "do not meet"),
    ("two-pods", DECODE, {"mountPath: /run/mc2}": "mountPath: /run}"}, "do not meet"),
    ("two-pods", DECODE, {"runAsUser: 10001": "runAsUser: 10002"}, "run as different users"),
    ("two-pods", DECODE, {"--dtype=float32": "--dtype=bfloat16"}, "--dtype is 'float32' on prefill"),
    ("two-pods", PREFILL, {"containerPort: 8100": "containerPort: 8101"}, "where nobody is led"),
    ("two-pods", PROXY, {"--decode=http://mc2-decode:8200": "--decode=http://decode:8200"}, "proxy: asks"),
    ("two-pods", TWO, {"VLLM_CPU_KVCACHE_SPACE=2": "VLLM_CPU_KVCACHE_SPACE=8"}, "bytes of memory"),
]


@pytest.mark.parametrize(("kind", "file", "changes", "said"), BROKEN, ids=[entry[3] for entry in BROKEN])
def test_one_that_does_not_is_found(kind: str, file: str, changes: dict[str, str], said: str, tmp_path: Path) -> None:
    found = checks.problems(pair.load(broken(tmp_path, file, changes), kind))
    assert any(said in text for text in found), found


def test_the_version_is_the_packages_everywhere() -> None:
    for kind in pair.KINDS:
        assert {c.image for c in pair.load(DEPLOY, kind).values()} == {f"vllm-mc2:{vllm_mc2.__version__}"}, kind
    named = {
        (path.name, version)
        for path in DEPLOY.rglob("*")
        if path.is_file()
        for version in re.findall(r"vllm-mc2:(\d[\w.]*)", path.read_text())
    }
    assert named == {(DOCKERFILE, vllm_mc2.__version__)}


def option(text: str) -> str:
    """An argument, without the host of a URL."""
    return re.sub(r"//[\w.-]+:", "//HOST:", text)


def test_every_pair_asks_for_the_same() -> None:
    """So that what was found out about one of them holds for the others."""
    compose, *others = (pair.load(DEPLOY, kind) for kind in pair.KINDS)
    for other in others:
        for role in ("prefill", "decode"):
            assert other[role].argv == compose[role].argv
            assert other[role].user == compose[role].user
            assert other[role].memory_bytes == compose[role].memory_bytes
        assert [option(part) for part in other["proxy"].argv] == [option(part) for part in compose["proxy"].argv]
