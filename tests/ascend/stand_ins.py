"""vllm-ascend's source, importable without CANN: what is not there is stood in for, and is not used by what the tests run."""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch

DEVICE = os.environ.get("MC2_TEST_DEVICE", "cpu")


class StandIn(ModuleType):
    """A module that has whatever is asked for."""

    __path__: list[str] = []
    __version__ = "1.16.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is not there. Patches of models are not part of what is tested, and need all of vLLM's models."""

    absent = frozenset({"torchair", "mooncake", "scipy", "acl"})

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".", maxsplit=1)[0] in self.absent or name.startswith("vllm_ascend.patch.worker"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_vllm_ascend(*, is_npu_platform: bool) -> None:
    """Makes the source importable: with stand-ins, and with the file that its build would have written."""
    if DEVICE == "cpu":
        StandIns.absent |= {"torch_npu"}
        torch.npu = sys.modules["torch.npu"] = mock.MagicMock(name="torch.npu")
    else:
        import torch_npu

        torch_npu.npu.set_device(0)
    sys.meta_path.insert(0, StandIns())
    import vllm.platforms
    import vllm_ascend

    built = ModuleType("vllm_ascend._build_info")
    built.__device_type__ = "A2"  # type: ignore[attr-defined]
    sys.modules["vllm_ascend._build_info"] = vllm_ascend._build_info = built
    if is_npu_platform:
        from vllm_ascend.platform import NPUPlatform

        vllm.platforms._current_platform = NPUPlatform()
        import vllm_ascend.ops  # first, or the source imports itself in a circle
