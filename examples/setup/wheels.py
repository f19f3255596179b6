#!/usr/bin/env python3.11
"""Build the source distribution and a wheel for x86-64 and for AArch64, on x86-64 Linux.

    python examples/setup/wheels.py [--machine aarch64] [--output dist] [--work build/wheels]

Zig's clang, from the package registry, is compiler and linker for both. It brings the C library's headers
and symbols of any release, here 2.28, so one wheel runs on every distribution since 2019
(manylinux_2_28). It cannot bring the C++ library: its own is libc++, and nanobind's split mode works with
libstdc++ alone, as the exceptions of `nanobind-backend` and of this module must be the same types. So

- headers are those of this machine's `g++`, which are the same for both machines;
- what is linked with is a library without code that this script makes: the names and versions that this
  machine's `libstdc++.so.6` has, up to those of GCC 8;
- what newer headers call beyond that is in `libstdcxx_compat.cpp`.

Each wheel is then checked: its own reading of the module (`problems`), `auditwheel`, `abi3audit`, and
`check-wheel-contents` against the source that it was built from; `twine` reads what the index would show of each file.
The same source gives the same bytes: files in the archives bear one time, `SOURCE_DATE_EPOCH` or that of `EPOCH`.
Standard library only; needs `g++`, `readelf` and the package registry.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPAT = Path(__file__).resolve().with_name("libstdcxx_compat.cpp")

TOOLS = (
    "ziglang==0.17.1", "cmake>=3.25,<5", "ninja", "wheel",
    "auditwheel>=6.4,<7", "abi3audit>=0.0.21", "check-wheel-contents>=0.6.3,<0.7", "twine>=7,<8",
)  # fmt: skip
EPOCH = "1667997441"  # what scikit-build-core takes by itself; `wheel tags` would take the time of the day
GLIBC = "2.28"
# readelf's word for each machine that vLLM and CANN run on.
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
# What a manylinux_2_28 system has. The CXXABI of GCC 8; auditwheel does not know this one.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = re.compile(
    r"lib(stdc\+\+\.so\.6|gcc_s\.so\.1|c\.so\.6|m\.so\.6|pthread\.so\.0|dl\.so\.2|rt\.so\.1)|ld-linux-.*"
)
STUBBED = ("libstdc++.so.6", "libgcc_s.so.1")
ALLOWED_UNDEFINED = re.compile(r"_?Py[A-Z_].*|__gmon_start__|_ITM_\w+|__cxa_finalize")
MODULE = "vllm_mc2/_native.abi3.so"


class WheelError(Exception):
    """What the user is told, instead of a traceback."""


@dataclass(frozen=True)
class Symbol:
    """A line of an ELF file's dynamic symbol table; `version` is empty where it has none."""

    name: str
    version: str
    kind: str
    size: int
    defined: bool
    default: bool


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Standard output of `command`; its whole output in a `WheelError` if it fails."""
    arguments = [str(part) for part in command]
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env={"SOURCE_DATE_EPOCH": EPOCH, **os.environ, "LC_ALL": "C", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise WheelError(f"command failed: {' '.join(arguments)}\n{done.stdout[-4000:]}{done.stderr[-8000:]}")
    return done.stdout


def dynamic_symbols(library: Path) -> list[Symbol]:
    found = []
    for line in run("readelf", "--dyn-syms", "-W", library).splitlines():
        words = line.split()
        if len(words) < 8 or not words[0].rstrip(":").isdigit():
            continue
        name, at, version = words[7].partition("@")
        size = int(words[2], 0)
        found.append(
            Symbol(name, version.lstrip("@"), words[3], size, words[6] != "UND", at == "" or version.startswith("@"))
        )
    return found


def is_allowed(version: str) -> bool:
    """Whether a manylinux_2_28 system has this symbol version."""
    library, _, number = version.partition("_")
    newest = NEWEST.get(library)
    return (
        newest is not None
        and re.fullmatch(r"[\d.]+", number) is not None
        and (tuple(map(int, number.split("."))) <= newest)
    )


class Toolchain:
    """Zig as a cross compiler for one machine, in a folder of its own that holds all that it writes."""

    def __init__(self, machine: str, tools: Path, folder: Path) -> None:
        self.machine = machine
        self.folder = folder
        self.zig = tools / "ziglang" / "zig"
        self.env = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "cache"), "ZIG_LOCAL_CACHE_DIR": str(folder / "cache")}
        self.target = f"{machine}-linux-gnu.{GLIBC}"
        folder.mkdir(parents=True, exist_ok=True)

    def make(self) -> Path:
        """The CMake toolchain file; everything that it names exists."""
        stubs = [self.stub(name) for name in STUBBED]
        compiler = self.compiler()
        compat = self.folder / "compat.o"
        run(compiler, "-std=c++20", "-O2", "-fPIC", "-c", COMPAT, "-o", compat)
        libraries = " ".join(f'\\"{path}\\"' for path in [compat, *stubs])
        file = self.folder / "toolchain.cmake"
        file.write_text(
            "set(CMAKE_SYSTEM_NAME Linux)\n"
            f"set(CMAKE_SYSTEM_PROCESSOR {self.machine})\n"
            f'set(CMAKE_CXX_COMPILER "{compiler}")\n'
            f'set(CMAKE_AR "{self.wrapper("ar", "ar")}" CACHE FILEPATH "")\n'
            f'set(CMAKE_RANLIB "{self.wrapper("ranlib", "ranlib")}" CACHE FILEPATH "")\n'
            f'set(CMAKE_CXX_STANDARD_LIBRARIES_INIT "{libraries}")\n'
            "set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)\n"
        )
        return file

    def wrapper(self, name: str, *arguments: str) -> Path:
        """An executable that is zig with these arguments first: CMake wants one word."""
        path = self.folder / name
        words = [f'"{word}"' for word in (str(self.zig), *arguments)]
        settings = " ".join(f'{key}="{value}"' for key, value in self.env.items())
        path.write_text(f'#!/bin/sh\nexec env {settings} {" ".join(words)} "$@"\n')
        path.chmod(0o755)
        return path

    def compiler(self) -> Path:
        """C++ with libstdc++'s headers. `zig c++` would add libc++'s, `zig cc` adds none."""
        overlay = self.folder / "include"
        (overlay / "sys").mkdir(parents=True, exist_ok=True)
        # Came with glibc 2.32, and libstdc++ includes it wherever it is found. "No" is always right: atomics are used.
        (overlay / "sys" / "single_threaded.h").write_text("static const char __libc_single_threaded = 0;\n")
        # Debian's pyconfig.h includes another one by its machine's name, which is not there for the other machine.
        python = Path(sysconfig.get_path("include"))
        theirs = python.parent / str(sysconfig.get_config_var("MULTIARCH")) / python.name / "pyconfig.h"
        if theirs.exists():
            ours = overlay / f"{self.machine}-linux-gnu" / python.name / "pyconfig.h"
            ours.parent.mkdir(parents=True, exist_ok=True)
            ours.write_text(f'#include "{theirs}"\n')
        includes = [f"-I{folder}" for folder in [overlay, *standard_headers()]]
        return self.wrapper("c++", "cc", "-target", self.target, "-fno-sanitize=undefined", *includes)

    def stub(self, name: str) -> Path:
        """A library with `name`'s symbols and no code, to link with in place of the one of the other machine."""
        theirs = Path(run("g++", f"-print-file-name={name}").strip())
        if not theirs.is_absolute():
            raise WheelError(f"g++ does not know where {name} is")
        by_version: dict[str, list[Symbol]] = {}
        for symbol in dynamic_symbols(theirs):
            if symbol.defined and symbol.default and symbol.kind in {"FUNC", "OBJECT"} and is_allowed(symbol.version):
                by_version.setdefault(symbol.version, []).append(symbol)
        source, script = self.folder / f"{name}.s", self.folder / f"{name}.map"
        lines = [".data"]
        for symbol in (symbol for symbols in by_version.values() for symbol in symbols):
            kind = "function" if symbol.kind == "FUNC" else "object"
            lines += [f".globl {symbol.name}", f".type {symbol.name}, %{kind}", f".size {symbol.name}, {symbol.size}"]
            lines.append(f"{symbol.name}:")
        source.write_text("\n".join([*lines, ".quad 0", '.section .note.GNU-stack,"",%progbits', ""]))
        script.write_text(
            "".join(
                f"{version} {{ global: {' '.join(symbol.name + ';' for symbol in symbols)} }};\n"
                for version, symbols in by_version.items()
            )
        )
        library = self.folder / name
        run(
            self.zig, "cc", "-target", self.target, "-shared", "-nostdlib", f"-Wl,-soname,{name}",
            f"-Wl,--version-script={script}", source, "-o", library, env=self.env,
        )  # fmt: skip
        return library


def standard_headers() -> list[Path]:
    """Where `g++` has the C++ library's own headers; the machine's part differs in nothing that is used here."""
    said = subprocess.run(
        ["g++", "-xc++", "-E", "-v", os.devnull], env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True
    ).stderr  # fmt: skip
    listed = said.partition("#include <...> search starts here:")[2].partition("End of search list.")[0]
    folders = [Path(line.strip()).resolve() for line in listed.splitlines() if line.strip()]
    found = [folder for folder in folders if (folder / "vector").exists() or (folder / "bits/c++config.h").exists()]
    if len(found) < 2:
        raise WheelError("g++ shows no headers of libstdc++")
    return found


def install_tools(folder: Path) -> None:
    """What builds and checks wheels, from the registry, in `folder` alone. Done again only when the list changed."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        requires = [*tomllib.load(file)["build-system"]["requires"], *TOOLS]
    stamp = folder / "installed"
    key = "\n".join([sys.version, *requires])
    if stamp.exists() and stamp.read_text() == key:
        return
    shutil.rmtree(folder, ignore_errors=True)
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-compile",
        "--target",
        folder,
        *requires,
    )
    stamp.write_text(key)


def call_backend(
    hook: str, source: Path, output: Path, tools: Path, env: dict[str, str], settings: dict[str, str]
) -> Path:
    """`build_sdist` or `build_wheel` of the project's build backend, run in `source` without pip, which would look for
    build tools of the machine that is built for.
    """  # fmt: skip
    code = (
        "import scikit_build_core.build as backend, sys\n"
        f"name = backend.{hook}({str(output)!r}, {settings!r})\n"
        "print('\\n' + name)"
    )
    paths = {"PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return output / run(sys.executable, "-c", code, cwd=source, env={**paths, **env}).split("\n")[-2]


def build_sdist(tools: Path, output: Path) -> Path:
    return call_backend("build_sdist", ROOT, output, tools, {}, {})


def build_wheel(machine: str, sdist: Path, tools: Path, work: Path, output: Path) -> tuple[Path, Path]:
    """The wheel for `machine`, built from the source distribution and tagged, and that source; not yet checked."""
    folder = work / machine
    toolchain = Toolchain(machine, tools, folder).make()
    unpacked, built = folder / "source", folder / "build"
    for old in (unpacked, built):
        shutil.rmtree(old, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    env = {
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what sysconfig says the platform is
    }
    plain = call_backend("build_wheel", source, built, tools, env, {"build-dir": str(built / "cmake")})
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    name = run(
        sys.executable, "-m", "wheel", "tags", "--platform-tag", tag, plain, env={"PYTHONPATH": str(tools)}
    ).strip()
    return Path(shutil.move(built / name, output / name)), source


def problems(wheel: Path) -> list[str]:
    """Why the module in `wheel` would not load on a manylinux_2_28 system of the machine in its tag; empty if it would.

    Raises:
        WheelError: there is no such module, or it is no ELF file.
    """
    machine = next((name for name in MACHINES if wheel.stem.endswith(f"-cp311-abi3-manylinux_2_28_{name}")), None)
    if machine is None:
        return [f"{wheel.name}: not an abi3 wheel for Python 3.11 and manylinux_2_28"]
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        if MODULE not in archive.namelist():
            raise WheelError(f"{wheel.name} has no {MODULE}")
        module = Path(archive.extract(MODULE, scratch))
        header = run("readelf", "-hdW", module)
        symbols = dynamic_symbols(module)
    found = []
    if not re.search(rf"Machine:\s+{re.escape(MACHINES[machine])}", header):
        found.append(f"the module is not for {machine}")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", header)
    found += [f"it needs {name}" for name in needed if not LIBRARIES.fullmatch(name)]
    found += [f"it does not need {name}" for name in STUBBED[:1] if name not in needed]
    if re.search(r"\((RPATH|RUNPATH)\)", header):
        found.append("it has a search path of its own")
    for symbol in symbols:
        if symbol.version and not symbol.defined and not is_allowed(symbol.version):
            found.append(f"{symbol.name} is of {symbol.version}, newer than manylinux_2_28 has")
        if symbol.name and not symbol.defined and not symbol.version and not ALLOWED_UNDEFINED.fullmatch(symbol.name):
            found.append(f"{symbol.name} is in no library of manylinux_2_28; libstdcxx_compat.cpp is for such")
    if not any(symbol.defined and symbol.name == "PyInit__native" for symbol in symbols):
        found.append("it has no PyInit__native")
    return found


def check(wheel: Path, source: Path, tools: Path) -> None:
    """Raise `WheelError` unless this script, `auditwheel`, `abi3audit`, `check-wheel-contents` and `twine` find nothing
    wrong with `wheel`, which was built from the tree `source`.
    """  # fmt: skip
    found = problems(wheel)
    if found:
        raise WheelError("\n".join([f"{wheel.name}:", *found]))
    env = {"PYTHONPATH": str(tools)}
    shown = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel, env=env).split())
    # It names the oldest system that the module is good for, which may be older than what the tag promises.
    oldest = re.search(r'following platform tag: "manylinux_2_(\d+)_(\w+)"', shown)
    if oldest is None or int(oldest[1]) > int(GLIBC.partition(".")[2]) or not wheel.stem.endswith(f"_{oldest[2]}"):
        raise WheelError(f"auditwheel: {shown}")
    run(sys.executable, "-m", "abi3audit", "--strict", wheel, env=env)
    check_contents(wheel, source / MODULE.partition("/")[0], tools)
    check_description(wheel, tools)


def check_contents(wheel: Path, package: Path, tools: Path) -> None:
    """Raise `WheelError` unless `wheel` has the files of `package` and the module, once each, and no others."""
    with tempfile.TemporaryDirectory() as scratch:
        expected = Path(scratch) / package.name
        shutil.copytree(package, expected)
        # With the one file that is built, no check of the tool has to be off.
        (Path(scratch) / MODULE).touch()
        run(
            sys.executable, "-m", "check_wheel_contents", "--no-config", "--toplevel", package.name, "--package", expected,
            wheel, env={"PYTHONPATH": str(tools)},
        )  # fmt: skip


def check_description(file: Path, tools: Path) -> None:
    """Raise `WheelError` unless an index would take the metadata of `file` and could show the README."""
    run(sys.executable, "-m", "twine", "check", "--strict", file, env={"PYTHONPATH": str(tools)})


def make(machine: str, sdist: Path, work: Path, output: Path) -> Path:
    """The wheel for `machine`, built and checked."""
    wheel, source = build_wheel(machine, sdist, work / "tools", work, output)
    check(wheel, source, work / "tools")
    return wheel


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build and check the sdist and the wheels.")
    parser.add_argument(
        "--machine", action="append", choices=sorted(MACHINES), help="one machine only; may be repeated"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the files go (default: dist)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="tools and caches")
    options = parser.parse_args(arguments)
    work, output = options.work.resolve(), options.output.resolve()
    for folder in (work, output):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        install_tools(work / "tools")
        sdist = build_sdist(work / "tools", output)
        check_description(sdist, work / "tools")
        print(sdist)
        with ThreadPoolExecutor() as pool:  # most of a build is one process that waits for the next
            for wheel in pool.map(lambda machine: make(machine, sdist, work, output), options.machine or MACHINES):
                print(wheel)
    except (WheelError, FileNotFoundError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
