"""What there is of Ascend on this machine, and how a KV cache would be shared: for ``vllm-mc2 doctor``.

Everything is asked of the libraries that are installed; nothing is guessed from names or versions. Looks at devices, allocates a
few MiB on one, and gives it back.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from vllm_mc2.errors import DeviceError
from vllm_mc2.findings import Finding

PROBE_BYTES = 4 << 20
TOGETHER = {"vllm-ascend": "0.23.0", "vllm": "0.23.0", "torch-npu": "2.10.0", "CANN": "9.1.0"}
"""What vllm-ascend 0.23 names as its own; see docs/ascend.md."""

_LINKS = {0x1: "HCCS", 0x2: "PIX", 0x4: "PIB", 0x8: "PHB", 0x10: "SYS", 0x20: "SIO", 0x40: "HCCS_SW"}
"""Bits of ``aclrtGetDevicesTopo``."""
_OPTIONAL = (
    "aclrtMemGetAddressRange",
    "aclrtMemRetainAllocationHandle",
    "aclrtMemExportToShareableHandleV2",
    "aclrtMemImportFromShareableHandleV2",
    "aclrtIpcMemGetExportKey",
)
_SUPER_POD_ID = 405
"""``aclrtGetDeviceInfo``."""


def ascend_findings() -> list[Finding]:
    """Facts about this machine, and whether a KV cache on an NPU can be shared."""
    from vllm_mc2.ascend.acl import load_acl

    try:
        acl = load_acl()
    except DeviceError as error:
        is_wanted = importlib.util.find_spec("torch_npu") is not None
        advice = "install CANN and source its set_env.sh" if is_wanted else ""
        return [Finding("Ascend", "fail" if is_wanted else "info", f"NPUs cannot be used here: {error}", advice)]
    devices = _devices(acl)
    findings = [_versions(acl), _packages(), devices]
    missing = [name for name in _OPTIONAL if not acl.has(name)]
    if missing:
        findings.append(Finding("ACL calls", "info", f"not in this CANN: {', '.join(missing)}"))
    if devices.state != "fail":
        findings += _topology(acl)
        findings.append(_sharing(acl))
    return findings


def _versions(acl: Any) -> Finding:
    named = {package: acl.version(package) for package in ("runtime", "driver")}
    known = ", ".join(f"{package} {version}" for package, version in named.items() if version)
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or "unknown"
    driver = _driver_version_file()
    parts = [f"CANN at {home}", known or "its versions are not told", acl.soc_name() or "unknown SoC"]
    if driver:
        parts.append(f"driver package {driver}")
    return Finding("CANN and driver", "pass", "; ".join(parts))


def _driver_version_file() -> str:
    """What the driver's package says of itself, where it is installed in the usual place and mounted here."""
    path = Path("/usr/local/Ascend/driver/version.info")
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.split("=", 1)[1].strip() for line in lines if line.startswith("Version=")), "")


def _packages() -> Finding:
    found = {}
    for name in ("vllm-ascend", "vllm", "torch-npu", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    others = [
        name
        for name, version in TOGETHER.items()
        if name in found and not found[name].startswith(version) and name != "CANN"
    ]
    if not others:
        return Finding("packages", "pass", text)
    wanted = ", ".join(f"{name} {version}" for name, version in TOGETHER.items())
    return Finding("packages", "warn", text, f"what was read and tested for together: {wanted}")


def _devices(acl: Any) -> Finding:
    from vllm_mc2._native import AclError

    try:
        number = acl.num_devices()
    except AclError as error:
        return Finding("devices", "fail", str(error), "is the driver loaded, and are /dev/davinci* mounted here?")
    if number == 0:
        return Finding("devices", "fail", "none", "is the driver loaded, and are /dev/davinci* mounted here?")
    text = f"{number} NPU{'s' if number > 1 else ''}"
    pods = {pod for device in range(number) if (pod := acl.device_info(device, _SUPER_POD_ID)) is not None and pod >= 0}
    if pods:
        text += f", SuperPoD {', '.join(map(str, sorted(pods)))}"
    return Finding("devices", "pass", text)


def _topology(acl: Any) -> list[Finding]:
    number = acl.num_devices()
    if number == 1:
        return [Finding("topology", "info", "one NPU: prefill and decode would share it")]
    rows = []
    for device in range(number):
        links = []
        for other in range(number):
            if other != device:
                value = acl.topology(device, other)
                reach = acl.can_access_peer(device, other)
                link = "?" if value is None else "+".join(name for bit, name in _LINKS.items() if value & bit) or "none"
                links.append(f"{other}:{link}{'' if reach or reach is None else ' (no peer access)'}")
        rows.append(f"{device} -> {' '.join(links)}")
    return [Finding("topology", "info", " | ".join(rows))]


def _sharing(acl: Any) -> Finding:
    name = "sharing"
    if importlib.util.find_spec("torch_npu") is None:
        return Finding(name, "fail", "torch_npu is not installed", 'pip install "vllm-mc2[ascend]"')
    # vllm-ascend sets this unless somebody has chosen, and it decides which way there is.
    os.environ.setdefault("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    from vllm_mc2.ascend.sharing import share_storages

    try:
        import torch
        import torch_npu  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

        device = torch.npu.current_device()
        storage = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=f"npu:{device}").untyped_storage()
        shared = share_storages(acl, device, [storage])
    except (DeviceError, RuntimeError, ImportError) as error:
        return Finding(name, "fail", str(error), "see docs/ascend.md, what sharing needs")
    shared.close()
    allocator = os.environ["PYTORCH_NPU_ALLOC_CONF"]
    why = f"; not by {'; '.join(shared.passed_over)}" if shared.passed_over else ""
    return Finding(
        name, "pass", f"a KV cache would be shared by {shared.way} (PYTORCH_NPU_ALLOC_CONF={allocator}){why}"
    )
