"""Prefill, decode and proxy as the deployment files describe them, in one shape for compose and Kubernetes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KINDS = ("compose", "one-pod", "two-pods")
ROLES = ("prefill", "decode", "proxy")

COMPOSE_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
KUBERNETES_VARIABLE = re.compile(r"\$\((\w+)\)")
SECONDS = {"s": 1, "m": 60}
UNITS = {"m": 2**20, "g": 2**30, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class Mount:
    """Where something is mounted. Equal sources are the same storage for every container of the host."""

    path: str
    source: str
    writable: bool


@dataclass
class Container:
    """What one of the three containers is."""

    role: str
    image: str
    argv: list[str]
    environment: dict[str, str]
    mounts: list[Mount]
    user: str
    grace_seconds: float
    memory_bytes: int
    confined: dict[str, Any]
    probed: set[tuple[int, str]]
    """Ports and paths that say whether it lives."""
    answers: set[str] = field(default_factory=set)
    """What others reach it by: host and port."""


Pair = dict[str, Container]


def documents(folder: Path) -> list[dict[str, Any]]:
    """Every resource of a kustomization's folder, as written there."""
    settings = kustomization(folder)
    paths = [folder / name for name in settings["resources"]]
    return [resource for path in paths for resource in yaml.safe_load_all(path.read_text())]


def kustomization(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return loaded


def load(deploy: Path, kind: str) -> Pair:
    """The pair of one kind of deployment, with every variable at its default."""
    if kind == "compose":
        return {container.role: container for container in _compose(deploy / "compose.yaml")}
    return {container.role: container for container in _kubernetes(deploy / "kubernetes" / kind)}


def compose_file(path: Path) -> dict[str, Any]:
    """A compose file with every variable at its default, as `docker compose config` would fill it in."""

    def default(match: re.Match[str]) -> str:
        assert match[2] is not None, f"{match[0]} has no default"
        return match[2]

    loaded: dict[str, Any] = yaml.safe_load(COMPOSE_VARIABLE.sub(default, path.read_text()))
    return loaded


def quantity(text: object) -> int:
    """Bytes of `6g` or `6Gi`."""
    match = re.fullmatch(r"(\d+)([mg]|[MG]i)", str(text))
    assert match, f"{text!r} is no size"
    return int(match[1]) * UNITS[match[2]]


def _seconds(text: str) -> float:
    return float(text[:-1]) * SECONDS[text[-1]]


def _compose(path: Path) -> Iterator[Container]:
    services = compose_file(path)["services"]
    for role, service in services.items():
        probe = " ".join(service["healthcheck"]["test"])
        mounts = [_bind(volume) for volume in service.get("volumes", [])]
        mounts += [Mount(entry.partition(":")[0], f"tmpfs of {role}", True) for entry in service.get("tmpfs", [])]
        yield Container(
            role=role,
            image=service["image"],
            argv=[str(part) for part in service["command"]],
            environment={name: str(value) for name, value in service.get("environment", {}).items()},
            mounts=mounts,
            user=str(service["user"]),
            grace_seconds=_seconds(service["stop_grace_period"]),
            memory_bytes=quantity(service["mem_limit"]),
            confined={
                "read-only root": service.get("read_only") is True,
                "no capabilities": service.get("cap_drop") == ["ALL"] and not service.get("cap_add"),
                "no new privileges": service.get("security_opt") == ["no-new-privileges:true"],
                "not privileged": not service.get("privileged"),
                "own namespaces": not {"pid", "ipc", "network_mode", "userns_mode"} & service.keys(),
            },
            probed={(int(port), path) for port, path in re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", probe)},
            # Every service is known to the others by its name, on all of its ports.
            answers={f"{role}:{port}" for port in _listens(service["command"])},
        )


def _bind(volume: str) -> Mount:
    source, path, *options = volume.split(":")
    return Mount(path, source, "ro" not in options)


def _listens(argv: list[Any]) -> list[str]:
    return [part.partition("=")[2] for part in map(str, argv) if part.startswith("--port=")]


def _kubernetes(folder: Path) -> Iterator[Container]:
    resources = documents(folder)
    settings = kustomization(folder)
    (generated,) = settings["configMapGenerator"]
    literals = dict(literal.split("=", 1) for literal in generated["literals"])
    tags = {image["name"]: image["newTag"] for image in settings["images"]}
    services = [resource for resource in resources if resource["kind"] == "Service"]
    for deployment in (resource for resource in resources if resource["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]
        reached = _reached(pod, services)
        for container in pod["spec"]["containers"]:
            known = _from_config_map(container, generated["name"], literals)
            yield _container(container, pod["spec"], deployment["metadata"]["name"], tags, known, reached)


def _container(
    container: dict[str, Any],
    pod: dict[str, Any],
    owner: str,
    tags: Mapping[str, str],
    known: dict[str, str],
    reached: set[str],
) -> Container:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    own, general = container["securityContext"], pod["securityContext"]
    one_pod = len(pod["containers"]) > 1
    local = {f"127.0.0.1:{port}" for port in ports.values()} if one_pod else set()
    return Container(
        role=container["name"],
        image=f"{container['image']}:{tags[container['image']]}",
        argv=[_expand(str(part), known) for part in [*container["command"], *container["args"]]],
        environment={**known, **{entry["name"]: str(entry.get("value", "")) for entry in container.get("env", [])}},
        mounts=[
            Mount(mount["mountPath"], _source(owner, volumes[mount["name"]]), not mount.get("readOnly"))
            for mount in container.get("volumeMounts", [])
        ],
        user=f"{general['runAsUser']}:{general['runAsGroup']}",
        grace_seconds=pod["terminationGracePeriodSeconds"],
        memory_bytes=quantity(container["resources"]["limits"]["memory"]),
        confined={
            "read-only root": own.get("readOnlyRootFilesystem") is True,
            "no capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "no new privileges": own.get("allowPrivilegeEscalation") is False,
            "not privileged": not own.get("privileged") and general.get("runAsNonRoot") is True,
            "one user": not {"runAsUser", "runAsGroup"} & own.keys(),
            "own namespaces": not any(pod.get(key) for key in ("hostPID", "hostIPC", "hostNetwork")),
            "system calls": general.get("seccompProfile") == {"type": "RuntimeDefault"},
        },
        probed={(ports.get(probe["port"], 0), probe["path"]) for probe in probes},
        answers=local | {address for address in reached if int(address.rpartition(":")[2]) in ports.values()},
    )


def _source(owner: str, volume: dict[str, Any]) -> str:
    """A node's folder is one for all Pods of the node; any other volume here lives and dies with its Pod."""
    if "hostPath" in volume:
        return f"node:{volume['hostPath']['path']}"
    assert "emptyDir" in volume, volume
    return f"{owner}:{volume['name']}"


def _from_config_map(container: dict[str, Any], name: str, literals: Mapping[str, str]) -> dict[str, str]:
    named = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
    assert named in ([], [name]), f"{container['name']}: {named} is not the generated {name}"
    return dict(literals) if named else {}


def _expand(text: str, known: Mapping[str, str]) -> str:
    # As the kubelet does: what is not known stays as it is.
    return KUBERNETES_VARIABLE.sub(lambda match: known.get(match[1], match[0]), text)


def _reached(pod: dict[str, Any], services: list[dict[str, Any]]) -> set[str]:
    """`service:port` of the services that lead to this Pod, where the port leads to the container's of the same number."""
    labels = pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for c in pod["spec"]["containers"] for port in c["ports"]}
    return {
        f"{service['metadata']['name']}:{port['port']}"
        for service in services
        if service["spec"]["selector"].items() <= labels
        for port in service["spec"]["ports"]
        if ports.get(port["targetPort"]) == port["port"]
    }
