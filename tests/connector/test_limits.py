"""What an engine cannot or must not do, and says so: at start, by a reason, or by giving no ticket."""

import copy
from pathlib import Path
from unittest import mock

import pytest

from tests.connector.outcome import finish
from tests.connector.rig import MakeEngine, assert_clean, prefill
from tests.support.fake_model import expected_tokens, prompt_of
from vllm_mc2.connector import compat
from vllm_mc2.errors import ConfigError

PROMPT = prompt_of(70)
OTHER = prompt_of(70, seed=1)


def test_a_pool_that_does_not_fit_the_window(make_engine: MakeEngine) -> None:
    producer, consumer = (
        make_engine("kv_producer", num_blocks=4096),
        make_engine("kv_consumer", num_blocks=16, extra={"window_pool_factor": 8, "mode": "attach"}),
    )
    consumer.add("r", PROMPT, prefill(producer, "p", PROMPT))
    assert finish(consumer, "r", "recompute", PROMPT)["reason"] == "window_full"


def test_attach_off_on_decode_computes_and_says_why(make_engine: MakeEngine) -> None:
    producer = make_engine("kv_producer")
    consumer = make_engine("kv_consumer", enable_prefix_caching=False, extra={"mode": "attach"})
    consumer.add("r", PROMPT, prefill(producer, "p", PROMPT))
    assert finish(consumer, "r", "recompute", PROMPT)["reason"] == "attach_off"


def test_a_changed_vllm_turns_attach_off_and_serves(make_engine: MakeEngine) -> None:
    with mock.patch.object(compat, "check_contract", return_value=["BlockPool.touch"]):
        producer, consumer = (make_engine(role, extra={"mode": "attach"}) for role in ("kv_producer", "kv_consumer"))
    producer.add("p", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    producer.run()
    assert producer.finished["p"][2] is None
    consumer.add("r", PROMPT, {"do_remote_prefill": True})
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(PROMPT, 4)


def test_the_contract_holds_for_the_installed_vllm() -> None:
    assert compat.check_contract() == []


def test_the_contract_check_sees_a_missing_or_changed_method() -> None:
    with mock.patch.object(compat.BlockPool, "_remove_cached_block_hashes", lambda self, block, group: None):
        assert compat.check_contract() == ["BlockPool._remove_cached_block_hashes('block',)"]
    with mock.patch.object(compat.KVCacheBlock, "set_block_hash", lambda self, block_hash: None):
        assert compat.check_contract() == ["set_block_hash('block_hash', 'num_tokens')"]
    with mock.patch.object(
        compat.KVCacheBlock, "__init__", lambda self, block_id, ref_cnt, key, num_tokens, pool: None
    ):
        assert compat.check_contract() == [
            "KVCacheBlock('block_id', 'ref_cnt', '_block_hash', '_block_hash_num_tokens')"
        ]
    with mock.patch.object(compat, "make_block_hash_with_group_id", lambda block_hash, group: (block_hash, group)):
        assert compat.check_contract() == ["make_block_hash_with_group_id"]
    with mock.patch.object(compat, "BlockPool", object):
        assert len(compat.check_contract()) == 4
    with mock.patch.object(compat.block_pool, "BlockHashToBlockMap", object):
        assert len(compat.check_contract()) == 2


def test_no_lease_slot_left_means_no_ticket(make_engine: MakeEngine) -> None:
    producer = make_engine("kv_producer", extra={"num_lease_slots": 1})
    prefill(producer, "a", PROMPT)
    free = producer.num_free_blocks
    producer.add("b", OTHER, {"do_remote_decode": True}, max_tokens=1)
    producer.run()
    assert producer.finished["b"][2] is None
    assert producer.stats["leases_refused"] == 1
    assert producer.num_free_blocks == free


def test_no_more_than_the_cap_is_lent_and_prefill_keeps_serving(make_engine: MakeEngine) -> None:
    """31 blocks, half of which may be lent, and copies are not asked for. Shared blocks count once."""
    extra = {"max_lent_fraction": 0.5, "mode": "attach"}
    producer = make_engine("kv_producer", num_blocks=32, max_model_len=128, extra=extra)
    consumer = make_engine("kv_consumer")
    prompts = [prompt_of(80, seed=index) for index in range(12)]
    answers = []
    for index, prompt in enumerate(prompts):
        producer.add(f"p{index}", prompt, {"do_remote_decode": True}, max_tokens=1)
        producer.run()
        answers.append(producer.finished[f"p{index}"][2])
        assert producer.finished[f"p{index}"][0] == expected_tokens(prompt, 1)
    assert [answer is not None for answer in answers] == [True] * 3 + [False] * 9
    producer.add("again", prompts[0], {"do_remote_decode": True}, max_tokens=1)
    producer.run()
    assert producer.finished["again"][2] is None  # its last block is another one than the first time
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        consumer.add(f"d{index}", prompt, answer)
        consumer.run()
        assert consumer.finished[f"d{index}"][0] == expected_tokens(prompt, 4)
    assert_clean(producer, consumer)
    prefill(producer, "afterwards", prompts[0])


def test_a_request_of_full_length_fits_beside_what_is_lent(make_engine: MakeEngine) -> None:
    """Tickets that nobody takes hold all that may be lent, and prefill still serves at once."""
    producer = make_engine("kv_producer", num_blocks=24, max_model_len=256, extra={"max_lent_fraction": 1.0})
    for index in range(8):
        producer.add(f"p{index}", prompt_of(40, seed=index), {"do_remote_decode": True}, max_tokens=1)
        producer.run()
    assert producer.stats["leases_published"] == 2
    producer.add("long", prompt_of(250, seed=99), None, max_tokens=4)
    producer.run()
    assert producer.finished["long"][0] == expected_tokens(prompt_of(250, seed=99), 4)


def test_a_wrong_setting_stops_the_engine_at_start(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.window_pool_factor = 'big'"):
        make_engine("kv_consumer", extra={"window_pool_factor": "big"})


def test_a_shared_socket_directory_stops_the_engine_at_start(make_engine: MakeEngine, tmp_path: Path) -> None:
    open_dir = tmp_path / "open"
    open_dir.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="lets others in"):
        make_engine("kv_producer", extra={"socket_dir": str(open_dir)})


def test_too_little_memory_stops_the_engine_at_start_with_figures(make_engine: MakeEngine) -> None:
    with pytest.raises(OSError, match=r"wanted|needs|available") as caught:
        make_engine("kv_producer", num_blocks=40_000_000)  # about 1 TB
    assert str(24576 * 40_000_000)[:4] in str(caught.value).replace(",", "")


def test_a_cache_of_several_groups_is_not_shared_and_named(make_engine: MakeEngine) -> None:
    with mock.patch.object(compat, "unsupported_engine", return_value="2 KV cache groups: only one is supported"):
        producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    producer.add("p", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    producer.run()
    assert producer.finished["p"][0] == expected_tokens(PROMPT, 1)
    assert producer.finished["p"][2] is None
    consumer.add("r", PROMPT, {"do_remote_prefill": True})
    consumer.run()
    assert consumer.finished["r"][0] == expected_tokens(PROMPT, 4)


def test_what_cannot_be_shared_is_named(make_engine: MakeEngine) -> None:
    engine = make_engine("kv_both")
    cache = engine.connector._kv_cache_config
    assert compat.unsupported_engine(engine.config, cache) is None
    with mock.patch.object(engine.config.parallel_config, "pipeline_parallel_size", 2):
        assert "pipeline_parallel_size 2" in str(compat.unsupported_engine(engine.config, cache))
    with mock.patch.object(engine.config, "speculative_config", object()):
        assert "speculative decoding" in str(compat.unsupported_engine(engine.config, cache))
    twice = copy.copy(cache)
    twice.kv_cache_groups = cache.kv_cache_groups * 2
    assert compat.unsupported_engine(engine.config, twice) is None
    assert "2 KV cache groups" in str(compat.why_not_in_place(twice))
    with mock.patch.object(engine.config.device_config, "device_type", "cuda"):
        assert "device 'cuda'" in str(compat.unsupported_engine(engine.config, cache))
