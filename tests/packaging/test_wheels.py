"""Wheels for both machines from one (``examples/setup/wheels.py``), and the extra for Ascend processors.

The module for AArch64 is run too where Debian's packages of an emulator and of that machine's Python can be had; nothing
is installed: all is unpacked under ``build/``.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.packaging.conftest import ROOT, TAG, WORK

MODULE = "vllm_mc2/_native.abi3.so"
pytestmark = [pytest.mark.slow]

# Of Debian 12: what Python and the module need on AArch64.
FOREIGN = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libstdc++6", "libgcc-s1", "zlib1g",
    "libexpat1", "libffi8",
)  # fmt: skip


def altered(wheel: Path, path: Path, change: Callable[[bytes], bytes]) -> Path:
    """A copy of `wheel` whose module is another."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, change(data) if name == MODULE else data)
    return path


def test_both_machines_get_the_same_wheel(wheels: dict[str, Path]) -> None:
    assert sorted(wheels) == ["aarch64", "x86_64"]
    contents = {}
    for machine, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
            assert f"Tag: {TAG}{machine}\n" in archive.read(about).decode()
            assert {MODULE, "vllm_mc2/_native.pyi", "vllm_mc2/py.typed"} <= names
            # bytes 18 and 19 of an ELF file are its machine
            assert archive.read(MODULE)[18:20] == {"x86_64": b"\x3e\0", "aarch64": b"\xb7\0"}[machine]
            contents[machine] = {name: archive.read(name) for name in names if name.endswith((".py", ".pyi"))}
    assert contents["x86_64"] == contents["aarch64"]


def test_checks_find_nothing_wrong_with_them(script: ModuleType, wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        assert script.problems(wheel) == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (rb"GLIBCXX_3\.4\.22", b"GLIBCXX_3.4.32", "of GLIBCXX_3.4.32, newer than"),
        (rb"CXXABI_1\.3\.9\0", b"CXXABI_9.3.9\0", "of CXXABI_9.3.9, newer than"),
        (rb"GLIBC_2\.25", b"GLIBC_2.39", "of GLIBC_2.39, newer than"),
        (rb"libstdc\+\+\.so\.6", b"libfooc++.so.6", "it needs libfooc++.so.6"),
        (rb"\0PyBytes_FromStringAndSize\0", b"\0QyBytes_FromStringAndSize\0", "QyBytes_FromStringAndSize is in no library"),
        (rb"\0PyInit__native\0", b"\0PyInit__motive\0", "no PyInit__native"),
    ],
)  # fmt: skip
def test_checks_find_what_would_not_load(
    script: ModuleType, wheels: dict[str, Path], tmp_path: Path, machine: str, old: bytes, new: bytes, said: str
) -> None:
    wheel = wheels[machine]

    def change(module: bytes) -> bytes:
        changed, times = re.subn(old, lambda _: new, module)
        assert times > 0 and len(changed) == len(module)
        return changed

    found = script.problems(altered(wheel, tmp_path / wheel.name, change))
    assert any(said in problem for problem in found), found


def test_checks_find_a_wrong_tag(script: ModuleType, wheels: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copy(wheels["aarch64"], tmp_path / wheels["x86_64"].name)
    assert "the module is not for x86_64" in script.problems(other)
    older = shutil.copy(wheels["aarch64"], tmp_path / wheels["aarch64"].name.replace("2_28", "2_17"))
    assert script.problems(older) != []


def test_the_second_opinions_are_asked(
    script: ModuleType, wheels: dict[str, Path], sources: dict[str, Path], tmp_path: Path
) -> None:
    """`check` is `problems`, then other tools: each must be able to refuse what the ones before let pass."""
    wheel = wheels["aarch64"]
    # In the stable ABI since Python 3.13 only.
    private = altered(
        wheel, tmp_path / wheel.name,
        lambda module: module.replace(b"\0PyBytes_FromStringAndSize\0", b"\0PyUnicode_AsUTF8".ljust(27, b"\0")),
    )  # fmt: skip
    assert script.problems(private) == []
    with pytest.raises(script.WheelError, match="abi3audit"):
        script.check(private, sources["aarch64"], WORK / "tools")


def test_auditwheel_would_find_a_newer_system_by_itself(
    script: ModuleType,
    wheels: dict[str, Path],
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel = wheels["x86_64"]
    newer = altered(wheel, tmp_path / wheel.name, lambda module: module.replace(b"GLIBC_2.25", b"GLIBC_2.39"))
    monkeypatch.setattr(script, "problems", lambda wheel: [])
    with pytest.raises(script.WheelError, match=r"auditwheel: .*manylinux_2_39"):
        script.check(newer, sources["x86_64"], WORK / "tools")


def test_a_symbol_that_is_too_new_stops_the_build(script: ModuleType, tmp_path: Path, wheels: dict[str, Path]) -> None:
    """The library that is linked with has no symbol newer than GCC 8's, so what needs one stays without a version."""
    stub = WORK / "aarch64" / "libstdc++.so.6"
    versions = {symbol.version for symbol in script.dynamic_symbols(stub) if symbol.defined}
    assert "GLIBCXX_3.4.22" in versions and all(map(script.is_allowed, versions))
    source = tmp_path / "new.cpp"
    source.write_text("#include <filesystem>\nauto f(std::filesystem::path p) { return p.parent_path(); }\n")
    compiler = WORK / "aarch64" / "c++"
    script.run(
        compiler, "-std=c++20", "-O2", "-fPIC", "-shared", source, WORK / "aarch64" / "compat.o", stub, "-o", tmp_path / "new.so"
    )  # fmt: skip
    missing = {symbol.name for symbol in script.dynamic_symbols(tmp_path / "new.so") if not symbol.defined}
    assert any("filesystem" in name and not script.ALLOWED_UNDEFINED.fullmatch(name) for name in missing)


# ---- run it ----

NATIVE_TESTS = """
import sys
sys.executable = sys.argv[1]  # what the tests start other processes with
import platform, pytest
assert platform.machine() == sys.argv[2]
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "native"]))
"""


def install(wheel: Path, folder: Path, machine: str) -> None:
    """Let pip choose wheels for `machine`, this one and what it requires; pytest comes with them."""
    platforms = [f"--platform=manylinux{version}_{machine}" for version in ("_2_28", "_2_26", "_2_17", "2014")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run(
        [*command, *platforms, "--python-version=3.11", "--only-binary=:all:", str(wheel), "pytest", "pytest-timeout"],
        check=True, timeout=300,
    )  # fmt: skip


def run_native_tests(python: list[str], wheel: Path, tmp_path: Path, machine: str) -> str:
    """The tests of the binding, which start processes and expect errors, on an installed wheel."""
    install(wheel, tmp_path / "installed", machine)
    shutil.copytree(ROOT / "tests" / "native", tmp_path / "native", ignore=shutil.ignore_patterns("__pycache__"))
    starter = tmp_path / "python"
    starter.write_text("#!/bin/sh\nexec " + " ".join(f"'{word}'" for word in python) + ' "$@"\n')
    starter.chmod(0o755)
    done = subprocess.run(
        [str(starter), "-c", NATIVE_TESTS, str(starter), machine],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "installed"), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def debian(folder: Path, *command: str, architecture: str) -> None:
    """apt-get with a state of its own, for another architecture, in `folder`; the machine's own is not touched."""
    state = folder / f"apt-{architecture}"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    (state / "state" / "status").touch()
    options = {
        "Dir::State": state / "state", "Dir::State::status": state / "state" / "status", "Dir::Cache": state / "cache",
        "APT::Architecture": architecture, "APT::Architectures::": architecture, "APT::Sandbox::User": "root",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    subprocess.run(["apt-get", "-q", *words, *command], cwd=folder, check=True, capture_output=True, timeout=200)


@pytest.fixture(scope="module")
def foreign_python() -> list[str]:
    """A command that is Python 3.11 for AArch64."""
    if platform.machine() != "x86_64" or not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("needs Debian's packages, on x86-64")
    folder = WORK / "emulator"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            for architecture, names in {"amd64": ("qemu-user-static",), "arm64": FOREIGN}.items():
                debian(folder, "update", architecture=architecture)
                debian(folder, "download", *names, architecture=architecture)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no emulator: {error.stderr.decode().strip().splitlines()[-1:]}")
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], check=True)
            package.unlink()
        (folder / "complete").touch()
    root = folder / "root"
    return [str(root / "usr/bin/qemu-aarch64-static"), "-L", str(root), str(root / "usr/bin/python3.11")]


def test_the_module_for_aarch64_works(foreign_python: list[str], wheels: dict[str, Path], tmp_path: Path) -> None:
    said = run_native_tests(foreign_python, wheels["aarch64"], tmp_path, "aarch64")
    assert re.search(r"[3-9]\d passed", said) and "failed" not in said


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or platform.machine() != "x86_64", reason="what it is installed for"
)
def test_the_module_for_x86_64_works(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = os.path.realpath(sys.executable)  # outside of the environment, where the project is installed
    said = run_native_tests([python], wheels["x86_64"], tmp_path, "x86_64")
    assert re.search(r"[3-9]\d passed", said) and "failed" not in said


# ---- the extra for Ascend ----

# What vllm-ascend 0.23.0.post1 and torch-npu 2.10.0.post4 require, from their metadata, and vLLM's wheels of the two lines.
VLLM_ASCEND_REQUIRES = ("torch==2.10.0", "torch-npu==2.10.0.post4")
STUBS = {
    ("vllm-ascend", "0.23.0.post1"): VLLM_ASCEND_REQUIRES,
    ("torch-npu", "2.10.0.post4"): ("torch==2.10.0",),
    ("vllm", "0.23.0"): ("torch==2.11.0",),
    ("vllm", "0.32.0"): ("torch==2.13.0",),
    ("torch", "2.10.0"): (),
    ("torch", "2.11.0"): (),
    ("torch", "2.13.0"): (),
    ("msgspec", "0.20.0"): (),
    ("nanobind-backend", "1.0.0"): (),
}


def extras() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {extra: list(map(Requirement, texts)) for extra, texts in project["optional-dependencies"].items()}


def test_the_extra_names_the_versions_that_belong_together() -> None:
    ascend = {requirement.name: requirement for requirement in extras()["ascend"]}
    assert sorted(ascend) == ["torch-npu", "vllm-ascend"]
    assert str(ascend["vllm-ascend"].specifier) == "==0.23.0.post1"
    for required in map(Requirement, VLLM_ASCEND_REQUIRES):
        if required.name in ascend:
            assert ascend[required.name].specifier == required.specifier
    for requirement in ascend.values():
        assert requirement.marker is not None
        assert [requirement.marker.evaluate({"python_version": v}) for v in ("3.11", "3.12", "3.13")] == [
            True,
            True,
            False,
        ]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels without contents, so that pip's resolver can be asked within seconds and without CANN."""
    folder = tmp_path_factory.mktemp("stubs")
    for (name, version), requires in STUBS.items():
        stem = f"{name.replace('-', '_')}-{version}"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
            metadata = "\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires), ""])
            archive.writestr(f"{stem}.dist-info/METADATA", metadata)
            archive.writestr(
                f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{stem}.dist-info/RECORD", "")
    return folder


def resolve(stubs: Path, wheel: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-index", f"--find-links={stubs}",
        f"--target={stubs / 'none'}", "--platform=manylinux_2_28_aarch64", "--python-version=3.11",
        "--only-binary=:all:", *(f"{wheel}[{extra}]" if extra.isidentifier() else extra for extra in wanted),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_pip_takes_one_of_the_two_vllms(stubs: Path, wheels: dict[str, Path]) -> None:
    ascend, plain = resolve(stubs, wheels["aarch64"], "ascend"), resolve(stubs, wheels["aarch64"], "vllm")
    assert "torch-2.10.0" in ascend.stdout and "vllm_ascend-0.23.0.post1" in ascend.stdout.replace("vllm-a", "vllm_a")
    assert "vllm-0.32.0" in plain.stdout and "torch-2.13.0" in plain.stdout
    for both in (("ascend", "vllm"), ("ascend", "vllm==0.23.0")):
        refused = resolve(stubs, wheels["aarch64"], *both)
        assert refused.returncode != 0 and "conflicting dependencies" in refused.stderr, refused.stdout
