"""Which packages are here, and whether vLLM finds this one and has what it needs."""

import importlib.metadata
import os

from vllm_mc2.findings import Finding, Value

PACKAGES = (
    "vllm-mc2",
    "vllm",
    "torch",
    "msgspec",
    "nanobind-backend",
    "mooncake-transfer-engine-non-cuda",
)
PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "mc2"


def software_findings() -> list[Finding]:
    """Versions, and what comes of them."""
    return [_versions(), *_vllm(), _plugin()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Finding:
    found: dict[str, Value] = {name: _version(name) for name in PACKAGES}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    return Finding("versions", "info", text, values=found)


def _vllm() -> list[Finding]:
    """The vLLM that is here, and whether it is what :mod:`vllm_mc2.connector.compat` expects."""
    version = _version("vllm")
    if version is None:
        text = "not here; the tensor API and this command do without"
        return [Finding("vLLM", "info", text, 'pip install "vllm-mc2[vllm]"')]
    values: dict[str, Value] = {"version": version}
    try:
        from vllm_mc2.connector.compat import check_contract
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        advice = "repair the installation of vllm, or see README.md for the versions that were tried"
        return [Finding("vLLM", "fail", f"{version} cannot be imported: {error}", advice, values)]
    missing = check_contract()
    findings = [Finding("vLLM", "pass", version, values=values)]
    contract: dict[str, Value] = {"missing": missing}
    if missing:
        text = f"blocks are copied with this vLLM, which lacks {', '.join(missing)}"
        findings.append(Finding("in place", "info", text, values=contract))
    else:
        text = "this vLLM has all that attach needs on host memory"
        findings.append(Finding("in place", "pass", text, values=contract))
    if "cpu" in version.partition("+")[2]:
        findings.append(_cpu_backend())
    return findings


def _cpu_backend() -> Finding:
    """A CPU build of vLLM takes a share of the whole host's memory unless told otherwise, and so does the other server."""
    names = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    values: dict[str, Value] = {name: os.environ.get(name) for name in names}
    text = ", ".join(f"{name}={value}" if value else f"{name} is not set" for name, value in values.items())
    advice = ""
    if not values["VLLM_CPU_KVCACHE_SPACE"]:
        advice = (
            "with two servers on this host, give both a size: --kv-cache-memory-bytes, or VLLM_CPU_KVCACHE_SPACE in GiB"
        )
    return Finding("CPU backend", "info", text, advice, values)


def _plugin() -> Finding:
    """Whether ``"kv_connector": "MC2Connector"`` means something to vLLM."""
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    chosen = os.environ.get("VLLM_PLUGINS")
    values: dict[str, Value] = {"is_installed": bool(found), "VLLM_PLUGINS": chosen}
    if not found:
        text = f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}: vLLM does not know the connector by its name"
        return Finding("plugin", "fail", text, "pip install vllm-mc2 into the environment of vllm", values)
    if chosen is not None and PLUGIN_NAME not in chosen.split(","):
        advice = f"add {PLUGIN_NAME} to VLLM_PLUGINS, or use vllm-mc2 config --module-path"
        return Finding("plugin", "warn", f"VLLM_PLUGINS={chosen} keeps it from loading", advice, values)
    return Finding("plugin", "pass", "vLLM loads it when it starts", values=values)
