"""Every number that doctor prints of this machine, against another reading of it; and worlds that are changed under it."""

import errno
import json
import os
import platform
import re
import resource
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.conftest import Named, by_name, doctor_child, run_child
from tests.cli.world import NUMBERS, Forbidden, forbidding
from tests.support.descriptors import assert_none_new, open_descriptors
from tests.support.waiting import wait_until
from vllm_mc2._native import Pool
from vllm_mc2.cli.checks import memory
from vllm_mc2.cli.checks.huge_pages import PROBE_BYTES, huge_page_findings
from vllm_mc2.cli.checks.kernel import kernel_findings
from vllm_mc2.cli.checks.memory import memory_findings, tightest_group
from vllm_mc2.cli.checks.settings import Wanted, read_settings
from vllm_mc2.cli.checks.software import PACKAGES, software_findings

MIB, GIB = 1 << 20, 1 << 30
CHANGING_BYTES = 64 * MIB
"""Other processes allocate and free while readings are made: this much even in a quiet moment."""

needs_seccomp = pytest.mark.skipif(NUMBERS is None, reason="system call numbers of this machine are not known here")


def available_to_a_pool() -> int:
    """As the native core says it: it refuses a pool that is too large with this number."""
    with pytest.raises(OSError, match="bytes available") as caught:
        Pool(1 << 46)
    return int(re.search(r"(\d+) bytes available", str(caught.value))[1])  # type: ignore[index]


def meminfo(key: str) -> int:
    return int(re.search(rf"^{key}:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)[1])  # type: ignore[index]


def agreed(look: Callable[[], Named], agrees: Callable[[Named], bool]) -> Named:
    """What `look` finds once another reading agrees with it: others change the machine in between, but not each time."""
    found: list[Named] = []

    def agree() -> bool:
        found.append(look())
        return agrees(found[-1])

    wait_until(agree, "an agreement of two readings")
    return found[-1]


def test_the_kernel() -> None:
    found = by_name(kernel_findings())
    values = found["kernel"]["values"]
    assert values["release"] == os.uname().release and values["machine"] == os.uname().machine
    assert values["python"] == platform.python_version()
    assert values["num_cpus"] == len(os.sched_getaffinity(0))
    assert found["user"]["values"]["uid"] == os.geteuid()
    inode = os.stat("/proc/self/ns/pid").st_ino
    assert found["user"]["values"]["pid_namespace"] == str(inode) and str(inode) in found["user"]["detail"]
    states = {name: finding["state"] for name, finding in found.items()}
    assert states["sealed memory"] == "pass"  # or nothing of this project would run here


@needs_seccomp
def test_a_kernel_without_pidfd_of_peers() -> None:
    only_fallback = Forbidden("getsockopt", errno.ENOPROTOOPT, 2, 77)
    found = doctor_child(prelude=forbidding(only_fallback))["pidfd"]
    assert found["state"] == "pass" and found["values"] == {"has_peer_pidfd": True, "has_pidfd_open": True}
    found = doctor_child(prelude=forbidding(only_fallback, Forbidden("pidfd_open")))["pidfd"]
    assert found["state"] == "warn" and found["values"] == {"has_peer_pidfd": False, "has_pidfd_open": False}
    assert "seccomp" in found["advice"]


@needs_seccomp
def test_a_kernel_without_memfd() -> None:
    found = doctor_child(prelude=forbidding(Forbidden("memfd_create")))
    assert found["sealed memory"]["state"] == "fail" and "memfd_create" in found["sealed memory"]["detail"]
    assert found["pages of a pool"]["state"] == "fail"


@needs_seccomp
def test_a_kernel_without_the_newer_kinds_of_madvise() -> None:
    forbidden = [Forbidden("madvise", errno.EINVAL, 2, advice) for advice in (22, 23, 25)]
    found = doctor_child(prelude=forbidding(*forbidden))
    assert found["MADV_POPULATE"]["state"] == "warn" and "5.14" in found["MADV_POPULATE"]["advice"]
    assert found["MADV_COLLAPSE"]["state"] == "info" and "6.1" in found["MADV_COLLAPSE"]["advice"]
    if found["reserved huge pages"]["values"]["total_2048kB"] == 0:
        assert found["pages of a pool"]["state"] == "warn"
        assert found["pages of a pool"]["values"]["pages"] == "0% in 2 MiB pages (none)"
        assert "vm.nr_hugepages" in found["pages of a pool"]["advice"]


# --- memory ---


def test_memory_is_what_the_kernel_and_the_native_core_say() -> None:
    def look() -> Named:
        return by_name(memory_findings(Wanted()))

    def is_close(key: str, other: Callable[[], int]) -> Callable[[Named], bool]:
        return lambda found: abs(found["memory"]["values"][key] - other()) < CHANGING_BYTES

    agreed(look, is_close("available_bytes", lambda: meminfo("MemAvailable") * 1024))
    found = agreed(look, is_close("max_pool_bytes", available_to_a_pool))
    values = found["memory"]["values"]
    assert values["total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.gib(values["available_bytes"]) in found["memory"]["detail"]
    assert found["memory"]["state"] == ("pass" if values["max_pool_bytes"] >= GIB else "warn")
    overcommit = found["overcommit"]["values"]
    assert overcommit["mode"] == int(Path("/proc/sys/vm/overcommit_memory").read_text())
    assert abs(overcommit["commit_limit_bytes"] - meminfo("CommitLimit") * 1024) < MIB


def test_limits_are_those_of_the_process() -> None:
    found = by_name(memory_findings(Wanted()))
    for name, kind, key in (
        ("address space", resource.RLIMIT_AS, "limit_bytes"),
        ("locked memory", resource.RLIMIT_MEMLOCK, "limit_bytes"),
        ("open files", resource.RLIMIT_NOFILE, "soft_limit"),
    ):
        soft, hard = resource.getrlimit(kind)
        assert found[name]["values"][key] == (None if soft == resource.RLIM_INFINITY else soft)
    assert found["open files"]["values"]["hard_limit"] == (None if hard == resource.RLIM_INFINITY else hard)


def test_limits_that_are_lowered_are_noticed() -> None:
    prelude = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({64 * GIB}, {64 * GIB}))
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
"""
    found = doctor_child(prelude=prelude)
    space = found["address space"]
    assert space["state"] == "fail" and space["values"]["limit_bytes"] == 64 * GIB
    assert "64.0 GiB" in space["detail"] and "ulimit -v" in space["advice"]
    assert found["open files"]["state"] == "warn"
    assert found["open files"]["values"] == {"soft_limit": 500, "hard_limit": 600}
    assert found["locked memory"]["values"] == {"limit_bytes": 65536} and "64 KiB" in found["locked memory"]["detail"]
    # The native core agrees that there is no room, and that there would be.
    reserve = "from vllm_mc2._native import AddressRange; AddressRange({} << 30); sys.exit(5)"
    assert run_child(prelude=prelude + reserve.format(256)).returncode == 1
    assert run_child(prelude=prelude + reserve.format(32)).returncode == 5


def test_address_space_is_asked_for_only_where_it_is_needed() -> None:
    prelude = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({64 * GIB}, {64 * GIB}))"
    prefill = '{"kv_connector":"MC2Connector","kv_role":"kv_producer"}'
    assert doctor_child("--config", prefill, prelude=prelude)["address space"]["state"] == "info"
    own = prefill.replace("producer", "consumer").replace("}", ',"kv_connector_extra_config":{"window_pool_factor":4}}')
    found = doctor_child("--config", own, prelude=prelude)["address space"]
    assert found["state"] == "info" and "4 times" in found["detail"]


def test_a_real_control_group_with_a_limit() -> None:
    found = tightest_group()
    if found is None or not os.access(found.path, os.W_OK):
        pytest.skip("no memory control group that this user can make children of")
    group = found.path / f"mc2-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
        if not limit.exists():
            pytest.skip("the memory controller is not handed down here")
        limit.write_text(str(600 * MIB))
        prelude = f"""
import os
from pathlib import Path
Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
"""
        found_there = doctor_child(prelude=prelude)
        values = found_there["control group"]["values"]
        assert values["path"] == str(group) and values["limit_bytes"] == 600 * MIB
        assert 0 < values["used_bytes"] < 600 * MIB
        assert found_there["control group"]["state"] == found_there["memory"]["state"] == "warn"
        assert found_there["memory"]["values"]["max_pool_bytes"] <= 600 * MIB
        refused = run_child(prelude=prelude + "from vllm_mc2._native import Pool; Pool(1 << 46)").stderr
        native = int(re.search(r"(\d+) bytes available", refused)[1])  # type: ignore[index]
        assert abs(native - found_there["memory"]["values"]["max_pool_bytes"]) < 200 * MIB
    finally:
        group.rmdir()


def fake_group(directory: Path, limit: str, used: int, inactive: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_the_tightest_of_the_ancestors_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2, which this machine may not have."""
    (tmp_path / "self").write_text("0::/pod/container\n1:name=systemd:/x\n")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "self")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "cgroup")
    fake_group(tmp_path / "cgroup" / "pod" / "container", "max", 3 * GIB, GIB)
    found = tightest_group()
    assert found is not None and found.limit_bytes is None and found.used_bytes == 3 * GIB
    fake_group(tmp_path / "cgroup" / "pod", str(5 * GIB), 4 * GIB, GIB)
    found = tightest_group()
    assert found is not None and found.path.name == "pod" and found.headroom_bytes == 2 * GIB
    fake_group(tmp_path / "cgroup" / "pod" / "container", str(4 * GIB), 4 * GIB + 4096, 0)
    found = tightest_group()
    assert found is not None and found.path.name == "container" and found.headroom_bytes == 0
    named = by_name(memory_findings(Wanted()))
    assert named["control group"]["state"] == named["memory"]["state"] == "warn"
    assert named["memory"]["values"]["max_pool_bytes"] == 0
    # In a container the path may be the host's, and name nothing here.
    (tmp_path / "self").write_text("0::/on/the/host\n")
    assert tightest_group() is None
    assert by_name(memory_findings(Wanted()))["control group"]["state"] == "info"


# --- huge pages ---


def test_huge_pages_are_what_the_kernel_says() -> None:
    size = meminfo("Hugepagesize")
    names = {"total": "HugePages_Total", "free": "HugePages_Free", "promised": "HugePages_Rsvd"}

    def is_equal(found: Named) -> bool:
        values = found["reserved huge pages"]["values"]
        return all(values[f"{name}_{size}kB"] == meminfo(key) for name, key in names.items())

    found = agreed(lambda: by_name(huge_page_findings("auto")), is_equal)
    reserved = found["reserved huge pages"]["values"]
    assert len(reserved) == 3 * len(os.listdir("/sys/kernel/mm/hugepages"))
    transparent = found["transparent huge pages"]
    for key in ("enabled", "shmem_enabled"):
        chosen = Path(f"/sys/kernel/mm/transparent_hugepage/{key}").read_text().split("[")[1].split("]")[0]
        assert transparent["values"][key] == chosen and chosen in transparent["detail"]


def test_the_pages_are_those_of_a_real_pool() -> None:
    def is_like_another(found: Named) -> bool:
        finding = found["pages of a pool"]
        with Pool(PROBE_BYTES) as pool:
            is_same = (
                finding["values"]["pages"] == f"{pool.huge_bytes / pool.num_bytes:.0%} in 2 MiB pages ({pool.method})"
            )
            if is_same:
                assert finding["state"] == ("pass" if pool.huge_bytes == pool.num_bytes else "warn")
            return is_same

    agreed(lambda: by_name(huge_page_findings("auto")), is_like_another)


@needs_seccomp
def test_required_huge_pages_that_cannot_be_had_are_a_failure() -> None:
    config = '{"kv_connector":"MC2Connector","kv_role":"kv_both","kv_connector_extra_config":{"huge_pages":"require"}}'
    forbidden = [Forbidden("madvise", errno.EINVAL, 2, advice) for advice in (23, 25)]
    found = doctor_child("--config", config, prelude=forbidding(*forbidden))
    if found["reserved huge pages"]["values"]["total_2048kB"] > 0:
        pytest.skip("this machine has reserved huge pages")
    assert found["pages of a pool"]["state"] == "fail" and "'require'" in found["pages of a pool"]["detail"]
    off = doctor_child("--config", config.replace("require", "off"))["pages of a pool"]
    assert off["state"] == "info" and "4 KiB" in off["detail"]


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    def mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "mc2-" in line}

    kernel_findings(), memory_findings(Wanted()), huge_page_findings("auto")
    descriptors, mappings = open_descriptors(), mapped()
    for _ in range(3):
        kernel_findings(), memory_findings(Wanted()), huge_page_findings("auto")
    assert_none_new(descriptors)
    assert not mapped() - mappings


# --- software ---


def test_versions_and_the_contract() -> None:
    from vllm_mc2.connector.compat import check_contract

    found = by_name(software_findings())
    for name in PACKAGES:
        said = found["versions"]["values"][name]
        if said is None:
            with pytest.raises(ImportError):
                version(name)
        else:
            assert said == version(name) and f"{name} {said}" in found["versions"]["detail"]
    assert found["vLLM"]["detail"] == version("vllm") and found["vLLM"]["state"] == "pass"
    assert found["in place"]["values"]["missing"] == check_contract()
    assert found["in place"]["state"] == "pass"
    assert found["plugin"]["state"] == "pass"


def test_a_vllm_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.delattr(BlockPool, "touch")
    found = by_name(software_findings())["in place"]
    assert found["state"] == "info" and found["values"]["missing"] == ["BlockPool.touch('blocks',)"]
    assert "touch" in found["detail"]


def test_a_vllm_that_cannot_be_imported() -> None:
    found = doctor_child()
    assert found["vLLM"]["state"] == "fail" and version("vllm") in found["vLLM"]["detail"]


def test_the_environment_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    found = by_name(software_findings())
    assert found["plugin"]["state"] == "warn" and "--module-path" in found["plugin"]["advice"]
    assert "VLLM_CPU_KVCACHE_SPACE is not set" in found["CPU backend"]["detail"] and found["CPU backend"]["advice"]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv("VLLM_PLUGINS", "another,mc2")
    found = by_name(software_findings())
    assert found["plugin"]["state"] == "pass"
    assert "VLLM_CPU_KVCACHE_SPACE=2" in found["CPU backend"]["detail"] and not found["CPU backend"]["advice"]


# --- settings ---


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"kv_connector": "NixlConnector", "kv_role": "kv_both"}', "'NixlConnector': expected MC2Connector"),
        ('{"kv_connector": "MC2Connector"}', "kv_role is missing"),
        ('{"kv_connector": "MC2Connector", "kv_role": "prefill"}', "kv_role"),
        (
            '{"kv_connector":"MC2Connector","kv_role":"kv_both","kv_connector_extra_config":{"pull_threads":99}}',
            "pull_threads = 99: expected a whole number from 1 to 64",
        ),
        ('{"kv_connector":"MC2Connector","kv_role":"kv_both","kv_connector_extra_config":{"no":1}}', "no such key"),
        ('{"kv_connector":"MC2Connector","kv_role":"kv_both","kv_load_failure_policy":"no"}', "no"),
        ('{"kv_connector":"MultiConnector","kv_role":"kv_both"}', "0 MC2Connector"),
    ],
)
def test_a_configuration_that_an_engine_would_refuse(config: str, words: str) -> None:
    wanted, finding = read_settings(config)
    assert finding.state == "fail" and words in finding.detail and "vllm-mc2 config" in finding.advice
    assert wanted.config == Wanted().config


def test_a_configuration_that_an_engine_would_take(tmp_path: Path) -> None:
    inner = {"kv_connector": "MC2Connector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"mode": "pull"}}
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [other, inner]}}
    for config in (inner, outer):
        wanted, finding = read_settings(json.dumps(config))
        assert finding.state == "pass" and wanted.role == "kv_consumer" and wanted.config.mode == "pull"
    path = tmp_path / "kv.json"
    path.write_text(json.dumps(inner))
    assert "kv_consumer" in doctor_child("--config", f"@{path}")["configuration"]["detail"]
    assert run_child("doctor", "--config", f"@{path}.not").returncode == 2
