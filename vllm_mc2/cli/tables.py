"""What ``vllm-mc2 inspect`` prints: one section for each engine, at most 120 columns wide. Pure text, no I/O."""

from collections.abc import Sequence

import msgspec

from vllm_mc2.inspection import EngineReport, HolderRow, LeaseRow, PeerRow, WorkerReport

WIDTH = 120


class Unanswered(msgspec.Struct, frozen=True):
    """A socket on which somebody listens who gave no report."""

    socket: str
    reason: str


class Findings(msgspec.Struct, frozen=True):
    """Everything in one socket directory. This is the object that ``--json`` prints."""

    engines: list[EngineReport]
    workers: list[WorkerReport]
    stale: list[str]
    """Sockets of processes that were killed; the next engine to start removes them."""
    unanswered: list[Unanswered]

    @property
    def is_empty(self) -> bool:
        """Not even a socket."""
        return not (self.engines or self.workers or self.stale or self.unanswered)


def render(findings: Findings, num_rows: int) -> str:
    """The table, with at most ``num_rows`` leases for each engine."""
    sections = []
    left = list(findings.workers)
    for engine in findings.engines:
        workers = [worker for worker in left if _belongs(worker, engine)]
        left = [worker for worker in left if worker not in workers]
        sections.append(_section(engine, workers, num_rows))
    if left:
        lines = [f"  {_clean(worker.engine_id)}  {_worker(worker)}" for worker in left]
        sections.append(["workers whose engine gave no report", *lines])
    if findings.stale:
        sections.append([f"stale, removed when an engine starts: {', '.join(findings.stale)}"])
    if findings.unanswered:
        sections.append([f"no report from {each.socket}: {each.reason}" for each in findings.unanswered])
    return "\n\n".join("\n".join(_clip(line) for line in lines) for lines in sections)


def _belongs(worker: WorkerReport, engine: EngineReport) -> bool:
    return worker.engine_id == engine.engine_id and engine.pid in {worker.pid, worker.parent_pid}


def _section(engine: EngineReport, workers: Sequence[WorkerReport], num_rows: int) -> list[str]:
    role = "prefill and decode" if engine.role == "both" else engine.role
    lines = [f"{role} {engine.engine_id}  pid {engine.pid}, up {duration(engine.uptime_seconds)}"]
    if engine.off_reason:
        lines.append(f"  hand-off is off: {engine.off_reason}")
    if engine.attach_off:
        lines.append(f"  attach is off, blocks are copied: {engine.attach_off}")
    pool = f"  pool      {engine.num_blocks} blocks of {engine.block_size} tokens: "
    if engine.role != "decode":
        pool += f"{engine.lent_blocks} lent, "
    lines.append(f"{pool}{engine.free_blocks} free")
    lines += [f"  {_worker(worker)}" for worker in workers]
    if engine.role != "decode":
        lines += _leases(engine, num_rows)
    if engine.role != "prefill":
        lines += _peers(engine)
    return lines


def _worker(worker: WorkerReport) -> str:
    text = f"worker {worker.rank:<2} pid {worker.pid}, pool {_bytes(worker.pool_bytes)}, "
    text += f"{_bytes(worker.bytes_per_block)} a block, {worker.pages}"
    if worker.mapped:
        text += f"; maps {count(len(worker.mapped), 'pool')}, {_bytes(sum(each.num_bytes for each in worker.mapped))}"
    return text


def _leases(engine: EngineReport, num_rows: int) -> list[str]:
    decodes = ", ".join(f"{_pid(each.pid)} ({each.engine_id})" for each in engine.decodes) or "none connected"
    lines = [f"  network   listens for other hosts at {engine.listens_at}"] if engine.listens_at else []
    lines += [f"  decodes   {decodes}", f"  leases    {engine.num_leases}"]
    shown = sorted(engine.leases, key=lambda lease: -lease.age_seconds)[:num_rows]
    if shown:
        rows = [_lease(lease) for lease in shown]
        lines += _table(("LEASE", "STATE", "AGE", "TOKENS", "BLOCKS", "REFS", "HELD BY"), rows, left={0, 1, 6})
    if engine.num_leases > len(shown):
        lines.append(f"    and {engine.num_leases - len(shown)} younger ones; --rows N shows more")
    return lines


def _lease(lease: LeaseRow) -> tuple[str, ...]:
    holders = " ".join(_holder(holder) for holder in lease.holders if holder.claims) or "-"
    numbers = (duration(lease.age_seconds), str(lease.num_tokens), str(lease.num_blocks), str(lease.references))
    return lease.ticket, lease.state, *numbers, holders


def _holder(holder: HolderRow) -> str:
    return _pid(holder.pid) if holder.claims == 1 else f"{_pid(holder.pid)}*{holder.claims}"


def _peers(engine: EngineReport) -> list[str]:
    lines = []
    if engine.window is not None:
        window = engine.window
        lines.append(f"  window    {window.num_blocks} blocks from {window.base}: {window.free_blocks} free")
    lines.append(
        f"  borrowed  {count(engine.borrowed_blocks, 'block')} under {count(engine.loans, 'loan')}, "
        f"{count(engine.handoffs, 'request')} with a ticket"
    )
    lines.append(f"  peers     {engine.num_peers}")
    if engine.peers:
        rows = [_peer(peer) for peer in engine.peers]
        lines += _table(("PEER", "WHERE", "STATE", "WAY", "BASE", "BLOCKS", "LOANS", "ENGINE"), rows, left={0, 2, 3, 7})
    return lines


def _peer(peer: PeerRow) -> tuple[str, ...]:
    state = f"{peer.state}, gone" if peer.is_gone else f"{peer.state}: {peer.reason}" if peer.reason else peer.state
    base = str(peer.base) if peer.base >= 0 else "-"
    way = f"{peer.way} ({peer.way_reason})" if peer.way_reason else peer.way
    return (
        peer.incarnation[:16],
        peer.address or _pid(peer.pid),
        state,
        way,
        base,
        str(peer.num_blocks),
        str(peer.loans),
        peer.engine_id,
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: set[int]) -> list[str]:
    """Aligned columns, those in ``left`` to the left; ids of any length must not push the others apart."""
    cells = [head, *(tuple(_clean(cell)[:64] for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("    " + "  ".join(padded).rstrip())
    return lines


def duration(seconds: float) -> str:
    """``0.4s``, ``59.9s``, ``3m07s``, ``2h05m``, ``3d04h``."""
    if not 0 <= seconds < 1e10:
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def count(number: int, what: str) -> str:
    """``1 pool``, ``2 pools``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _bytes(count: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _pid(pid: int) -> str:
    return str(pid) if pid else "?"


def _clean(text: str) -> str:
    """Without what a terminal would obey: names come from other processes."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _clip(line: str) -> str:
    line = _clean(line)
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
