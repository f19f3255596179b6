"""Other architectures: each a prefill and a decode with a tiny random model, whose tokens equal decode's own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from examples.pair import ROOT, Server, kv_transfer_config
from tests.e2e import shapes
from tests.e2e.conftest import LOG_DIR, Rig, prompt_of
from tests.support.servers import ready, vllm_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = [1, 40, 129, 500]
BLOCK = 64


@dataclass(frozen=True)
class Shape:
    """A model, how its servers are started, and in which way it is handed over."""

    model: str
    way: str
    arguments: tuple[str, ...] = ("--block-size", str(BLOCK))
    reason: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-fp8" if "fp8" in self.arguments else self.model


SHAPES = [
    Shape("qwen3", "attach"),
    Shape("multi-head", "attach", ("--block-size", "32")),
    Shape("gemma3", "pull", reason="attach_off"),
    Shape("qwen3", "attach", ("--block-size", str(BLOCK), "--kv-cache-dtype", "fp8")),
]
HAS_FP8 = any(flag in Path("/proc/cpuinfo").read_text() for flag in (" avx512f", " amx_tile"))
"""Whether vLLM has kernels for fp8 KV here."""


@dataclass
class ShapePair:
    """The two servers of a shape."""

    shape: Shape
    rig: Rig
    prefill: Server
    decode: Server


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShapePair]:
    shape: Shape = request.param
    if "fp8" in shape.arguments and not HAS_FP8:
        pytest.skip("vLLM has fp8 kernels for AVX-512 and AMX only")
    model = shapes.ensure(shape.model, ROOT / "build" / "models" / "shapes")
    extra = {"socket_dir": str(tmp_path_factory.mktemp("shape") / "s"), "report_in_response": True}
    servers = [
        vllm_server(
            f"{shape.name}-{role}", model, kv_config=kv_transfer_config(role, extra=extra, policy="fail"),
            max_model_len=1024, arguments=shape.arguments, log_dir=LOG_DIR,
        )
        for role in ("kv_producer", "kv_consumer")
    ]  # fmt: skip
    with ready(servers), httpx.Client(timeout=300, trust_env=False) as client:
        nobody = servers[0]
        rig = Rig(model.name, Path(extra["socket_dir"]), *servers, nobody, nobody, nobody, nobody, client)  # type: ignore[arg-type]
        yield ShapePair(shape, rig, *servers)


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_that_decode_computes_itself(pair: ShapePair, length: int) -> None:
    prompt = [token % shapes.VOCABULARY for token in prompt_of(length, seed=length)]
    # With another salt nothing of the first answer is in the cache of the second.
    expected = pair.rig.complete(pair.decode.url, prompt, cache_salt="its own")
    ticket = pair.rig.ticket(prompt, pair.prefill, cache_salt="handed over")
    answer = pair.rig.complete(pair.decode.url, prompt, cache_salt="handed over", kv_transfer_params=ticket)
    assert answer.tokens == expected.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert (answer.report["way"], answer.report["reason"]) == (pair.shape.way, pair.shape.reason)


def test_shapes_that_are_refused_say_so_and_serve(tmp_path: Path) -> None:
    """Latent attention, and a Mamba hybrid. That gets no request: its first ends vLLM 0.32's CPU build, also without us."""
    extra = {"socket_dir": str(tmp_path / "s")}
    kinds = {"deepseek": "MLAAttentionSpec", "falcon-h1": "MambaSpec"}
    servers = [
        vllm_server(
            f"{name}-refused", shapes.ensure(name, ROOT / "build" / "models" / "shapes"), max_model_len=1024,
            kv_config=kv_transfer_config("kv_both", extra=extra), arguments=["--dtype", "bfloat16"], log_dir=LOG_DIR,
        )
        for name in kinds
    ]  # fmt: skip
    with ready(servers):
        for server, kind in zip(servers, kinds.values(), strict=True):
            assert f"hand-off is off: KV cache of kind {kind}: only FullAttentionSpec" in server.log_text()
        body = {"model": "deepseek", "prompt": list(range(20, 200)), "max_tokens": 3, "ignore_eos": True}
        body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = httpx.post(f"{servers[0].url}/v1/completions", json=body, timeout=100)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert answer.json().get("kv_transfer_params") is None


def test_all_is_given_back(pair: ShapePair) -> None:
    for server in (pair.prefill, pair.decode):
        pair.rig.complete(server.url, [11, 12], 2)
        assert pair.rig.metric(server, "vllm:kv_cache_usage_perc") == 0
    published = pair.rig.metric(pair.prefill, "vllm:mc2_leases_published_total")
    assert pair.rig.metric(pair.prefill, "vllm:mc2_leases_ended_total") == published >= len(LENGTHS)
