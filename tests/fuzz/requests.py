"""Targets: what clients put into a request, and what an operator puts into the configuration. JSON, both of them."""

import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.fuzz.mutate import JSON
from tests.fuzz.target import Target, refused
from vllm_mc2.ascend.settings import AscendSettings, check_sizes, parse_foreign
from vllm_mc2.config import SECRET_VARIABLE, MC2Config, parse_config
from vllm_mc2.digest import PromptExtras, prompt_digest
from vllm_mc2.errors import ConfigError, TicketError
from vllm_mc2.network.secret import address_proof, is_proven
from vllm_mc2.protocol import PROTOCOL_VERSION, Ticket
from vllm_mc2.ticket import TICKET_KEY, TcpAddress, parse_address, parse_ticket, ticket_params

SECRET = b"correct horse battery staple"
INCARNATION = "1f" * 16
ADDRESS = TcpAddress("10.0.0.7", 4321)


def _object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in ``data`` as a web framework would hand it on."""
    try:
        value = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def run_ticket(data: bytes) -> str:
    """``kv_transfer_params`` of a decode's request. The address is where decode may connect: only what a proof covers."""
    params = _object(data)
    if params is None:
        return "not an object"
    address = parse_address(params)
    if address is not None:
        assert 0 < len(address.host) <= 255 and 0 < address.port < 65536 and str(address)
    try:
        ticket = parse_ticket(params)
    except TicketError as error:
        return f"{refused(error)} {address is None}"
    slot, generation = ticket.lease_id
    assert ticket.version == PROTOCOL_VERSION and len(ticket.token_bytes) == 16
    assert 0 <= slot < 1 << 32 and 0 <= generation < 1 << 32
    assert parse_ticket(ticket_params(ticket, "p", 1)) == ticket
    if address is None:
        return "ticket"
    proven = is_proven(SECRET, ticket.incarnation, address, ticket.address_proof)
    assert not proven or address_proof(SECRET, ticket.incarnation, address) == ticket.address_proof
    return f"ticket, {'proven' if proven else 'unproven'} address"


def ticket_seeds() -> Sequence[bytes]:
    """As prefill makes them, for this host and for another."""
    local = Ticket.issue(INCARNATION, 3, 7, bytes(range(16)))
    remote = Ticket(
        PROTOCOL_VERSION, INCARNATION, "00000001", "000000ff", "ab" * 16, address_proof(SECRET, INCARNATION, ADDRESS)
    )
    both = [ticket_params(local, "prefill", 1), ticket_params(remote, "prefill", 2, ADDRESS)]
    return [
        json.dumps(params).encode()
        for params in [*both, {}, {TICKET_KEY: None}, {TICKET_KEY: "x", "remote_host": "::1"}]
    ]


def _secret_file() -> str:
    # At once, whole and ours: other processes may be reading the one that is there.
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(SECRET_FILE), delete=False) as file:
        file.write("correct horse battery staple")
    os.replace(file.name, SECRET_FILE)
    return SECRET_FILE


SECRET_FILE = os.path.join(tempfile.gettempdir(), f"mc2-fuzz-secret-{os.getuid()}")


def _require_secrecy(extra: dict[str, Any], message: str) -> None:
    """A secret that is nothing else in the configuration as well is not in what is printed."""
    secret = extra.pop("tcp_secret", None)
    if isinstance(secret, str) and len(secret) >= 16 and secret not in json.dumps(extra, ensure_ascii=False):
        assert secret not in message, "the secret is shown"


def _refused_setting(error: ConfigError, extra: dict[str, Any], known: frozenset[str]) -> str:
    """The kind of the refusal: of which key, as far as there is such a key, and what was in its place."""
    key = str(error).partition("extra_config.")[2].partition(" ")[0].partition(".")[0]
    return f"{refused(error)} {key} {type(extra.get(key)).__name__}" if key in known else refused(error)


def run_config(data: bytes) -> str:
    """``kv_connector_extra_config``. It comes from whoever starts the server; mistakes must be told as such."""
    extra = _object(data)
    if extra is None:
        return "not an object"
    path = extra.get("tcp_secret_file")
    if (
        isinstance(path, str)
        and path != SECRET_FILE
        and "\0" not in path
        and not any("\ud800" <= c <= "\udfff" for c in path)
    ):
        extra["tcp_secret_file"] = (
            "/nonexistent/" + path[:50]
        )  # an operator may name any file; a fuzzer must not open it
    try:
        config = parse_config(extra)
    except ConfigError as error:
        _require_secrecy(dict(extra), str(error))
        return _refused_setting(error, extra, frozenset(MC2Config.__struct_fields__))
    assert isinstance(config, MC2Config) and config.resolve_socket_dir().is_absolute()
    assert config.tcp_timeout_seconds > 0 and 0 <= config.tcp_port < 65536
    return f"config of {min(4, len(extra))}, {config.resolve_tcp_secret() is None}"


def config_seeds() -> Sequence[bytes]:
    """Every key with a value that is allowed."""
    os.environ.pop(SECRET_VARIABLE, None)
    whole = {
        "mode": "pull", "pull_threads": 4, "socket_dir": "/tmp/mc2", "window_pool_factor": 8.0, "huge_pages": "off",
        "prefault": True, "num_lease_slots": 1024, "max_lent_fraction": 0.75, "offer_timeout_seconds": 60.0,
        "handshake_timeout_seconds": 10.0, "tcp_address": "10.0.0.1", "tcp_port": 0, "tcp_secret_file": _secret_file(),
        "tcp_secret": "0123456789abcdef0123", "tcp_timeout_seconds": 10.0, "npu_attach": False, "model_identity": "m",
        "report_in_response": True,
    }  # fmt: skip
    assert set(whole) == set(MC2Config.__struct_fields__), "a new key wants a seed"
    return [json.dumps(extra).encode() for extra in [{}, whole, *({key: value} for key, value in whole.items())]]


def run_foreign(data: bytes) -> str:
    """What configurations written for vllm-ascend hold, beside our own keys."""
    extra = _object(data)
    if extra is None:
        return "not an object"
    try:
        ours, theirs = parse_foreign(extra)
        check_sizes(theirs, "kv_producer", 2, 1, 1)
        check_sizes(theirs, "kv_both", 2, 1, 1)
    except ConfigError as error:
        return _refused_setting(error, extra, frozenset(AscendSettings.__struct_fields__))
    assert not set(ours) & {"prefill", "decode", "engine_id"} and set(ours) <= set(extra)
    for side in (theirs.prefill, theirs.decode):
        assert side is None or side.tp_size in {None, 2}
    return f"{theirs.prefill is None} {theirs.decode is None} {min(3, len(ours))}"


def foreign_seeds() -> Sequence[bytes]:
    """As in vllm-ascend's documentation."""
    sizes = {"tp_size": 2, "dp_size": 1, "pp_size": 1}
    whole = {
        "prefill": sizes, "decode": {**sizes, "pp_layer_partition": "30"}, "use_ascend_direct": True, "mode": "pull",
        "ascend_local_comm_res_path": "/x", "engine_id": "0", "mooncake_rpc_port": "0",
    }  # fmt: skip
    partitioned = {"prefill": {"pp_size": 2, "pp_layer_partition": "30,31"}, "mooncake_rpc_port": 5}
    return [json.dumps(extra).encode() for extra in ({}, whole, partitioned, {"decode": {}})]


def run_digest(data: bytes) -> str:
    """What a client says of its prompt besides the prompt: cache salt, adapter, hashes of images; and any token ids."""
    said = _object(data)
    if said is None:
        return "not an object"
    ids, media = said.get("ids"), said.get("media")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids) or not isinstance(media, list):
        return "not token ids"
    places = tuple((str(each[0]), each[1], each[2]) for each in media if isinstance(each, list) and len(each) > 2)
    lora, salt = said.get("lora"), said.get("salt")
    extras = PromptExtras(lora if isinstance(lora, str) else None, salt if isinstance(salt, str) else None, places)
    try:
        digest = prompt_digest(b"t" * 16, ids, extras)
        other = prompt_digest(b"t" * 16, [*ids, 0], extras)
    except OverflowError as error:
        return refused(error)
    assert len(digest) == 32 and digest == prompt_digest(b"t" * 16, list(ids), extras) != other
    assert digest != prompt_digest(b"u" * 16, ids, extras)
    return f"digest of {min(3, len(ids))} and {min(3, len(places))}"


def digest_seeds() -> Sequence[bytes]:
    """A prompt with everything."""
    whole = {"ids": [1, 2, 3, 50256], "lora": "adapter", "salt": "s", "media": [["hash", 1, 2]]}
    return [json.dumps(whole).encode(), json.dumps({"ids": [], "media": []}).encode()]


TARGETS = [
    Target("digest", "digest.prompt_digest", run_digest, digest_seeds, JSON, max_bytes=1024),
    Target(
        "ticket", "ticket.parse_ticket, parse_address, secret.is_proven", run_ticket, ticket_seeds, JSON, max_bytes=1024
    ),
    Target(
        "config",
        "config.parse_config",
        run_config,
        config_seeds,
        JSON,
        max_bytes=1024,
        may_open=frozenset({SECRET_FILE}),
    ),
    Target("foreign", "ascend.settings.parse_foreign, check_sizes", run_foreign, foreign_seeds, JSON, max_bytes=1024),
]
