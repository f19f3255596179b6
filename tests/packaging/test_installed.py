"""A part of what ``make test-wheel`` does: tests of this repository against the installed wheel, and the proof that it is."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging import installed
from tests.packaging.conftest import ROOT

pytestmark = [pytest.mark.slow]
PART = [f"tests/{name}" for name in ("native", "unit/test_config.py", "unit/test_layout.py", "unit/test_protocol.py")]


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its interpreter."""
    if platform.machine() not in wheels:
        pytest.skip("no wheel for this machine")
    return installed.make_environment(wheels[platform.machine()], tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed.copy_checkout(tmp_path_factory.mktemp("copy") / "checkout")


def run(python: Path, checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**installed.environment(python), **variables}
    command = installed.command(python, ["-q", *arguments])
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False, timeout=250)


def test_tests_pass_on_the_installed_wheel(environment: Path, checkout: Path) -> None:
    done = run(environment, checkout, *PART)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def test_its_commands_work(environment: Path, tmp_path: Path) -> None:
    command = [str(environment.parent / "vllm-mc2"), "--help"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert "inspect" in said.stdout


def test_no_test_runs_on_the_source(environment: Path, checkout: Path) -> None:
    """The guard: with the checkout's package in front, or in an environment that has no wheel."""
    shadowed = run(environment, checkout, "tests/unit/test_config.py", PYTHONPATH=str(ROOT))
    assert shadowed.returncode != 0 and "passed" not in shadowed.stdout
    editable = run(Path(sys.executable), checkout, "tests/unit/test_config.py")
    assert editable.returncode == pytest.ExitCode.USAGE_ERROR and "not the installed wheel" in editable.stderr


def test_what_is_loaded_later_is_looked_at_too(environment: Path, checkout: Path, tmp_path: Path) -> None:
    """A module of the package from elsewhere, which a test has brought in."""
    (tmp_path / "stray.py").touch()
    test = tmp_path / "test_it.py"
    test.write_text(
        "import importlib.util, sys\n"
        "def test_it():\n"
        f"    spec = importlib.util.spec_from_file_location('vllm_mc2.stray', {str(tmp_path / 'stray.py')!r})\n"
        "    sys.modules['vllm_mc2.stray'] = importlib.util.module_from_spec(spec)\n"
    )
    done = run(environment, checkout, str(test), "--rootdir", str(checkout))
    assert "100%" in done.stdout and "FAILED" not in done.stdout
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "stray.py" in done.stderr


def test_the_environment_has_the_wheel_and_no_other_package_of_that_name(environment: Path) -> None:
    code = (
        "import sys; from importlib.metadata import distribution; "
        "print(distribution('vllm-mc2').locate_file('')); import msgspec; "
        "print([name for name in sys.modules if 'editable' in name])"
    )
    said = subprocess.run([environment, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    folder, editable = said.stdout.split("\n")[:2]
    assert Path(folder).is_relative_to(environment.parents[1]) and editable == "[]"


def test_one_wheel_is_chosen_or_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        installed.main(["--wheel", str(tmp_path / "none.whl")])
    assert "wheels.py" in capsys.readouterr().err
