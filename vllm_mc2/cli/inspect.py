"""``vllm-mc2 inspect``: ask every socket in the directory for its report, and show the answers.

Each socket gets :data:`ANSWER_SECONDS`, several at a time, whoever listens on it. What comes back is as little trusted as
anything a peer sends: it is decoded with bounds, descriptors are closed, and texts are cleaned before a terminal sees them.
"""

import argparse
import errno
import os
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_mc2 import channel
from vllm_mc2.cli.exits import NEGATIVE, OK, UNUSABLE, epilog
from vllm_mc2.cli.output import print_json, shown
from vllm_mc2.cli.tables import Findings, Unanswered, render
from vllm_mc2.config import MC2Config
from vllm_mc2.errors import ConfigError, PeerUnreachableError, ProtocolError
from vllm_mc2.inspection import EngineReport, WorkerReport
from vllm_mc2.protocol import PROTOCOL_VERSION, InspectHello, Refusal

ANSWER_SECONDS = 2.0
MAX_PARALLEL = 16
MIN_WATCH_SECONDS = 0.1
MAX_WATCH_SECONDS = 3600.0

_CLEAR = "\x1b[H\x1b[J"
_ROLES = ("prefill", "both", "decode")

_DESCRIPTION = """\
Shows the engines of this user on this host: their pools, the leases that prefill has given out and who holds them, the
window and the peers of decode. It only looks: no engine waits for it, and nothing changes because of it.
"""

_EXAMPLES = """\
examples:
  vllm-mc2 inspect                        once, as a table
  vllm-mc2 inspect --watch                again every second, until Ctrl-C
  vllm-mc2 inspect --json | jq '.engines[] | {role, lent_blocks, num_leases}'
  vllm-mc2 inspect --socket-dir /run/mc2  where "socket_dir" is set in kv_connector_extra_config

how to read a lease:
  offered    its ticket is out, no decode has claimed it yet
  held       decodes with these process ids read its blocks; REFS is 1 (prefill's own) and 1 for each claim
  released, expired, peer_gone
             over; an idle prefill takes the blocks back in its next step
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``inspect``."""
    parser = commands.add_parser(
        "inspect",
        help="show running engines, their pools, leases, peers and windows",
        description=_DESCRIPTION,
        epilog=epilog(
            _EXAMPLES, ok="somebody answered", negative="nobody is there", unusable="the directory cannot be used"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--socket-dir",
        metavar="DIR",
        help="the engines' socket_dir (default: $XDG_RUNTIME_DIR/vllm-mc2, or /tmp/vllm-mc2-UID without one)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as one JSON object")
    output.add_argument(
        "--watch",
        metavar="SECONDS",
        type=_watch_seconds,
        nargs="?",
        const=1.0,
        help="show the table again every SECONDS (default 1) until Ctrl-C",
    )
    parser.add_argument(
        "--rows",
        metavar="N",
        type=_num_rows,
        default=20,
        help="leases to show per engine, the oldest first (default 20)",
    )
    parser.set_defaults(run=run)


def _watch_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_WATCH_SECONDS <= seconds <= MAX_WATCH_SECONDS:
        raise argparse.ArgumentTypeError(f"expected {MIN_WATCH_SECONDS} to {MAX_WATCH_SECONDS:.0f} seconds, got {text}")
    return seconds


def _num_rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of leases, got {text}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Look once, or again and again; the exit code."""
    try:
        directory = resolve_directory(args.socket_dir)
        if args.watch is not None:
            return _watch(directory, args.watch, args.rows)
        findings = look(directory)
    except BrokenPipeError:
        raise  # our own output; the command's entry knows what to do
    except (ConfigError, OSError) as error:
        print(f"vllm-mc2 inspect: {error}", file=sys.stderr)
        return UNUSABLE
    if args.json:
        print_json(findings)
    elif not findings.is_empty:
        print(render(findings, args.rows))
    if findings.engines or findings.workers:
        return OK
    print(f"vllm-mc2 inspect: {_nobody(directory)}", file=sys.stderr)
    return NEGATIVE


def resolve_directory(socket_dir: str | None) -> Path:
    """The socket directory that was asked for, or the engines' default.

    Raises:
        ConfigError: too long for a Unix socket.
    """
    path = None if socket_dir is None else str(Path(socket_dir).expanduser().absolute())
    return MC2Config(socket_dir=path).resolve_socket_dir()


def _nobody(directory: Path) -> str:
    name = shown(directory)
    what = f"no engine answers in {name}" if directory.exists() else f"{name} does not exist"
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
            title = f"{shown(directory)}  {time.strftime('%H:%M:%S')}, every {seconds:g} s, Ctrl-C ends"
            print(f"{_CLEAR if sys.stdout.isatty() else ''}{title}\n\n{text}\n", flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return OK


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
        stale=[shown(path.name) for path, answer in zip(paths, answers, strict=True) if answer == "stale"],
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
        return (
            "gone" if error.errno == errno.ENOENT else Unanswered(shown(path.name), shown(error.strerror or str(error)))
        )
    except (ProtocolError, OSError) as error:
        return Unanswered(shown(path.name), shown(str(error)))


def ask(path: Path, timeout_seconds: float) -> EngineReport | WorkerReport:
    """One listener's report. Blocks up to the timeout.

    Raises:
        PeerUnreachableError: nobody listens there, or no answer in time.
        ProtocolError: it refused, or answered what the protocol does not allow.
        OSError: it did not take the question.
    """
    message = channel.ask(path, InspectHello(PROTOCOL_VERSION), timeout_seconds)
    if isinstance(message, Refusal):
        raise ProtocolError(f"refused: {message.field} is {message.theirs} there, {message.yours} here")
    if not isinstance(message, EngineReport | WorkerReport):
        raise ProtocolError(f"answered {type(message).__name__}")
    return message
