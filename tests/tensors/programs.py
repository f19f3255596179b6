"""What runs in processes of its own: prefills and decodes that do as they are told over a pipe."""

import os
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import wait_until
from tests.tensors.rig import WATCHDOG_SECONDS, bits, dial, fill, listen
from vllm_mc2 import KVCacheManager, KVCacheMapper, MC2Communicator
from vllm_mc2.errors import ConfigError
from vllm_mc2.tensors import CopiedIntoPoolWarning, LayerKV, MappedKV

ARTICLE_SHAPE = (3, 16, 2, 8)


def article_layer(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of a model that knows nothing of shared memory."""
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(ARTICLE_SHAPE, generator=generator), torch.randn(ARTICLE_SHAPE, generator=generator)


def article_prefill(runtime_dir: str, port: int) -> tuple[int, list[tuple[str, str]]]:
    """As an article about the interface writes it, but for the device, which this machine does not have."""
    os.environ["XDG_RUNTIME_DIR"] = runtime_dir
    with pytest.raises(ConfigError, match=r"npu_device = 'npu:0': expected 'cpu'; .* Ascend"):
        MC2Communicator(local_rank=0, peer_addr="127.0.0.1", peer_port=port, npu_device="npu:0")

    mc2 = MC2Communicator(local_rank=0, peer_addr="127.0.0.1", peer_port=port, npu_device="cpu")
    kv_cache_manager = KVCacheManager()
    kv_cache = [article_layer(layer) for layer in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layer_idx, (key, value) in enumerate(kv_cache):
            kv_cache_manager.register(layer_idx, key_tensor=key, value_tensor=value)
        mc2.send_kv_metadata(kv_cache)
    assert [warning.category for warning in caught] == [CopiedIntoPoolWarning] * 2

    ended = []
    while not ended:
        ended = [tuple(each) for each in mc2.reap()]
        time.sleep(0.001)
    mc2.close()
    return kv_cache_manager.registered_copies, ended  # type: ignore[return-value]


def article_decode(runtime_dir: str, port: int) -> dict[int, bool]:
    """Its other half. Whether each layer is what prefill has made."""
    os.environ["XDG_RUNTIME_DIR"] = runtime_dir
    mc2 = MC2Communicator(local_rank=0, listen_addr="127.0.0.1", listen_port=port)
    mc2.accept()
    metadata = mc2.recv_kv_metadata()
    remote_kv = KVCacheMapper(mc2).map_remote_kv(metadata)
    equal = {}
    for layer, (key, value) in remote_kv.layers.items():
        made_key, made_value = article_layer(layer)
        assert value is not None
        equal[layer] = torch.equal(key, made_key) and torch.equal(value, made_value)
    remote_kv.release()
    mc2.close()
    return equal


def digest(kv: LayerKV) -> list[int]:
    """A number for each part that any changed byte changes, without a copy of the cache."""
    words = [bits(tensor).view(torch.int64) for _, tensor in kv.parts()]
    return [
        int((part * torch.arange(1, 1 + len(part))).sum()) if len(part) < 1 << 16 else int(part.sum()) for part in words
    ]


def prefill(talk: Connection, directory: str, port: int, shape: Sequence[int], seed: int) -> None:
    """A layer of random bytes, and then whatever it is told."""
    mc2 = dial(port, Path(directory))
    manager = KVCacheManager(mc2)
    kv = fill(manager.allocate(0, shape, torch.float16), seed)
    talk.send("ready")
    while True:
        match talk.recv():
            case "send", request_id, blocks:
                talk.send(mc2.send_kv_metadata(request_id, blocks))
            case "reap", number:
                ended: list[Any] = []
                wait_until(lambda: ended.extend(mc2.reap()) or len(ended) >= number)  # noqa: B023
                talk.send([tuple(each) for each in ended])
            case "digest", *_:
                talk.send(digest(kv))
            case "fork", *_:
                pid = os.fork()
                if not pid:
                    time.sleep(10 * WATCHDOG_SECONDS)
                    os._exit(0)
                talk.send(pid)
            case "leave", *_:
                os._exit(0)  # without closing anything
            case _:
                mc2.close()
                return


def decode(talk: Connection, directory: str) -> None:
    """Accepts one prefill, and then does whatever it is told with what it has mapped."""
    with listen(Path(directory)) as mc2:
        talk.send(mc2.listen_port)
        mc2.accept(WATCHDOG_SECONDS)
        mapper = KVCacheMapper(mc2)
        mapped: list[MappedKV] = []
        talk.send("accepted")
        while True:
            match talk.recv():
                case "map", *_:
                    mapped.append(mapper.map_remote_kv(mc2.recv_kv_metadata(WATCHDOG_SECONDS)))
                    mc2.wait_prefaulted(WATCHDOG_SECONDS)
                    talk.send(mapped[-1].request_id)
                case "receive", *_:
                    talk.send(mc2.recv_kv_metadata(WATCHDOG_SECONDS).request_id)
                case "digest", *_:
                    talk.send(digest(mapped[-1].layers[0]))
                case "write", *_:
                    mapped[-1].layers[0].key.view(-1)[0] = 1
                    talk.send("written")
                case _:
                    for each in mapped:
                        each.release()
                    return
