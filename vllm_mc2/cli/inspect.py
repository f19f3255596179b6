"""``vllm-mc2 inspect``: ask every socket in the directory for its report, and show the answers.

Each socket gets :data:`ANSWER_SECONDS`, several at a time, whoever listens on it. What comes back is as little trusted as
anything a peer sends: it is decoded with bounds, descriptors are closed, and texts are cleaned before a terminal sees them.
"""

import errno
import os
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from vllm_mc2.channel import Channel, close_all
from vllm_mc2.cli.tables import Findings, Unanswered, render
from vllm_mc2.config import MC2Config
from vllm_mc2.errors import ConfigError, PeerUnreachableError, ProtocolError
from vllm_mc2.inspection import EngineReport, WorkerReport
from vllm_mc2.protocol import PROTOCOL_VERSION, InspectHello, Refusal

ANSWER_SECONDS = 2.0
MAX_PARALLEL = 16

FOUND, NOBODY, UNUSABLE = 0, 1, 3
_CLEAR = "\x1b[H\x1b[J"
_ROLES = ("prefill", "both", "decode")


def run(socket_dir: str | None, *, as_json: bool, watch_seconds: float | None, num_rows: int) -> int:
    """Look once, or again and again; the exit code."""
    try:
        directory = _resolve(socket_dir)
        if watch_seconds is not None:
            return _watch(directory, watch_seconds, num_rows)
        findings = look(directory)
    except BrokenPipeError:
        raise  # our own output; the command's entry knows what to do
    except (ConfigError, OSError) as error:
        print(f"vllm-mc2 inspect: {error}", file=sys.stderr)
        return UNUSABLE
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    elif not findings.is_empty:
        print(render(findings, num_rows))
    if findings.engines or findings.workers:
        return FOUND
    print(f"vllm-mc2 inspect: {_nobody(directory)}", file=sys.stderr)
    return NOBODY


def _resolve(socket_dir: str | None) -> Path:
    path = None if socket_dir is None else str(Path(socket_dir).expanduser().absolute())
    return MC2Config(socket_dir=path).resolve_socket_dir()


def _nobody(directory: Path) -> str:
    what = f"no engine answers in {directory}" if directory.exists() else f"{directory} does not exist"
    return (
        f"{what}.\nIs a vLLM server with the MC2Connector running on this host, as this user? "
        "If its socket_dir is set, give that: --socket-dir DIR"
    )


def _watch(directory: Path, seconds: float, num_rows: int) -> int:
    """The table, again and again until Ctrl-C. Engines may come and go, so nobody there is no end."""
    try:
        while True:
            findings = look(directory)
            text = render(findings, num_rows) if not findings.is_empty else _nobody(directory)
            title = f"{directory}  {time.strftime('%H:%M:%S')}, every {seconds:g} s, Ctrl-C ends"
            print(f"{_CLEAR if sys.stdout.isatty() else ''}{title}\n\n{text}\n", flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return FOUND


def look(directory: Path) -> Findings:
    """What every socket in ``directory`` says; nothing when there is no such directory.

    Raises:
        ConfigError: it is not a directory, or belongs to somebody else.
        OSError: it cannot be read.
    """
    paths = [path for path in _entries(directory) if path.suffix == ".sock" and path.is_socket()]
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        answers = list(pool.map(_try_to_ask, paths))
    return Findings(
        engines=sorted(
            (answer for answer in answers if isinstance(answer, EngineReport)),
            key=lambda engine: (_ROLES.index(engine.role), engine.engine_id, engine.incarnation),
        ),
        workers=sorted(
            (answer for answer in answers if isinstance(answer, WorkerReport)),
            key=lambda worker: (worker.engine_id, worker.rank, worker.pid),
        ),
        stale=[path.name for path, answer in zip(paths, answers, strict=True) if answer == "stale"],
        unanswered=[answer for answer in answers if isinstance(answer, Unanswered)],
    )


def _entries(directory: Path) -> list[Path]:
    try:
        info = directory.lstat()
    except FileNotFoundError:
        return []
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{directory} is not a directory (links are not followed)")
    if info.st_uid != os.geteuid():
        raise ConfigError(f"{directory} belongs to uid {info.st_uid}, this process runs as {os.geteuid()}")
    return sorted(directory.iterdir())


def _try_to_ask(path: Path) -> EngineReport | WorkerReport | Unanswered | str:
    """The answer, or what came instead: ``stale``, or ``gone`` in the very moment."""
    try:
        return ask(path, ANSWER_SECONDS)
    except PeerUnreachableError as error:
        if error.errno == errno.ECONNREFUSED:
            return "stale"
        return "gone" if error.errno == errno.ENOENT else Unanswered(path.name, error.strerror or str(error))
    except (ProtocolError, OSError) as error:
        return Unanswered(path.name, str(error))


def ask(path: Path, timeout_seconds: float) -> EngineReport | WorkerReport:
    """One listener's report. Blocks up to the timeout.

    Raises:
        PeerUnreachableError: nobody listens there, or no answer in time.
        ProtocolError: it refused, or answered what the protocol does not allow.
        OSError: it did not take the question.
    """
    deadline = time.monotonic() + timeout_seconds
    with Channel.connect(path, timeout_seconds) as channel:
        channel.send(InspectHello(PROTOCOL_VERSION))
        message, fds = channel.receive(deadline - time.monotonic())
    close_all(fds)
    if isinstance(message, Refusal):
        raise ProtocolError(f"refused: {message.field} is {message.theirs} there, {message.yours} here")
    if not isinstance(message, EngineReport | WorkerReport):
        raise ProtocolError(f"answered {type(message).__name__}")
    return message
