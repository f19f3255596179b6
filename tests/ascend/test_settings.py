"""Settings of vllm-ascend's users: accepted, checked against the truth, and compared where they change a block's bytes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_mc2.ascend.settings import AscendSettings, Sizes, check_sizes, environment_facts, parse_foreign
from vllm_mc2.errors import ConfigError


def test_settings_of_the_documentation() -> None:
    extra = {
        "use_ascend_direct": True,
        "prefill": {"dp_size": 1, "pp_size": 2, "tp_size": 16, "pp_layer_partition": "41,37"},
        "decode": {"dp_size": 8, "tp_size": 4},
        "ascend_local_comm_res_path": "/etc/hixlep",
        "mooncake_rpc_port": "0",
        "mode": "pull",
        "no_such_key": 1,
    }
    ours, settings = parse_foreign(extra)
    assert ours == {"mode": "pull", "no_such_key": 1}, "our own parser refuses what it does not know"
    assert settings.prefill == Sizes(tp_size=16, dp_size=1, pp_size=2, pp_layer_partition="41,37")
    assert settings.decode == Sizes(tp_size=4, dp_size=8) and settings.use_ascend_direct is True
    assert parse_foreign({}) == parse_foreign({"prefill": None, "engine_id": None}) == ({}, AscendSettings())
    check_sizes(settings, "kv_producer", 16, 1, 2)
    check_sizes(settings, "kv_consumer", 4, 8, 1)
    check_sizes(AscendSettings(), "kv_both", 3, 3, 3)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"prefill": 3}, "prefill = 3: expected an object"),
        ({"prefill": {"tp_size": "2"}}, r"prefill\.tp_size = '2': expected a whole number from 1 to 65536"),
        ({"decode": {"dp_size": 0}}, r"decode\.dp_size = 0: expected a whole number"),
        ({"decode": {"ep_size": 1}}, r"decode\.ep_size = 1: expected no such key; known keys: tp_size"),
        ({"prefill": {"pp_layer_partition": "3,x"}}, "expected numbers of layers"),
        ({"prefill": {"pp_size": 3, "pp_layer_partition": "3,4"}}, "one number for each of 3 ranks"),
        ({"use_ascend_direct": 1}, "use_ascend_direct = 1: expected true or false"),
        ({"mooncake_rpc_port": -1}, "expected a port"),
        ({"engine_id": ""}, "engine_id = '': expected a text of 1"),
    ],
)
def test_wrong_settings_name_key_value_and_what_is_allowed(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_foreign(extra)


def test_announced_sizes_must_be_true() -> None:
    _, settings = parse_foreign({"prefill": {"tp_size": 8}, "decode": {"tp_size": 4, "dp_size": 2}})
    check_sizes(settings, "kv_producer", 8, 7, 7)
    with pytest.raises(ConfigError, match=r"prefill\.tp_size = 8: expected 4, which this kv_producer engine has"):
        check_sizes(settings, "kv_producer", 4, 1, 1)
    with pytest.raises(ConfigError, match=r"decode\.dp_size = 2: expected 1"):
        check_sizes(settings, "kv_consumer", 4, 1, 1)
    with pytest.raises(ConfigError, match=r"decode\.tp_size = 4: expected 8"):
        check_sizes(settings, "kv_both", 8, 2, 1)


def test_facts_that_tensors_do_not_show() -> None:
    plain = environment_facts(SimpleNamespace())
    assert plain["ascend_enable_kv_nz"] == "False" and plain["ascend_decode_context_parallel_size"] == "1"
    parallel = SimpleNamespace(decode_context_parallel_size=2)
    consumer = SimpleNamespace(is_kv_consumer=True)
    nz = environment_facts(SimpleNamespace(
        additional_config={"enable_kv_nz": True}, parallel_config=parallel, kv_transfer_config=consumer
    ))  # fmt: skip
    different = {key for key, value in nz.items() if plain[key] != value}
    assert different == {"ascend_enable_kv_nz", "ascend_decode_context_parallel_size"}
    hashed = {"enable_hamming_sparse": True}
    with pytest.raises(ConfigError, match="enable_hamming_sparse"):
        environment_facts(SimpleNamespace(additional_config=hashed, kv_transfer_config=consumer))
    producer = SimpleNamespace(is_kv_consumer=False)
    assert environment_facts(SimpleNamespace(additional_config=hashed, kv_transfer_config=producer)) == plain
    speculative = SimpleNamespace(additional_config=hashed, kv_transfer_config=consumer, speculative_config=object())
    assert environment_facts(speculative) == plain


def test_the_package_needs_neither_torch_npu_nor_vllm() -> None:
    heavy = "{'torch', 'vllm', 'torch_npu'}"
    code = f"import sys, vllm_mc2.ascend.caches, vllm_mc2.ascend.settings; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
