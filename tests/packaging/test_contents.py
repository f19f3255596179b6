"""What is in the source distribution and in the wheels: all that belongs there, nothing else, the same bytes each time."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.packaging.conftest import ROOT, WORK

pytestmark = [pytest.mark.slow]
TOOLS = WORK / "tools"


def contents(wheel: Path) -> dict[str, bytes]:
    """Files of `wheel` by name, without what names the platform or was compiled."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    assert len(files) == len(archive.namelist())
    return {name: b"" if name.endswith((".so", "/WHEEL", "/RECORD")) else data for name, data in files.items()}


def members(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers()}


def with_file(wheel: Path, path: Path, name: str) -> Path:
    """A copy of `wheel` with one file more, which its RECORD knows."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(path, "w") as target:
        for other in source.namelist():
            data = source.read(other)
            if other.endswith("/RECORD"):
                data += f"{name},sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n".encode()
            target.writestr(other, data)
        target.writestr(name, b"")
    return path


# ---- the wheels ----


def test_the_wheels_have_the_files_of_the_package(
    script: ModuleType, wheels: dict[str, Path], sources: dict[str, Path]
) -> None:
    for machine, wheel in wheels.items():
        script.check_contents(wheel, sources[machine] / "vllm_mc2", TOOLS)
        script.check_description(wheel, TOOLS)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vllm_mc2/scratch.py", "W102"),  # within the package, but not of the source
        ("scratch.py", "W102"),
        ("tests/test_it.py", "W005"),
        ("vllm_mc2/__pycache__/session.cpython-311.pyc", "W001"),
    ],
)
def test_a_stray_file_is_found(
    script: ModuleType, wheels: dict[str, Path], sources: dict[str, Path], tmp_path: Path, name: str, said: str
) -> None:
    stray = with_file(wheels["x86_64"], tmp_path / wheels["x86_64"].name, name)
    assert script.problems(stray) == []
    with pytest.raises(script.WheelError, match=said):
        script.check_contents(stray, sources["x86_64"] / "vllm_mc2", TOOLS)


def test_a_missing_file_is_found(
    script: ModuleType, wheels: dict[str, Path], sources: dict[str, Path], tmp_path: Path
) -> None:
    package = shutil.copytree(sources["x86_64"] / "vllm_mc2", tmp_path / "vllm_mc2")
    (package / "forgotten.py").touch()
    with pytest.raises(script.WheelError, match=r"(?s)W101.*vllm_mc2/forgotten\.py"):
        script.check_contents(wheels["x86_64"], package, TOOLS)


def test_a_wheel_that_an_index_would_not_describe_is_found(
    script: ModuleType, wheels: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / wheels["x86_64"].name
    with zipfile.ZipFile(wheels["x86_64"]) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            # The description is what follows the first empty line.
            target.writestr(name, data.partition(b"\n\n")[0] + b"\n" if name.endswith("/METADATA") else data)
    with pytest.raises(script.WheelError, match="long_description"):
        script.check_description(path, TOOLS)


# ---- the source distribution ----


def test_the_source_distribution_is_complete_and_clean(release: ModuleType, sdist: Path) -> None:
    assert release.sdist_problems(sdist) == []


def test_it_has_what_git_would_have(sdist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = {name for name in listed if (ROOT / name).is_file() and not name.startswith(".ci/")}
    assert members(sdist) == expected | {"PKG-INFO"}


def test_what_does_not_belong_there_is_found(release: ModuleType, sdist: Path, tmp_path: Path) -> None:
    top = sdist.name.removesuffix(".tar.gz")
    path = tmp_path / sdist.name
    strays = ["build/x.txt", ".hypothesis/x", "tests/__pycache__/a.pyc", ".ci/run", "vllm_mc2/_native.abi3.so"]
    with tarfile.open(sdist) as source, tarfile.open(path, "w:gz") as target:
        for member in source.getmembers():
            if member.name != f"{top}/LICENSE":
                target.addfile(member, source.extractfile(member))
        for name in strays:
            target.addfile(tarfile.TarInfo(f"{top}/{name}"), io.BytesIO())
        target.addfile(tarfile.TarInfo("elsewhere"), io.BytesIO())
    found = release.sdist_problems(path)
    assert f"{sdist.name} has no LICENSE" in found
    assert f"{sdist.name}: elsewhere is not in a folder {top}" in found
    assert [stray for stray in strays if f"{sdist.name} has {stray}" not in found] == []
    assert len(found) == 2 + len(strays)


def test_a_wheel_from_it_is_that_of_the_checkout(wheels: dict[str, Path], tree_wheel: Path) -> None:
    """The wheels of `wheels.py` are built from the source distribution; pip built the other one from the checkout."""
    from_sdist, from_tree = contents(wheels["x86_64"]), contents(tree_wheel)
    assert sorted(from_sdist) == sorted(from_tree)
    assert [name for name, data in from_sdist.items() if from_tree[name] != data] == []


# ---- the same bytes each time ----


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_source_gives_the_same_bytes(
    script: ModuleType, sdist: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    """With zig's cache of the first build: that the compiler gives the same each time is zig's to keep."""
    source = tmp_path / "source"
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (tree,) = source.iterdir()
    (tree / "PKG-INFO").unlink()
    for path in tree.rglob("*"):
        path.touch()  # another checkout has other times
    again = script.call_backend("build_sdist", tree, tmp_path, TOOLS, {}, {})
    assert sha256(again) == sha256(sdist)
    wheel, _ = script.build_wheel("x86_64", again, TOOLS, WORK, tmp_path)
    assert sha256(wheel) == sha256(wheels["x86_64"])


def test_all_files_bear_one_time(script: ModuleType, wheels: dict[str, Path]) -> None:
    """Not that of the build, which `wheel tags` would write. Archives of this kind know even seconds only."""
    *until_minute, second = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", script.EPOCH)))[:6]
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            times = {info.date_time for info in archive.infolist()}
        assert times == {(*until_minute, second // 2 * 2)}
