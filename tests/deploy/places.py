"""Where the deployment files are, and copies of them with one thing broken."""

import shutil
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
COMPOSE = "compose.yaml"
DOCKERFILE = "Dockerfile"
KUSTOMIZATIONS = ("one-pod", "two-pods", "huge-pages")


def manifests(deploy: Path) -> list[Path]:
    """The files with Kubernetes resources."""
    return sorted(p for p in deploy.glob("kubernetes/*/*.yaml") if p.name != "kustomization.yaml")


def broken(target: Path, file: str, changes: Mapping[str, str]) -> Path:
    """A copy of the deployment files in which `file` says something else. Each text must stand there."""
    copy = target / "deploy"
    shutil.copytree(DEPLOY, copy)
    path = copy / file
    text = path.read_text()
    for old, new in changes.items():
        assert old in text, f"{file} does not say {old!r}"
        text = text.replace(old, new)
    path.write_text(text)
    return copy
