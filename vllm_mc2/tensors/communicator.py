"""MC2Communicator: one end of a connection between a prefill process and a decode process on the same host."""

import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import torch

from vllm_mc2.config import MC2Config
from vllm_mc2.errors import ConfigError, LayoutError, UsageError
from vllm_mc2.tensors.manager import PROCESS_TABLE, LayerKV, LayerTable, check_layer
from vllm_mc2.tensors.messages import TensorSpec
from vllm_mc2.tensors.pools import Layout
from vllm_mc2.tensors.receiver import Receiver, RemoteKV
from vllm_mc2.tensors.sender import EndedKV, Sender, SentKV, as_int32

Blocks: TypeAlias = "Sequence[int] | array[int] | torch.Tensor"
LayerTensors: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
KVCache: TypeAlias = "torch.Tensor | Mapping[int, LayerTensors] | Sequence[LayerTensors]"
_EMPTY = as_int32([])
_DEVICE = re.compile(r"cpu|npu:\d{1,3}")


class MC2Communicator:
    """Hands KV caches from a prefill process to a decode process without copying them.

    Prefill gives ``peer_addr`` and ``peer_port``, decode ``listen_addr`` and ``listen_port``::

        mc2 = MC2Communicator(local_rank=0, device="cpu", peer_addr="127.0.0.1", peer_port=5678)      # prefill
        mc2 = MC2Communicator(local_rank=0, device="cpu", listen_addr="127.0.0.1", listen_port=5678)  # decode
        mc2.accept()

    TCP serves for the first contact only: it establishes that both run on one host. What follows goes through Unix sockets in
    ``socket_dir`` and through shared memory, and a request costs one small message. One decode may accept several prefills.

    One thread at a time for each communicator. A context manager.
    """

    def __init__(
        self,
        local_rank: int = 0,
        device: str | None = None,
        *,
        peer_addr: str | None = None,
        peer_port: int | None = None,
        listen_addr: str | None = None,
        listen_port: int | None = None,
        npu_device: str | None = None,
        socket_dir: str | None = None,
        timeout_seconds: float = 10.0,
        offer_timeout_seconds: float = 60.0,
        num_lease_slots: int = 1024,
        prefault: bool = True,
        busy_poll_seconds: float = 50e-6,
    ) -> None:
        """Prefill connects here, and returns when decode has accepted it; decode listens, and returns at once.

        Args:
            local_rank: number of this process among its side's; it meets the same number of the other side.
            device: where the KV cache is: ``"cpu"``. ``"npu:N"`` needs the Ascend backend, which does not exist yet.
            peer_addr: prefill: host name or address of decode.
            peer_port: prefill: the port on which decode listens.
            listen_addr: decode: address to listen on. Default 127.0.0.1.
            listen_port: decode: port to listen on; 0 takes a free one, see :attr:`listen_port`.
            npu_device: another spelling of ``device``.
            socket_dir: the directory in which both sides' Unix sockets are, the same for both. Default as the connector's.
            timeout_seconds: how long prefill tries to reach decode, and later waits for it to take its mail.
            offer_timeout_seconds: prefill: how long a request that decode does not map keeps its blocks.
            num_lease_slots: prefill: requests that can be handed over and not yet released at once.
            prefault: decode: fill in the page tables of a new pool in the background.
            busy_poll_seconds: decode: how long ``recv_kv_metadata`` keeps looking before it sleeps. Waking up a sleeper costs
                several hand-overs, on a virtual machine ten; looking costs a core.

        Raises:
            ConfigError: an argument is wrong; the message names it.
            PeerUnreachableError: decode does not answer, or runs on another host.
            PeerRefusedError: decode runs another version, or is of another rank.
        """
        device = _check_device(device, npu_device)
        _check_number("local_rank", local_rank, 0, 65535)
        _check_number("num_lease_slots", num_lease_slots, 1, 65536)
        _check_seconds(timeout_seconds, offer_timeout_seconds, busy_poll_seconds)
        _check_texts(peer_addr=peer_addr, listen_addr=listen_addr, socket_dir=socket_dir)
        _check_side(peer_addr, peer_port, listen_addr, listen_port)
        self.local_rank = local_rank
        self.device = device
        self.layers = LayerTable()
        """What ``KVCacheManager(mc2)`` manages."""
        self._known_layouts: dict[tuple[LayerTable, int, bool], Layout] = {}
        self._role: Literal["prefill", "decode"] = "prefill" if listen_port is None else "decode"
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        directory = MC2Config(socket_dir=socket_dir).resolve_socket_dir()
        if listen_port is not None:
            self._listen(directory, listen_addr or "127.0.0.1", listen_port, prefault, busy_poll_seconds)
            return
        self._connect(directory, peer_addr, peer_port, timeout_seconds, offer_timeout_seconds, num_lease_slots)

    def _listen(self, directory: Path, address: str, port: int, prefault: bool, busy_poll_seconds: float) -> None:
        _check_number("listen_port", port, 0, 65535)
        self._receiver = Receiver(
            directory, self.local_rank, address, port, prefault=prefault, busy_poll_seconds=busy_poll_seconds
        )

    def _connect(
        self, directory: Path, address: str | None, port: int | None, timeout: float, offer_timeout: float, slots: int
    ) -> None:
        _check_number("peer_port", port, 1, 65535)
        if address is None:
            raise ConfigError(f"peer_addr = {address!r}: expected the host name or address of decode")
        assert port is not None
        sender = Sender(directory, self.local_rank, offer_timeout, slots)
        try:
            sender.connect(address, port, timeout)
        except BaseException:
            sender.close()
            raise
        self._sender = sender

    @property
    def role(self) -> Literal["prefill", "decode"]:
        """Which side this is."""
        return self._role

    def _require_sender(self, what: str) -> Sender:
        if self._sender is None:
            raise self._refusal("prefill", what)
        return self._sender

    def _require_receiver(self, what: str) -> Receiver:
        if self._receiver is None:
            raise self._refusal("decode", what)
        return self._receiver

    def require_decode(self, what: str) -> None:
        """Refuse what only decode can do.

        Raises:
            UsageError: this communicator is prefill's, or closed.
        """
        self._require_receiver(what)

    def _refusal(self, role: str, what: str) -> UsageError:
        if self._role != role:
            return UsageError(f"{what} is for {role}; this communicator is {self._role}'s")
        return UsageError(f"{what}: this communicator is closed")

    # --- prefill ---

    def send_kv_metadata(
        self,
        request_id: "str | KVCache",
        blocks: "Blocks | KVCache | None" = None,
        *,
        num_tokens: int = 0,
    ) -> SentKV:
        """Offer a request's KV cache to decode; a few dozen bytes go there, whatever its size.

        Four forms; the first two take some ten microseconds, in the others tensors are looked up each time::

            send_kv_metadata("req-1", [4, 9, 2])    blocks of the registered paged layers
            send_kv_metadata("req-1")               all of the registered layers, contiguous
            send_kv_metadata("req-1", kv_cache)     a contiguous cache: a tensor, or layers as a dict or list of (key, value)
            send_kv_metadata(kv_cache)              the same, with a request id made for it

        Tensors outside shared memory are registered, which copies them (see :class:`KVCacheManager`). Do not write to what was
        sent until :meth:`reap` says that it is over.

        Args:
            request_id: 1 to 256 characters.
            blocks: int32 block ids ``[n]``, at most 8192: where the request is along the first dimension of the layers.
                An int32 tensor or ``array("i")`` is fastest.
            num_tokens: how many tokens the cache holds, for decode's information.

        Raises:
            LayoutError: blocks that no layer has, or tensors that cannot be shared.
            UsageError: no layers are registered, or every lease slot is taken.
            PeerUnreachableError: decode is gone.
        """
        sender = self._sender or self._require_sender("send_kv_metadata()")
        if not isinstance(request_id, str):
            if blocks is not None:
                raise UsageError(f"request_id: expected a text, got {type(request_id).__name__}")
            request_id, blocks = secrets.token_hex(16), request_id
        if blocks is None:
            layout, table = self._registered_layout(sender, is_paged=False), _EMPTY
        elif _is_kv_cache(blocks):
            layout, table = self._layout_of(sender, blocks), _EMPTY
        else:
            layout, table = self._registered_layout(sender, is_paged=True), as_int32(blocks)
        try:
            return sender.send(request_id, layout, table, num_tokens)
        except ValueError as error:
            raise LayoutError(f"request {request_id!r}: {error}") from error
        except TypeError as error:
            raise UsageError(f"num_tokens = {num_tokens!r}: expected a whole number that is not negative") from error

    def _table(self) -> LayerTable:
        table = self.layers if self.layers.layers else PROCESS_TABLE
        if not table.layers:
            raise UsageError("no layers yet: KVCacheManager.allocate() or register() makes them known")
        return table

    def _registered_layout(self, sender: Sender, *, is_paged: bool) -> Layout:
        """The registered layers; looked up once for as long as none of them changes."""
        table = self._table()
        key = (table, table.version, is_paged)
        layout = self._known_layouts.get(key)
        if layout is None:
            with table.lock:
                key, specs = (table, table.version, is_paged), table.specs(table.layers)
            layout = sender.layout(specs, _num_blocks(specs) if is_paged else 0)
            self._known_layouts = {old: kept for old, kept in self._known_layouts.items() if old[:2] == key[:2]}
            self._known_layouts[key] = layout
        return layout

    def _layout_of(self, sender: Sender, kv_cache: "Blocks | KVCache") -> Layout:
        """Tensors as they are given: whether they are in shared memory, and unchanged, shows anew each time."""
        table = self.layers if self.layers.layers else PROCESS_TABLE
        layers = {layer: table.shared(layer, kv, "auto") for layer, kv in _layers_of(kv_cache).items()}
        return sender.layout(table.specs(layers), 0)

    @property
    def num_leases(self) -> int:
        """Prefill: requests that were sent and have not been reaped."""
        return self._require_sender("num_leases").num_leases

    def reap(self) -> list[EndedKV]:
        """Prefill: the requests that ended since the last call; their blocks may be written to again. Never waits.

        A request ends when decode has released it, when nobody has mapped it in ``offer_timeout_seconds``, or with decode.
        """
        return self._require_sender("reap()").reap()

    # --- decode ---

    @property
    def listen_port(self) -> int:
        """Decode: the TCP port on which prefills introduce themselves."""
        return self._require_receiver("listen_port").port

    def accept(self, timeout_seconds: float = 60.0) -> str:
        """Decode: wait for a prefill and open a session with it. Once for each prefill.

        Returns:
            The prefill's incarnation: 32 hex digits that name this start of it.

        Raises:
            TimeoutError: none came in time.
        """
        return self._require_receiver("accept()").accept(timeout_seconds)

    def recv_kv_metadata(self, timeout: float | None = None) -> RemoteKV:
        """Decode: the next request that a prefill has sent, in the order of sending; for :class:`KVCacheMapper`.

        ``timeout``: seconds to wait; None waits as long as a prefill is connected.

        Raises:
            TimeoutError: nothing came in time.
            PeerUnreachableError: every prefill is gone, and all that they sent has been received.
            UsageError: no prefill was accepted yet.
        """
        receiver = self._receiver or self._require_receiver("recv_kv_metadata()")
        receiver.require_prefill()
        return receiver.receive(timeout)

    def wait_prefaulted(self, timeout_seconds: float = 60.0) -> None:
        """Decode: wait until the page tables of all that is mapped are filled in. Only benchmarks need it."""
        self._require_receiver("wait_prefaulted()").wait_prefaulted(timeout_seconds)

    # --- both ---

    def close(self) -> None:
        """End the connection. Decode's close releases all it holds: it promises not to read any more. Idempotent."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_device(device: str | None, npu_device: str | None) -> str:
    if device is not None and npu_device is not None and device != npu_device:
        raise ConfigError(f"device = {device!r} and npu_device = {npu_device!r}: they are two spellings of one setting")
    name = "device" if device is not None else "npu_device"
    chosen = device if device is not None else npu_device if npu_device is not None else "cpu"
    if not isinstance(chosen, str) or not _DEVICE.fullmatch(chosen):
        raise ConfigError(f"{name} = {chosen!r}: expected 'cpu' or 'npu:N'")
    if chosen != "cpu":
        raise ConfigError(
            f"{name} = {chosen!r}: expected 'cpu'; this version shares host memory only, the Ascend backend is not there yet"
        )
    return chosen


def _check_number(name: str, number: int | None, lowest: int, highest: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not lowest <= number <= highest:
        raise ConfigError(f"{name} = {number!r}: expected a whole number from {lowest} to {highest}")


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_seconds(timeout: float, offer_timeout: float, busy_poll: float) -> None:
    for name, seconds in (("timeout_seconds", timeout), ("offer_timeout_seconds", offer_timeout)):
        if not _is_real(seconds) or not 0 < seconds <= 86400:
            raise ConfigError(f"{name} = {seconds!r}: expected a number above 0 and up to 86400")
    if not _is_real(busy_poll) or not 0 <= busy_poll <= 60:
        raise ConfigError(f"busy_poll_seconds = {busy_poll!r}: expected a number from 0 to 60")


def _check_texts(**texts: object) -> None:
    for name, text in texts.items():
        if text is not None and not (isinstance(text, str) and text):
            raise ConfigError(f"{name} = {text!r}: expected a text")


def _check_side(peer_addr: str | None, peer_port: int | None, listen_addr: str | None, listen_port: int | None) -> None:
    if (peer_port is None) == (listen_port is None):
        raise ConfigError(
            f"peer_port = {peer_port!r}, listen_port = {listen_port!r}: expected one of them, peer_addr and peer_port on"
            " prefill, listen_addr and listen_port on decode"
        )
    if listen_port is None and listen_addr is not None:
        raise ConfigError(f"listen_addr = {listen_addr!r}: expected nothing here beside peer_port")
    if peer_port is None and peer_addr is not None:
        raise ConfigError(f"peer_addr = {peer_addr!r}: expected nothing here beside listen_port")


def _num_blocks(specs: Sequence[TensorSpec]) -> int:
    sizes = {spec.shape[0] for spec in specs}
    if len(sizes) != 1:
        raise LayoutError(f"a block table needs layers of one number of blocks, these have {sorted(sizes)}")
    return sizes.pop()


def _is_kv_cache(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.dtype is torch.int32:
            return False
        # Whole numbers are block ids, but for bytes in several dimensions: a cache that is quantised.
        return bool(value.is_floating_point() or (value.dim() > 1 and value.dtype in {torch.int8, torch.uint8}))
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and not isinstance(value[0], int)


def _layers_of(kv_cache: Any) -> dict[int, LayerKV]:
    if isinstance(kv_cache, torch.Tensor):
        return {0: LayerKV(kv_cache, None)}
    if isinstance(kv_cache, LayerKV):
        return {0: kv_cache}
    items = kv_cache.items() if isinstance(kv_cache, Mapping) else enumerate(kv_cache)
    layers = {}
    for layer, value in items:
        check_layer(layer)
        if isinstance(value, torch.Tensor):
            layers[layer] = LayerKV(value, None)
        elif isinstance(value, (list, tuple)) and len(value) == 2:
            layers[layer] = LayerKV(value[0], value[1])
        else:
            raise LayoutError(f"layer {layer}: expected a tensor or a pair (key, value), got {type(value).__name__}")
    if not layers:
        raise LayoutError("a KV cache without layers")
    return layers
