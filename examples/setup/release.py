#!/usr/bin/env python3.11
"""Say why what `wheels.py` has built must not be published.

    python examples/setup/release.py [--dist dist] [--tag v1.2.3]

The version is made in `pyproject.toml`. The changelog's newest heading must be for it, and tags of images in
`examples/deploy` must be it. `dist` must hold the source distribution and one wheel for each machine of that version and
nothing else. The source distribution must have all that is needed to build and to test, and nothing that was built. With
`--tag` the tag must be the version's, and the changelog must have its date. Standard library only. What is inside of the
wheels is for `wheels.py` to check.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAG = "cp311-abi3-manylinux_2_28_"
MACHINES = ("aarch64", "x86_64")
HEADING = re.compile(r"^## \[?(?P<version>[^\s\]]+)\]? - (?P<date>.+)$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# Where image files name this project's own image, which is tagged with the version.
IMAGE = re.compile(r"(?:\bvllm-mc2:(?:\$\{\w+:-)?|\bnewTag: \"?)v?(?P<version>\d+\.\d+\.\d+[\w.+-]*)")
NEEDED = (
    "CHANGELOG.md", "CMakeLists.txt", "LICENSE", "Makefile", "PKG-INFO", "README.md", "csrc/bindings/module.cpp",
    "docs/building.md", "examples/setup/wheels.py", "pyproject.toml", "tests/conftest.py", "vllm_mc2/__init__.py",
    "vllm_mc2/py.typed",
)  # fmt: skip
# Of any part of a name: what tools and builds leave behind.
UNWANTED = (
    "build", "build-*", "dist", "scratch", ".venv", ".ci", ".git", ".hypothesis", ".*_cache", "__pycache__", "node_modules",
    "*.egg-info", "*.so", "*.o", "*.py[co]", "*.whl", "*.log",
)  # fmt: skip


def version_of(root: Path) -> str:
    """The one place that has it."""
    with (root / "pyproject.toml").open("rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def changelog_problems(root: Path, tag: str | None) -> list[str]:
    """Why the changelog, and the tag if there is one, do not belong to the version."""
    version, newest = version_of(root), HEADING.search((root / "CHANGELOG.md").read_text())
    if newest is None:
        return ["CHANGELOG.md has no heading like `## 1.2.3 - 2026-01-31`"]
    found = []
    if newest["version"] != version:
        found.append(f"CHANGELOG.md's newest heading is for {newest['version']}, pyproject.toml says {version}")
    if tag is not None and tag != f"v{version}":
        found.append(f"the tag is {tag}, the version's would be v{version}")
    if tag is not None and not DATE.fullmatch(newest["date"]):
        found.append(f"CHANGELOG.md says {newest['date']!r} where the date of the release should be")
    return found


def image_problems(root: Path) -> list[str]:
    """Image tags of other versions."""
    found, version = [], version_of(root)
    for path in sorted((root / "examples" / "deploy").rglob("*")):
        for match in IMAGE.finditer(path.read_text()) if path.is_file() else ():
            if match["version"] != version:
                found.append(f"{path.relative_to(root)} has {match[0]}, pyproject.toml says {version}")
    return found


def dist_problems(dist: Path, version: str) -> list[str]:
    """What is in `dist` and should not be, or the other way round."""
    stem = f"vllm_mc2-{version}"
    wanted = {f"{stem}.tar.gz", *(f"{stem}-{TAG}{machine}.whl" for machine in MACHINES)}
    there = {path.name for path in dist.iterdir()} if dist.is_dir() else set()
    found = [f"{dist} has no {name}" for name in sorted(wanted - there)]
    return found + [f"{dist} has {name}, which is no part of {version}" for name in sorted(there - wanted)]


def sdist_problems(sdist: Path) -> list[str]:
    """What is missing in a source distribution, and what was never meant to be published."""
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers()]
    top = sdist.name.removesuffix(".tar.gz")
    inside = {name.removeprefix(f"{top}/") for name in names if name.startswith(f"{top}/")}
    found = [f"{sdist.name}: {name} is not in a folder {top}" for name in names if not name.startswith(f"{top}/")]
    found += [f"{sdist.name} has no {name}" for name in NEEDED if name not in inside]
    for name in sorted(inside):
        if any(fnmatch(part, pattern) for part in name.split("/") for pattern in UNWANTED):
            found.append(f"{sdist.name} has {name}")
    return found


def problems(root: Path, dist: Path, tag: str | None) -> list[str]:
    """Why `dist` must not be published, as `tag` if there is one; empty if it may be."""
    version = version_of(root)
    found = changelog_problems(root, tag) + image_problems(root) + dist_problems(dist, version)
    sdist = dist / f"vllm_mc2-{version}.tar.gz"
    return found + (sdist_problems(sdist) if sdist.is_file() else [])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check what is about to be published.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="what wheels.py has made (default: dist)")
    parser.add_argument("--tag", help="the tag that is released, v1.2.3")
    options = parser.parse_args(arguments)
    found = problems(ROOT, options.dist, options.tag)
    for problem in found:
        print(f"release: {problem}", file=sys.stderr)
    if not found:
        print(f"release: {version_of(ROOT)} is complete" + (f", and {options.tag} is its tag" if options.tag else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
