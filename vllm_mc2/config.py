"""``kv_connector_extra_config``, parsed once into a frozen struct.

Every key has a default that works for one prefill and one decode server on one host. An unknown key, a
wrong type or a value out of range fails at start and names the key, the value and what is allowed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_mc2.errors import ConfigError

SUN_PATH_MAX_BYTES = 107
"""Longest path a Unix socket can be bound to on Linux (unix(7): 108 with the terminating zero)."""

SOCKET_NAME_BYTES = 22
"""A slash and our socket file names: 16 hex digits and ``.sock``."""

SECRET_VARIABLE = "MC2_TCP_SECRET"  # noqa: S105
MIN_SECRET_BYTES = 16
MAX_SECRET_CHARS = 4096


class MC2Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the connector; the docstring of each field is its documentation."""

    mode: Literal["auto", "attach", "pull"] = "auto"
    """``attach``: decode uses prefill's blocks in place, and computes a prompt itself where that cannot be. ``pull``: decode
    copies the blocks into its own cache, and releases them at once. ``auto``: attach where it can, pull where it cannot. On
    prefill, ``pull`` asks every decode to copy, and ``attach`` never does."""

    pull_threads: Annotated[int, Meta(ge=1, le=64)] = 4
    """Decode: how many threads of each worker copy at a time; never more than there are processors. On NPUs: over how many
    streams."""

    socket_dir: str | None = None
    """Directory of the Unix sockets through which peers on this host meet. Must be shared by prefill and decode.
    It is made with mode 0700; one that others may enter is refused. Default: ``$XDG_RUNTIME_DIR/vllm-mc2``,
    or ``/tmp/vllm-mc2-<uid>`` without one."""

    window_pool_factor: Annotated[float, Meta(ge=0.0, le=1024.0)] | None = None
    """Decode: address space kept for peers' pools, as a multiple of decode's own KV cache. Address space only, no memory.
    All peers that are attached at the same time must fit; one that does not is not attached. Default: 8, and at least 256 GiB."""

    huge_pages: Literal["auto", "off", "require"] = "auto"
    """Prefill: 2 MiB pages for the KV pool. ``auto`` uses what the host offers (reserved huge pages, shared-memory THP,
    or ``MADV_COLLAPSE``), ``require`` refuses to start without, ``off`` uses 4 KiB pages."""

    prefault: bool = True
    """Decode: fill in the page tables of a peer's pool in the background right after mapping it."""

    num_lease_slots: Annotated[int, Meta(ge=1, le=65536)] = 1024
    """Prefill: how many hand-offs can be outstanding at once. Beyond it a request gets no ticket, and decode computes it."""

    max_lent_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.75
    """Prefill: the share of its KV cache that may be lent out for use in place. Beyond it decodes are asked to copy and to give
    back at once (``mode``), for as long as a request of ``--max-model-len`` still fits beside what is lent; beyond that a request
    gets no ticket, decode computes it, and prefill keeps serving."""

    offer_timeout_seconds: Annotated[float, Meta(gt=0.0, le=86400.0)] = 60.0
    """Prefill: how long a ticket that nobody claims keeps its blocks."""

    handshake_timeout_seconds: Annotated[float, Meta(gt=0.0, le=600.0)] = 10.0
    """Decode: how long requests wait for a new peer to answer and its pool to be mapped."""

    tcp_address: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    """For peers on other hosts: this host's own address or name. Prefill listens on it, for those who know the secret, and
    its tickets name it. Decode tells its transfer engine (default: the address from where it reaches the peer). Never a
    wildcard such as ``0.0.0.0``."""

    tcp_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Prefill: the port at ``tcp_address``; 0 is any free one. With data parallel, rank ``n`` listens ``n`` ports above."""

    tcp_secret_file: str | None = None
    """File with the secret that prefills and decodes of all hosts share, at least 16 characters (``openssl rand -hex 32``),
    which only its owner may read. Else the environment's ``MC2_TCP_SECRET``, else ``tcp_secret``; without a secret
    no peer on another host is talked to."""

    tcp_secret: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """The secret itself. vLLM prints its configuration when it starts, this key included: better a file."""

    tcp_timeout_seconds: Annotated[float, Meta(ge=0.5, le=3600.0)] = 10.0
    """A peer on another host that is not heard of for so long is taken for gone."""

    npu_attach: bool = False
    """Ascend: ask the NPU at start whether a kernel can read own and another process's memory through one block table, which
    CANN's documentation rules out, and say what came of it. Blocks are copied in any case so far: no vllm-ascend lets a connector
    place its KV cache. See ``docs/ascend.md``."""

    model_identity: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """What says that both sides run the same weights. Default: the model's name and revision as given to ``vllm serve``.
    Set it to the same text on both sides when they load the same weights from different paths."""

    report_in_response: bool = False
    """Decode: add what was attached to the ``kv_transfer_params`` of each response. For demonstrations and tests."""

    def resolve_socket_dir(self) -> Path:
        """The socket directory as an absolute path.

        Raises:
            ConfigError: the path is relative, or too long for a Unix socket.
        """
        if self.socket_dir is None:
            runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
            path = Path(runtime_dir) / "vllm-mc2" if runtime_dir else Path(f"/tmp/vllm-mc2-{os.getuid()}")  # noqa: S108
        else:
            path = _path("socket_dir", self.socket_dir)
        if not path.is_absolute():
            raise ConfigError(wrong_value("socket_dir", str(path), "an absolute path"))
        longest = SUN_PATH_MAX_BYTES - SOCKET_NAME_BYTES
        if len(os.fsencode(path)) > longest:
            raise ConfigError(wrong_value("socket_dir", str(path), f"a path of at most {longest} bytes"))
        return path

    def resolve_tcp_secret(self) -> bytes | None:
        """The secret that is shared with other hosts, or None: then TCP is off.

        Raises:
            ConfigError: the file cannot be read or others may read it, or the secret is too short. Never shows the secret.
        """
        origin, text = "tcp_secret", self.tcp_secret
        if self.tcp_secret_file is not None:
            origin, text = "tcp_secret_file", _read_secret(_path("tcp_secret_file", self.tcp_secret_file))
        elif SECRET_VARIABLE in os.environ:
            origin, text = SECRET_VARIABLE, os.environ[SECRET_VARIABLE]
        if text is None:
            return None
        try:
            secret = text.strip().encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{origin}: expected text that UTF-8 can say"
            ) from None  # the error itself shows the secret
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"{origin}: a secret of {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}")
        return secret


def _path(key: str, text: str) -> Path:
    """JSON can say more than a path can be: zeros, and halves of surrogate pairs."""
    try:
        is_path = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise ConfigError(wrong_value(key, text, "a path"))
    return Path(text)


def _read_secret(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"tcp_secret_file {path}: others may read or write it, expected mode 0600")
        with path.open() as file:
            return file.read(MAX_SECRET_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(wrong_value("tcp_secret_file", str(path), f"a readable file of text ({error})")) from error


def wrong_value(key: str, value: object, allowed: str) -> str:
    """What a :class:`ConfigError` says of a key."""
    try:
        # A mistyped key has the secret as well.
        shown = "(not shown)" if "secret" in key and key != "tcp_secret_file" else repr(value)
    except RecursionError:
        shown = "(nested too deeply)"
    return f"kv_connector_extra_config.{key} = {shown}: expected {allowed}"


def allowed(key: str) -> str:
    """What a key accepts, in words, from its type: msgspec names the violated bound but not the whole range."""
    field = next(field for field in msgspec.structs.fields(MC2Config) if field.encode_name == key)
    kind = msgspec.inspect.type_info(field.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        kind = next(part for part in kind.types if not isinstance(part, msgspec.inspect.NoneType))
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(repr(value) for value in values)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case msgspec.inspect.FloatType(gt=above, ge=low, le=high):
            return f"a number above {above} and up to {high}" if low is None else f"a number from {low} to {high}"
        case _:
            return "a text"


def parse_config(extra: Mapping[str, object]) -> MC2Config:
    """Turn ``kv_connector_extra_config`` into an :class:`MC2Config`.

    Raises:
        ConfigError: unknown key, wrong type or range; the message names the key, the value and what is allowed.
    """
    known = MC2Config.__struct_encode_fields__
    for key in extra:
        if key not in known:
            raise ConfigError(wrong_value(key, extra[key], f"no such key; known keys: {', '.join(sorted(known))}"))
    for key, value in extra.items():
        # One key at a time, so that the message can name the key and its value.
        try:
            msgspec.convert({key: value}, MC2Config, strict=True)
        except (msgspec.ValidationError, UnicodeError):  # half of a surrogate pair fails before it is compared
            raise ConfigError(wrong_value(key, value, allowed(key))) from None
    config = msgspec.convert(dict(extra), MC2Config, strict=True)
    config.resolve_socket_dir()
    config.resolve_tcp_secret()
    return config
