"""The socket directory, and who answers in it."""

import contextlib
import os
import secrets
import socket
import stat
from pathlib import Path

from vllm_mc2.channel import prepare_socket_dir
from vllm_mc2.cli.inspect import look
from vllm_mc2.cli.output import shown
from vllm_mc2.cli.tables import Findings, count
from vllm_mc2.config import SOCKET_NAME_BYTES, SUN_PATH_MAX_BYTES, MC2Config
from vllm_mc2.errors import ConfigError
from vllm_mc2.findings import Finding, State, Value
from vllm_mc2.inspection import EngineReport
from vllm_mc2.protocol import PROTOCOL_VERSION

NAME = "socket directory"
MAX_PATH_BYTES = SUN_PATH_MAX_BYTES - SOCKET_NAME_BYTES
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "ceph", "lustre", "fuse", "9p", "beegfs", "gpfs")
_OWN = "run as that user, or set socket_dir to a directory of your own, on both sides"


def socket_findings(socket_dir: str | None, config: MC2Config) -> list[Finding]:
    """``socket_dir`` is the command line's, and comes before that of ``config``."""
    origin = "--socket-dir" if socket_dir is not None else "--config" if config.socket_dir is not None else ""
    if socket_dir is not None:
        config = MC2Config(socket_dir=os.fspath(Path(socket_dir).expanduser().absolute()))
    try:
        path = config.resolve_socket_dir()
    except ConfigError as error:
        advice = f"a shorter socket_dir, on both sides: at most {MAX_PATH_BYTES} bytes, for a Unix socket's path"
        return [Finding(NAME, "fail", shown(str(error)), advice)]
    finding = _directory(path, origin or _default_origin())
    findings = [finding]
    if not origin:
        findings += _other_default(path)
    if finding.state == "fail":
        return findings
    try:
        return [*findings, *_answers(path, look(path))]
    except (ConfigError, OSError) as error:
        return [*findings, Finding("engines", "fail", shown(str(error)), f"look at {shown(path)}")]


def _default_origin() -> str:
    return "$XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "the default without $XDG_RUNTIME_DIR"


def _directory(path: Path, origin: str) -> Finding:
    values: dict[str, Value] = {
        "path": shown(path),
        "path_bytes": len(os.fsencode(path)),
        "max_path_bytes": MAX_PATH_BYTES,
        "exists": os.path.lexists(path),
        "filesystem": filesystem_of(path),
    }
    if not values["exists"]:
        return _not_there(path, origin, values)
    info = path.lstat()
    values |= {"uid": info.st_uid, "mode": f"{stat.S_IMODE(info.st_mode):04o}"}
    try:
        prepare_socket_dir(path)  # which is there, so that this only looks
    except ConfigError as error:
        return Finding(NAME, "fail", shown(str(error)), _advice(path, info), values)
    except OSError as error:
        return Finding(NAME, "fail", f"{shown(path)}: {error.strerror}", _advice(path, info), values)
    try:
        _try_socket(path)
    except OSError as error:
        text = f"{shown(path)}: no socket can be made there: {error.strerror}"
        return Finding(
            NAME, "fail", text, "set socket_dir to a directory where sockets can be made, on both sides", values
        )
    text = f"{shown(path)} ({origin}), of uid {info.st_uid}, mode {values['mode']}, on {values['filesystem']}"
    if str(values["filesystem"]).startswith(_NETWORK_FILESYSTEMS):
        advice = "a directory of this host: sockets do not lead to other hosts"
        return Finding(NAME, "warn", text, advice, values)
    return Finding(NAME, "pass", text, values=values)


def _not_there(path: Path, origin: str, values: dict[str, Value]) -> Finding:
    parent = next(each for each in path.parents if each.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        advice = f"set socket_dir to a directory of your own, on both sides, or let this user write to {shown(parent)}"
        return Finding(
            NAME, "fail", f"{shown(path)} does not exist and cannot be made in {shown(parent)}", advice, values
        )
    return Finding(
        NAME, "info", f"{shown(path)} ({origin}) does not exist yet; the first engine makes it", values=values
    )


def _advice(path: Path, info: os.stat_result) -> str:
    if not stat.S_ISDIR(info.st_mode):
        return "remove it, or set socket_dir to a directory, on both sides"
    if info.st_uid != os.geteuid():
        return _OWN
    return f"chmod 700 {shown(path)}"


def _try_socket(directory: Path) -> None:
    """Make a socket as an engine does, by a name that engines sweep away if we are killed right here."""
    path = directory / f"{secrets.token_hex(8)}.new"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.fspath(path))
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def filesystem_of(path: Path) -> str:
    """The kind of the file system that ``path`` is on, or would be: the last of the mounts with the longest mount point."""
    found, longest = "?", -1
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode().decode("unicode_escape")  # blanks are \040 there
        if path.is_relative_to(point) and len(point) >= longest:
            found, longest = after.split(" ")[0], len(point)
    return found


def other_defaults() -> list[Path]:
    """Where engines of this user meet without ``XDG_RUNTIME_DIR``, and usually with it."""
    uid = os.getuid()
    return [Path(f"/tmp/vllm-mc2-{uid}"), Path(f"/run/user/{uid}/vllm-mc2")]  # noqa: S108


def _other_default(path: Path) -> list[Finding]:
    """Engines that were started in another environment, and therefore meet elsewhere."""
    findings = []
    for other in other_defaults():
        if other == path:
            continue
        try:
            seen = look(other)
        except (ConfigError, OSError):
            continue  # not a directory of ours; nobody of ours can be there
        if seen.engines:
            text = f"{count(len(seen.engines), 'engine')} in {shown(other)}, which those in {shown(path)} do not meet"
            advice = "start both sides with the same XDG_RUNTIME_DIR, or with the same socket_dir"
            findings.append(Finding("another directory", "warn", text, advice, {"path": shown(other)}))
    return findings


# --- who answers ---


def _answers(path: Path, seen: Findings) -> list[Finding]:
    findings = [_summary(path, seen), *(_engine(engine) for engine in seen.engines)]
    if seen.stale:
        text = f"{', '.join(seen.stale)}: of processes that were killed"
        advice = "nothing: the next engine to start removes them"
        findings.append(Finding("stale sockets", "warn", text, advice, {"sockets": seen.stale}))
    for each in seen.unanswered:
        is_version = each.reason.startswith("refused: protocol")
        advice = (
            "the same version of vllm-mc2 on both sides, and for this command"
            if is_version
            else "its process is stopped, hangs, or is no engine; ss -xlp says which it is"
        )
        text = f"{each.socket}: {each.reason}"
        findings.append(Finding(f"socket {each.socket[:8]}", "fail", text, advice, {"socket": each.socket}))
    return findings


def _summary(path: Path, seen: Findings) -> Finding:
    counts = {role: sum(engine.role == role for engine in seen.engines) for role in ("prefill", "decode", "both")}
    values: dict[str, Value] = {**counts, "workers": len(seen.workers), "protocol": PROTOCOL_VERSION}
    if not seen.engines:
        return Finding("engines", "info", f"none answers in {shown(path)}", values=values)
    text = ", ".join(f"{number} {role}" for role, number in counts.items() if number)
    text += f", {count(len(seen.workers), 'worker')} answer, of protocol {PROTOCOL_VERSION}"
    return Finding("engines", "pass", text, values=values)


def _engine(engine: EngineReport) -> Finding:
    name = f"{engine.role} {engine.engine_id[:8]}"
    values: dict[str, Value] = {
        "engine_id": engine.engine_id,
        "role": engine.role,
        "pid": engine.pid,
        "off_reason": engine.off_reason,
        "attach_off": engine.attach_off,
    }
    if engine.off_reason:
        text = f"pid {engine.pid}: hand-off is off: {engine.off_reason}"
        return Finding(name, "fail", text, "docs/ways.md has what can be handed over", values)
    failed = [peer for peer in engine.peers if peer.state == "failed"]
    values["failed_peers"] = [f"{peer.engine_id or peer.incarnation}: {peer.reason}" for peer in failed]
    if failed:
        text = f"pid {engine.pid}: {len(failed)} of {count(engine.num_peers, 'peer')} failed: {failed[0].reason}"
        return Finding(
            name, "warn", text, "docs/how-it-works.md explains each reason, this engine's log has the details", values
        )
    state: State = "info" if engine.attach_off else "pass"
    text = f"pid {engine.pid}, hand-off is on"
    if engine.role != "decode":
        text += f", {count(engine.num_leases, 'lease')}, {count(engine.num_decodes, 'decode')}"
        text += f", for other hosts at {engine.listens_at}" if engine.listens_at else ""
    if engine.role != "prefill":
        text += f", {count(engine.num_peers, 'peer')}"
    if engine.attach_off:
        text += f"; blocks are copied: {engine.attach_off}"
    return Finding(name, state, text, values=values)
