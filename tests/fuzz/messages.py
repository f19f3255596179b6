"""Targets: everything that arrives as a message, and what is computed from it before anything is believed."""

import random
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from tests.fuzz.mutate import MSGPACK
from tests.fuzz.samples import encoded, sample
from tests.fuzz.target import Target, refused
from vllm_mc2 import protocol
from vllm_mc2.device_messages import DeviceGrant
from vllm_mc2.errors import LayoutError, PeerRefusedError, ProtocolError
from vllm_mc2.layout import ALIGNMENT_BYTES, MAX_BLOCKS, PoolLayout, Region, WindowAllocator, head_slices, mirror_plan
from vllm_mc2.protocol import PoolGrant, Refusal, RemoteGrant, SchedulerWelcome, Ticket, Verdict, WorkerHello
from vllm_mc2.tensors import messages as mail
from vllm_mc2.tensors.messages import ITEM_BYTES, KvNotice, LayoutNotice, Mail, PoolNotice, TensorSpec

MEGABYTES_2 = 2 << 20
POOL = PoolLayout(
    num_blocks=8,
    pool_bytes=3 * MEGABYTES_2,
    regions=tuple(Region(name=f"layers.{i}", offset_bytes=i * MEGABYTES_2, block_bytes=256 << 10) for i in range(3)),
)


def check_layout(layout: PoolLayout) -> str:
    """Either refused, or every block of every region lies in the pool, and none on another."""
    try:
        plan = mirror_plan(layout)
    except LayoutError as error:
        return refused(error)
    assert 0 < layout.num_blocks < MAX_BLOCKS
    end = 0
    for region in layout.regions:
        assert region.block_bytes > 0 and region.offset_bytes >= end and region.offset_bytes % ALIGNMENT_BYTES == 0
        end = region.offset_bytes + layout.num_blocks * region.block_bytes
        assert plan.block_offset(region, layout.num_blocks - 1) + region.block_bytes == end
    assert end <= layout.pool_bytes == plan.range_bytes
    assert layout.bytes_per_block * layout.num_blocks <= layout.pool_bytes
    window = WindowAllocator(0, 1 << 20, 8)
    base = window.claim(layout.num_blocks)
    if base is None:
        return "layout larger than the window"
    window.release(base, layout.num_blocks)
    assert window.num_free == 1 << 20
    return "layout"


def check_message(message: Any) -> str:
    """What receivers compute of a message before they believe it."""
    match message:
        case PoolGrant(pool=pool) | RemoteGrant(pool=pool):
            return check_layout(pool)
        case SchedulerWelcome(workers=workers):
            return " ".join(sorted({check_layout(worker.pool) for worker in workers}))
        case WorkerHello(fingerprint=theirs):
            different = protocol.first_difference({"model": "m", "rank": "0"}, {**theirs, "rank": str(message.rank)})
            if different is not None:
                field, here, there = different
                answer = Refusal(field[:4096], there[:4096], here[:4096])
                assert len(protocol.encode(answer)) <= protocol.MAX_FRAME_BYTES
            return str(different is None)
        case Verdict(block_ids=block_ids):
            return "" if len(block_ids) % 4 else f"{min(4, len(block_ids))} bytes"
        case DeviceGrant():
            assert message.num_blocks > 0 and message.strips
            return ",".join(sorted({segment.kind for segment in message.segments}))
        case Refusal():
            try:
                protocol.expect(message, PoolGrant)
            except PeerRefusedError:
                return ""
            raise AssertionError("a refusal was taken for an answer")
    ticket = getattr(message, "ticket", None)
    if isinstance(ticket, Ticket):
        slot, generation = ticket.lease_id
        assert 0 <= slot < 1 << 32 and 0 <= generation < 1 << 32 and len(ticket.token_bytes) == 16
    return ""


def run_protocol(data: bytes) -> str:
    """Any frame's payload."""
    try:
        message = protocol.decode(data)
    except ProtocolError as error:
        return refused(error)
    assert protocol.decode(protocol.encode(message)) == message
    return f"{type(message).__name__} {check_message(message)}"


def protocol_seeds() -> Sequence[bytes]:
    """Each message four times, and whole layouts."""
    kinds = get_args(protocol.Message)
    worker = protocol.WorkerEndpoint(0, "a" * 32, POOL)
    whole = [PoolGrant(POOL), SchedulerWelcome("p", 16, (worker, worker)), RemoteGrant(POOL, "tcp", "h:1", (0, 5))]
    return [encoded(kind, seed) for kind in kinds for seed in range(4)] + [protocol.encode(each) for each in whole]


def run_mail(data: bytes) -> str:
    """Prefill's mail in the tensor API: bounds of every tensor in a pool of 6 MiB."""
    try:
        message = mail.decode(data)
    except ProtocolError as error:
        return refused(error)
    assert mail.decode(protocol.encode(message)) == message
    if isinstance(message, KvNotice):
        (slot, generation), layout, token = mail.unpack_ticket(message.lease)
        assert mail.pack_ticket((slot, generation), layout, token) == message.lease
        return "KvNotice"
    if isinstance(message, PoolNotice):
        return f"PoolNotice {check_layout(message.layout)}"
    return " ".join(sorted({check_tensor(spec) for spec in message.tensors[:64]}))


def check_tensor(spec: TensorSpec) -> str:
    """Either refused, or inside: computed here from the corners."""
    try:
        spec.check(POOL.pool_bytes)
    except LayoutError as error:
        return refused(error)
    item = ITEM_BYTES[spec.dtype]
    last = spec.offset_bytes + item * sum((n - 1) * step for n, step in zip(spec.shape, spec.strides, strict=True))
    assert spec.offset_bytes % item == 0 and last + item <= POOL.pool_bytes
    return f"tensor {spec.dtype}"


def mail_seeds() -> Sequence[bytes]:
    """All three kinds, some of which fit the pool."""
    spec = TensorSpec(0, "key", 0, 256, (8, 4, 2), (8, 2, 1), "bfloat16")
    fits = [LayoutNotice(2, 8, (spec, msgspec.structs.replace(spec, part="value"))), PoolNotice(0, POOL)]
    kinds = get_args(Mail)
    return [encoded(kind, seed) for kind in kinds for seed in range(6)] + [
        msgspec.msgpack.encode(each) for each in fits
    ]


class Shape(msgspec.Struct, array_like=True):
    """Of the ``layout`` target: a pool, and two sides' ranks and block sizes."""

    pool: PoolLayout
    own_rank: int
    own_size: int
    peer_size: int
    own_block_bytes: int
    peer_block_bytes: int


_shapes = msgspec.msgpack.Decoder(Shape)


def run_layout(data: bytes) -> str:
    """Layouts, and slices of heads between other numbers of ranks."""
    try:
        shape = _shapes.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "not a shape"
    said = check_layout(shape.pool)
    own_size = max(1, min(shape.own_size, 65536))
    peer_size = max(1, min(shape.peer_size, 1024))  # what protocol.SchedulerWelcome allows
    try:
        slices = head_slices(shape.own_rank % own_size, own_size, peer_size)
        cuts = [part.cut(max(1, shape.own_block_bytes), shape.peer_block_bytes) for part in slices]
    except LayoutError as error:
        return f"{said} {refused(error)}"
    filled = 0
    for part, (own_offset, peer_offset, num_bytes) in zip(slices, cuts, strict=True):
        assert 0 <= part.peer_rank < peer_size and num_bytes > 0
        assert own_offset == (filled if part.own_parts > 1 else 0)
        assert (
            own_offset + num_bytes <= max(1, shape.own_block_bytes)
            and peer_offset + num_bytes <= shape.peer_block_bytes
        )
        filled += num_bytes
    assert filled == max(1, shape.own_block_bytes)
    return f"{said} {len(slices)} slices"


def layout_seeds() -> Sequence[bytes]:
    """Some that fit and some that do not."""
    rng = random.Random(1)
    shapes = [Shape(POOL, 0, 1, 1, 4096, 4096), Shape(POOL, 1, 2, 4, 4096, 2048), Shape(POOL, 3, 4, 2, 2048, 4096)]
    shapes += [sample(Shape, rng) for _ in range(6)]
    return [msgspec.msgpack.encode(shape) for shape in shapes]


TARGETS = [
    Target(
        "protocol",
        "protocol.decode, PoolLayout.check, mirror_plan, first_difference, expect",
        run_protocol,
        protocol_seeds,
        MSGPACK,
    ),
    Target("mail", "tensors.messages.decode, TensorSpec.check, unpack_ticket", run_mail, mail_seeds, MSGPACK),
    Target(
        "layout",
        "PoolLayout.check, mirror_plan, WindowAllocator, head_slices, HeadSlice.cut",
        run_layout,
        layout_seeds,
        MSGPACK,
    ),
]
