"""The workflows: their form, what they may do, and that what they call exists. They have not run anywhere."""

import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.conftest import ROOT, SETUP

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CI, WHEELS = FOLDER / "ci.yml", FOLDER / "wheels.yml"


def read(path: Path) -> dict[str, Any]:
    # YAML 1.1 takes the key `on` for a truth value; as strings, both are what they look like.
    loaded: dict[str, Any] = yaml.load(path.read_text(), yaml.BaseLoader)
    return loaded


def steps(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(name, step) for name, job in read(path)["jobs"].items() for step in job["steps"]]


def commands(path: Path) -> list[list[str]]:
    """The words of each line that a shell gets."""
    lines = [line for _, step in steps(path) for line in step.get("run", "").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def schema_errors(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        *map(str, paths),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def audit(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "zizmor"), "--offline", "--no-progress", "--color=never", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def altered(folder: Path, old: str, new: str) -> Path:
    """A repository in `folder` whose workflow for wheels is another."""
    path = folder / ".github" / "workflows" / "wheels.yml"
    path.parent.mkdir(parents=True)
    (folder / ".github" / "zizmor.yml").write_text((ROOT / ".github" / "zizmor.yml").read_text())
    text = WHEELS.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def test_both_are_there() -> None:
    assert FILES == [CI, WHEELS]


def test_their_form_is_what_the_schema_says() -> None:
    done = schema_errors(*FILES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_audit_finds_nothing() -> None:
    done = audit(ROOT / ".github")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_form_is_found(tmp_path: Path) -> None:
    done = schema_errors(altered(tmp_path, "    runs-on: ubuntu-24.04\n", ""))
    assert done.returncode != 0 and "'runs-on' is a required property" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pull_request:", "pull_request_target:", "dangerous-triggers"),
        ('--tag "$GITHUB_REF_NAME"', "--tag ${{ github.ref_name }}", "template-injection"),
        ("contents: read", "contents: write", "excessive-permissions"),
        (
            "@release/v1",
            "@release/v1\n        with:\n          password: ${{ secrets.TOKEN }}",
            "use-trusted-publishing",
        ),
    ],
)
def test_the_audit_finds_what_is_dangerous(tmp_path: Path, old: str, new: str, said: str) -> None:
    done = audit(altered(tmp_path, old, new).parents[1])
    assert done.returncode != 0 and f"[{said}]" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_they_may_do_little_and_end(path: Path) -> None:
    workflow, text = read(path), path.read_text()
    assert "NOT RUN: this file has never run anywhere." in text
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {}), name
        assert int(job["timeout-minutes"]) <= 180
    for _, step in steps(path):
        assert re.fullmatch(
            r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1", step.get("uses", "actions/x@v1")
        )


def test_only_a_tagged_version_that_was_tested_is_published() -> None:
    workflow = read(WHEELS)
    publish = workflow["jobs"]["publish"]
    assert "github.event_name == 'push' && github.ref_type == 'tag'" in publish["if"]
    assert sorted(publish["needs"]) == sorted(set(workflow["jobs"]) - {"publish"})
    assert publish["environment"] == "release"
    assert [path for path in FILES for _, step in steps(path) if "pypi-publish" in step.get("uses", "")] == [WHEELS]
    (check,) = [step for _, step in steps(WHEELS) if "--tag" in step.get("run", "")]
    assert check["if"] == "github.ref_type == 'tag'"


def test_the_pythons_are_those_of_the_classifiers() -> None:
    matrix = read(WHEELS)["jobs"]["test"]["strategy"]["matrix"]
    versions = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert matrix["python"] == versions
    assert matrix["include"] == [
        {"machine": "x86_64", "runner": "ubuntu-24.04"},
        {"machine": "aarch64", "runner": "ubuntu-24.04-arm"},
    ]


def makes(target: str) -> bool:
    # Not by asking make for it: a folder of that name would do.
    command = ["make", "-npq", "clean"]
    database = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60).stdout
    (targets,) = re.findall(r"^\.PHONY: (.*)$", database, re.MULTILINE)
    return target in targets.split()


def exists(words: list[str], machines: list[str]) -> bool:
    """Whether a command of a workflow is one that there is, with the options that it is given."""
    match words:
        case ["make", target]:
            return makes(target)
        case ["python", script, *options] if script.startswith("examples/setup/"):
            known = subprocess.run(
                [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            return known.returncode == 0 and all(o in known.stdout for o in options if o.startswith("-"))
        case ["python", "-m", "pytest", "-p", plugin, *paths]:
            return (ROOT / f"{plugin.replace('.', '/')}.py").exists() and all((ROOT / path).exists() for path in paths)
        case ["python", "-m", "pip", "install", "pytest", "pytest-timeout", wheel]:
            name = "dist/vllm_mc2-1-cp311-abi3-manylinux_2_28_{}.whl"
            return all(fnmatch(name.format(m), wheel.replace("$MACHINE", m)) for m in machines)
        case ["rm", "-r", folder]:
            return (ROOT / folder / "__init__.py").exists()
        case [command, "--help"]:
            return command in PROJECT["scripts"]
        case ["apt-get", "update"]:
            return True
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_all_that_they_call_exists(path: Path) -> None:
    found = commands(path)
    assert len(found) >= 2
    assert [words for words in found if not exists(words, ["x86_64", "aarch64"])] == []


@pytest.mark.parametrize(
    "line",
    [
        "make tests",
        "python examples/setup/wheel.py",
        "python examples/setup/release.py --version 1",
        "python -m pytest -p tests.packaging.guards tests/native",
        "python -m pytest -p tests.packaging.guard tests/natives",
        'python -m pip install pytest pytest-timeout dist/vllm-mc2-*_"$MACHINE".whl',
        "rm -r vllm",
        "vllm-mc --help",
        "curl example.org",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert not exists(shlex.split(line), ["x86_64", "aarch64"])


def test_what_is_built_is_what_is_tested_and_published() -> None:
    """One artifact: made by the job that builds, fetched under the same name by the others, into wheels.py's folder."""
    uploads = [step["with"] for name, step in steps(WHEELS) if "upload-artifact" in step.get("uses", "")]
    downloads = [step["with"] for name, step in steps(WHEELS) if "download-artifact" in step.get("uses", "")]
    assert [(upload["name"], upload["path"]) for upload in uploads] == [("dist", "dist")]
    assert [(fetched["name"], fetched["path"]) for fetched in downloads] == [("dist", "dist")] * 2
    assert 'default=ROOT / "dist"' in (SETUP / "wheels.py").read_text()
