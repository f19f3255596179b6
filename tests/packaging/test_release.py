"""The version stands in one place, and what does not belong to it is not published."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import vllm_mc2
from tests.packaging.conftest import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def literals(version: str, name: str, text: str) -> list[str]:
    """Lines of a file that have the version. Another package's pin, `other==0.1.0`, may happen to be the same."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        rest = re.sub(r"(?<![\w-])(?!vllm[-_]mc2\b)[\w.-]+(\[[^\]]*\])?==[\w.]+", "", line)
        if re.search(rf"(?<![\d.]){re.escape(version)}(?![\w]|\.\d)", rest):
            found.append(f"{name}:{number}: {line.strip()}")
    return found


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ('version = "0.1.0"', True),
        ("vllm-mc2==0.1.0", True),
        ("pip install vllm_mc2-0.1.0-cp311-abi3-linux_x86_64.whl", True),
        ("image: registry/vllm-mc2:v0.1.0", True),
        ("this is 0.1.0.", True),
        ("other==0.1.0", False),
        ("10.1.0, 0.1.0.1, 0.1.01", False),
    ],
)
def test_the_search_finds_the_version(line: str, is_one: bool) -> None:
    assert (literals("0.1.0", "x", line) != []) is is_one


@pytest.mark.slow
def test_the_version_is_written_once(release: ModuleType, sdist: Path) -> None:
    """Of all files that are published these have it: where it is made, the changelog's heading, and tags of images."""
    found: list[str] = []
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            name = member.name.partition("/")[2]
            data = archive.extractfile(member)
            # This file has it in examples; PKG-INFO is made from pyproject.toml.
            if data is None or name in {"PKG-INFO", "tests/packaging/test_release.py"}:
                continue
            found += literals(VERSION, name, data.read().decode("utf-8", "replace"))
    images = [line for line in found if line.startswith("examples/deploy/")]
    assert [line.partition(":")[0] for line in found if line not in images] == ["CHANGELOG.md", "pyproject.toml"], found
    # With the next version release.py will find each of them.
    assert [line for line in images if not release.IMAGE.search(line)] == []
    assert release.image_problems(ROOT) == []


def test_the_package_has_the_version_of_its_installation(tmp_path: Path) -> None:
    assert vllm_mc2.__version__ == VERSION
    # Never installed: importable all the same, and not by the version of another installation.
    shutil.copy(vllm_mc2.__file__, tmp_path)
    bare = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import __init__ as p; ",
    ]
    code = "print('importlib.metadata' in sys.modules, p.__version__)"
    said = subprocess.run([*bare[:-1], bare[-1] + code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split() == ["False", "0+unknown"]


# ---- what release.py says ----


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 - 2026-01-31\n\nText.\n\n## 1.2.2 - 2025-12-31\n")
    return tmp_path


def test_a_release_that_fits_is_let_pass(release: ModuleType, project: Path) -> None:
    assert release.changelog_problems(project, None) == []
    assert release.changelog_problems(project, "v1.2.3") == []


@pytest.mark.parametrize(
    ("old", "new", "tag", "said"),
    [
        ("## 1.2.3", "## 1.2.4", None, "newest heading is for 1.2.4, pyproject.toml says 1.2.3"),
        ("## 1", "### 1", None, "no heading"),
        ("2026-01-31", "unreleased", "v1.2.3", "'unreleased' where the date"),
        ("", "", "v1.2.4", "the tag is v1.2.4, the version's would be v1.2.3"),
        ("", "", "1.2.3", "the tag is 1.2.3"),
    ],
)
def test_a_release_that_does_not_fit_is_stopped(
    release: ModuleType, project: Path, old: str, new: str, tag: str | None, said: str
) -> None:
    changelog = project / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(old, new))
    (problem,) = release.changelog_problems(project, tag)
    assert said in problem


def test_unreleased_is_no_problem_until_there_is_a_tag(release: ModuleType, project: Path) -> None:
    changelog = project / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("2026-01-31", "unreleased"))
    assert release.changelog_problems(project, None) == []


@pytest.mark.parametrize(
    ("line", "is_other"),
    [
        ("image: vllm-mc2:1.2.3", False),
        ("image: vllm-mc2:1.2.2", True),
        ("image: vllm-mc2:${MC2_VERSION:-1.2.4}", True),
        ('newTag: "1.2.30"', True),
        ("newTag: v1.2.3.dev1", True),
        ("image: other:1.2.2", False),
    ],
)
def test_an_image_of_another_version_is_found(release: ModuleType, project: Path, line: str, is_other: bool) -> None:
    (project / "examples" / "deploy" / "deep").mkdir(parents=True)
    (project / "examples" / "deploy" / "deep" / "x.yaml").write_text(f"a: b\n{line}\n")
    found = release.image_problems(project)
    assert len(found) == is_other and all("deep/x.yaml" in problem for problem in found)


@pytest.mark.slow
def test_what_was_built_is_all_of_a_release(release: ModuleType, built: list[Path], tmp_path: Path) -> None:
    assert release.problems(ROOT, built[0].parent, None) == []
    (tmp_path / "vllm_mc2-0.0.9.tar.gz").touch()
    for path in built[:-1]:
        os.link(path, tmp_path / path.name)
    found = release.problems(ROOT, tmp_path, None)
    assert found == [
        f"{tmp_path} has no {built[-1].name}",
        f"{tmp_path} has vllm_mc2-0.0.9.tar.gz, which is no part of {VERSION}",
    ]


@pytest.mark.slow
def test_the_command_fails_where_there_is_a_problem(release: ModuleType, built: list[Path], tmp_path: Path) -> None:
    dist = f"--dist={built[0].parent}"
    assert release.main([dist]) == 0
    assert release.main([dist, "--tag=v0.0.1"]) == 1
    assert release.main([f"--dist={tmp_path / 'none'}"]) == 1
