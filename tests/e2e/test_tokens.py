"""Tokens of a prefill/decode pair equal those of one plain server; decode computes one prompt token; all is given back."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Answer, Rig, footprint, prompt_of

pytestmark = [pytest.mark.e2e]

BLOCK = 128
LENGTHS = [1, 2, 127, 128, 129, 255, 256, 257, 1500]


def assert_attached(answer: Answer, length: int, num_cached_blocks: int = 0) -> None:
    report = answer.report
    assert report["way"] == "attach", report
    assert report["blocks_attached"] == (length - 1) // BLOCK
    assert report["kv_bytes_not_copied"] == report["blocks_attached"] * 128 * 1024
    assert num_cached_blocks or report["tail_tokens"] == (length - 1) % BLOCK


@pytest.mark.parametrize("length", LENGTHS)
def test_alone(rig: Rig, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    answer = rig.complete(rig.proxy.url, prompt)
    assert answer.tokens == rig.expected(prompt).tokens
    assert_attached(answer, length)
    rig.assert_clean()


@pytest.mark.parametrize("length", LENGTHS)
def test_eight_at_once(rig: Rig, length: int) -> None:
    prompts = [prompt_of(length, seed=100 * length + i) for i in range(8)]
    expected = [rig.expected(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: rig.complete(rig.proxy.url, prompt), prompts))
    for answer, wanted in zip(answers, expected, strict=True):
        assert_attached(answer, length)
        assert_same(answer, wanted)
    rig.assert_clean()


def assert_same(answer: Answer, wanted: Answer) -> None:
    """Equal tokens; where batching alone has moved a near tie, log-probabilities agree up to there."""
    for mine, theirs, token, other in zip(answer.logprobs, wanted.logprobs, answer.tokens, wanted.tokens, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
        if token != other:
            return


def test_the_same_prompt_twice(rig: Rig) -> None:
    prompt = prompt_of(600, seed=1)
    for _ in range(2):
        answer = rig.complete(rig.proxy.url, prompt)
        assert answer.tokens == rig.expected(prompt).tokens
        assert_attached(answer, 600)
    rig.assert_clean()


def test_two_prompts_that_share_a_prefix(rig: Rig) -> None:
    prompts = [prompt_of(512, seed=2) + prompt_of(100 * i, seed=20 + i) for i in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: rig.complete(rig.proxy.url, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == rig.expected(prompt).tokens
        assert_attached(answer, len(prompt))
    rig.assert_clean()


def test_decode_has_part_of_the_prefix_cached_already(rig: Rig) -> None:
    prompt = prompt_of(700, seed=3)
    rig.complete(rig.decode.url, prompt[:300])  # decode alone, so it has two full blocks of its own
    answer = rig.complete(rig.proxy.url, prompt)
    assert answer.tokens == rig.expected(prompt).tokens
    assert_attached(answer, 700)
    rig.assert_clean()


def test_a_decode_so_small_that_it_preempts(rig: Rig) -> None:
    """Eleven blocks for eight requests that need two to three each for what they generate."""
    prompts = [prompt_of(300 + i, seed=40 + i) for i in range(8)]
    max_tokens = 240
    expected = [rig.expected(prompt, max_tokens) for prompt in prompts]
    before = rig.metric(rig.small_decode, "vllm:num_preemptions_total")
    tickets = [rig.ticket(prompt) for prompt in prompts]

    def decode(index: int) -> Answer:
        return rig.complete(rig.small_decode.url, prompts[index], max_tokens, kv_transfer_params=tickets[index])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(decode, range(8)))
    assert rig.metric(rig.small_decode, "vllm:num_preemptions_total") > before
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.report["way"] == "attach"
        assert_same(answer, wanted)
    rig.assert_clean()


def test_n_greater_than_one_shares_one_ticket(rig: Rig) -> None:
    prompt = prompt_of(400, seed=4)
    body = {
        "model": rig.model, "prompt": prompt, "max_tokens": 8, "n": 3, "return_token_ids": True, "ignore_eos": True,
        "temperature": 1, "top_k": 1,  # greedy; vLLM refuses n > 1 with temperature 0
    }  # fmt: skip
    response = rig.client.post(f"{rig.proxy.url}/v1/completions", json=body)
    wanted = rig.expected(prompt, 8).tokens
    assert [choice["token_ids"] for choice in response.json()["choices"]] == [wanted] * 3
    rig.assert_clean()


def test_nothing_grows(rig: Rig) -> None:
    """After the first hand-offs, descriptors, threads and mappings of all processes stay as they are."""
    prompts = [prompt_of(200 + i, seed=60 + i) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: rig.complete(rig.proxy.url, prompt, 2), prompts[:20]))
        before = [footprint(server) for server in (rig.prefill, rig.decode)]
        list(pool.map(lambda prompt: rig.complete(rig.proxy.url, prompt, 2), prompts[20:]))
    rig.assert_clean()
    after = [footprint(server) for server in (rig.prefill, rig.decode)]
    for old, new in zip(before, after, strict=True):
        for key, count in new.items():
            # HTTP connections come and go; everything else must be the same.
            assert count <= old[key] + (8 if key.endswith("fds") else 0), (key, old, new)
            assert not key.endswith("pools") or count == old[key]
