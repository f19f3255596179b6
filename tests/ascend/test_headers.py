"""Our declarations of ACL against the headers of real releases, which torch-npu's wheels carry.

The wheels are downloaded once and unpacked, never installed; nothing of them is kept in this repository.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.unpacked import unpack_wheel

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "ascend"
IN_WHEEL = "torch_npu/include/third_party/acl/inc/acl/"
# The newest one, and the one that the newest release of vllm-ascend runs with.
VERSIONS = ["2.14.0", "2.10.0.post4"]

# Ours, theirs. What is a plain number in ACL's documentation has no name to compare.
CONSTANTS = {
    "kVersionBytes": "ACL_PKG_VERSION_MAX_SIZE",
    "kIpcExportFlagDefault": "ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT",
    "kIpcImportFlagPeerAccess": "ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS",
    "kVmmExportFlagDefault": "ACL_RT_VMM_EXPORT_FLAG_DEFAULT",
    "kVmmExportFlagDisablePid": "ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION",
    "kMemHandleTypeNone": "ACL_MEM_HANDLE_TYPE_NONE",
    "kMemAllocationTypePinned": "ACL_MEM_ALLOCATION_TYPE_PINNED",
    "kHbmMemHuge": "ACL_HBM_MEM_HUGE",
    "kMemLocationTypeDevice": "ACL_MEM_LOCATION_TYPE_DEVICE",
    "kMemShareHandleTypeDefault": "ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT",
    "kMemShareHandleTypeFabric": "ACL_MEM_SHARE_HANDLE_TYPE_FABRIC",
    "kMemcpyDeviceToDevice": "ACL_MEMCPY_DEVICE_TO_DEVICE",
    "kSuccess": "ACL_SUCCESS",
    "kInvalidParam": "ACL_ERROR_INVALID_PARAM",
    "kRepeatInitialize": "ACL_ERROR_REPEAT_INITIALIZE",
    "kInvalidFile": "ACL_ERROR_INVALID_FILE",
    "kFeatureUnsupported": "ACL_ERROR_FEATURE_UNSUPPORTED",
    "kRtParamInvalid": "ACL_ERROR_RT_PARAM_INVALID",
    "kRtFeatureNotSupport": "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
    "kRtStreamSyncTimeout": "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT",
}
# Plain numbers: the length of a key, and the flag that everybody passes to aclrtReserveMemAddress.
UNNAMED = {"kIpcKeyBytes", "kReserveFlagHugePage"}
STRUCTS = {
    ("MemLocation", "aclrtMemLocation"): {"id": "id", "type": "type"},
    ("PhysicalMemProp", "aclrtPhysicalMemProp"): {
        "handle_type": "handleType",
        "allocation_type": "allocationType",
        "mem_attr": "memAttr",
        "location": "location",
        "reserve": "reserve",
    },
    ("MemFabricHandle", "aclrtMemFabricHandle"): {"data": "data"},
}

COMPARE = """
#include <acl/acl.h>
#include <acl/acl_rt.h>

#include <cstddef>
#include <type_traits>

#include "ascend/acl_abi.h"

namespace ours = mc2::ascend::abi;

// The same to a compiler that passes arguments: kinds, sizes and signs; an enumeration is a number of its size.
template <typename A, typename B>
constexpr bool is_same_value() {
    if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
        using PointeeA = std::remove_pointer_t<A>;
        using PointeeB = std::remove_pointer_t<B>;
        if constexpr (std::is_const_v<PointeeA> != std::is_const_v<PointeeB>) {
            return false;
        } else if constexpr (std::is_void_v<PointeeA> || std::is_void_v<PointeeB>) {
            return std::is_void_v<PointeeA> && std::is_void_v<PointeeB>;
        } else {
            return is_same_value<std::remove_const_t<PointeeA>, std::remove_const_t<PointeeB>>();
        }
    } else if constexpr (std::is_class_v<A> && std::is_class_v<B>) {
        return sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
    } else if constexpr (std::is_enum_v<A> || std::is_enum_v<B>) {
        return (std::is_enum_v<A> || std::is_integral_v<A>) && (std::is_enum_v<B> || std::is_integral_v<B>) &&
               sizeof(A) == sizeof(B);
    } else {
        return std::is_integral_v<A> && std::is_integral_v<B> && sizeof(A) == sizeof(B) &&
               std::is_signed_v<A> == std::is_signed_v<B>;
    }
}

template <typename ReturnA, typename... A, typename ReturnB, typename... B>
constexpr bool is_same_function(ReturnA (*)(A...), ReturnB (*)(B...)) {
    if constexpr (sizeof...(A) != sizeof...(B)) {
        return false;
    } else {
        return is_same_value<ReturnA, ReturnB>() && (is_same_value<A, B>() && ...);
    }
}

template <typename Signature>
constexpr Signature* pointer_to = nullptr;
template <typename Function>
constexpr Function no_function = nullptr;

#define SAME_FUNCTION(name, ...)                                                                      \\
    static_assert(is_same_function(no_function<decltype(&::name)>, pointer_to<__VA_ARGS__>), #name);
#define SAME_VALUE(our, their) \\
    static_assert(static_cast<unsigned long long>(our) == static_cast<unsigned long long>(their), #their);
"""
FUNCTIONS = """
namespace check {
using ours::DrvMemHandle;
using ours::Error;
using ours::PhysicalMemProp;
using ours::Stream;
MC2_ACL_FUNCTIONS(SAME_FUNCTION, SAME_FUNCTION)
}
"""


def comparison() -> str:
    lines = [COMPARE, FUNCTIONS]
    lines += [f"SAME_VALUE(ours::{our}, {their})" for our, their in CONSTANTS.items()]
    for (our, their), members in STRUCTS.items():
        lines.append(f"static_assert(is_same_value<ours::{our}, {their}>(), {their!r});".replace("'", '"'))
        lines += [
            f"SAME_VALUE(offsetof(ours::{our}, {mine}), offsetof({their}, {other}))\n"
            f"SAME_VALUE(sizeof(ours::{our}::{mine}), sizeof({their}::{other}))"
            for mine, other in members.items()
        ]
    return "\n".join(lines) + "\n"


def compile_cpp(include: Path, source: str) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", f"-I{include}", f"-I{ROOT / 'csrc'}", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module", params=VERSIONS)
def include(request: pytest.FixtureRequest) -> Path:
    """Folder to give to the compiler, with ``acl/acl_rt.h`` below it."""
    version = str(request.param)
    target = BUILD / f"headers-{version}"
    return (unpack_wheel(f"torch-npu=={version}", target, lambda name: name.startswith(IN_WHEEL)) / IN_WHEEL).parent


def test_everything_is_compared() -> None:
    abi = (ROOT / "csrc" / "ascend" / "acl_abi.h").read_text()
    assert set(re.findall(r"constexpr \S+ (k\w+)", abi)) == set(CONSTANTS) | UNNAMED
    assert set(re.findall(r"^struct (\w+)", abi, re.MULTILINE)) == {our for our, _ in STRUCTS}
    assert len(re.findall(r"^    (?:REQUIRED|OPTIONAL)\(acl", abi, re.MULTILINE)) > 30


def test_declarations_agree(include: Path) -> None:
    done = compile_cpp(include, comparison())
    assert done.returncode == 0, done.stderr


# A comparison that everything passes would be none.
@pytest.mark.parametrize(
    "wrong",
    [
        "SAME_FUNCTION(aclrtSetDevice, ours::Error(std::int64_t))",
        "SAME_FUNCTION(aclrtSetDevice, ours::Error(std::uint32_t))",
        "SAME_FUNCTION(aclrtSetDevice, ours::Error(std::int32_t, std::int32_t))",
        "SAME_FUNCTION(aclrtMapMem, ours::Error(void*, std::size_t, std::size_t, void*, std::uint32_t))",
        "SAME_FUNCTION(aclrtReserveMemAddress, ours::Error(void*, std::size_t, std::size_t, void*, std::uint64_t))",
        "SAME_FUNCTION(aclrtIpcMemClose, ours::Error(char*))",
        "SAME_FUNCTION(aclrtFreePhysical, ours::Error(ours::MemFabricHandle*))",
        "static_assert(is_same_value<ours::MemFabricHandle*, aclrtPhysicalMemProp*>());",
        "SAME_VALUE(ours::kMemShareHandleTypeDefault, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC)",
        "SAME_VALUE(offsetof(ours::MemLocation, type), offsetof(aclrtMemLocation, id))",
    ],
)
def test_a_wrong_declaration_is_seen(include: Path, wrong: str) -> None:
    done = compile_cpp(include, COMPARE + wrong)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr, done.stderr


def test_names_of_codes(include: Path) -> None:
    headers = "".join(path.read_text(errors="replace") for path in include.glob("acl/**/*.h"))
    found = re.findall(r"\bACL_ERROR_(?:RT_)?(\w+)\s*=?\s*(\d{6})\b", headers)
    theirs = {int(code): name for name, code in found}
    ours = re.findall(r"\.code = (\d+), \.name = \"(\w+)\"", (ROOT / "csrc" / "ascend" / "acl_error.cpp").read_text())
    assert len(theirs) > 100
    assert len(ours) > 20
    # The headers of a release lack the codes of later ones.
    wrong = {(code, name, theirs[int(code)]) for code, name in ours if theirs.get(int(code), name) != name}
    assert not wrong
    assert sum(int(code) in theirs for code, _ in ours) >= len(ours) - 1
