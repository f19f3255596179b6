"""Real tensors of torch_npu on the simulator."""

import subprocess
import sys

import pytest

from tests.ascend.environment import NpuEnvironment

TENSORS = """
import sys, torch, torch_npu
from multiprocessing.reduction import ForkingPickler
torch.npu.set_device(0)
assert torch.npu.is_available() and torch.npu.device_count() == 2
wanted = torch.arange(6000, dtype=torch.float32).view(60, 100)
for source in (wanted, wanted.pin_memory()):
    for non_blocking in (False, True):
        tensor = source.to("npu", non_blocking=non_blocking)
        torch.npu.synchronize()
        assert torch.equal(tensor.cpu(), wanted)
for other in (torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool):
    assert torch.equal(wanted.to(other).to("npu").cpu(), wanted.to(other))
    assert torch.equal(tensor.to(other).cpu(), wanted.to(other))

# Memory is full of rubbish here: nothing is zero by itself.
assert torch.empty(30 << 20, dtype=torch.uint8, device="npu")[-3000:].cpu().unique().tolist() == [0xA5]
assert not torch.zeros((5000, 1000), dtype=torch.int8, device="npu").cpu().any()
assert torch.full((3,), 7, device="npu").cpu().tolist() == [7] * 3
assert torch.ones(3, dtype=torch.float16, device="npu").fill_(2.5).cpu().tolist() == [2.5] * 3

assert torch.equal(tensor[7:9].cpu(), wanted[7:9]) and torch.equal(tensor[:, 5:9].cpu(), wanted[:, 5:9])
assert torch.equal(tensor.t().contiguous().cpu(), wanted.t()) and torch.equal(tensor.clone().cpu(), wanted)
assert torch.equal(tensor.view(torch.int8).view(torch.float32).cpu(), wanted)
changed, on_npu = wanted.clone(), tensor.clone()
for t in (changed, on_npu):
    t[:, 3].copy_(torch.full((60,), -1.0))
    t[10:12].copy_(t[20:22].clone())
    t[:, 50:60].copy_(t[:, 0:10].clone())
    t[5].zero_()
assert torch.equal(on_npu.cpu(), changed)
rows = torch.tensor([3, 59, 0, 3])
assert torch.equal(tensor.index_select(0, rows.to("npu")).cpu(), wanted.index_select(0, rows))
assert torch.equal(tensor.index_select(1, rows.to("npu")).cpu(), wanted.index_select(1, rows))
assert torch.equal(tensor[rows.to("npu")].cpu(), wanted[rows])

first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
first.record()
stream = torch.npu.Stream()
assert stream.npu_stream != torch.npu.current_stream().npu_stream
with torch.npu.stream(stream):
    stream.wait_event(first)
    copied = tensor.clone()
    last.record()
torch.npu.current_stream().wait_event(last)
last.synchronize()
assert last.query() and first.elapsed_time(last) >= 0 and torch.equal(copied.cpu(), wanted)

start = tensor.untyped_storage().data_ptr()
assert any(s["address"] <= start < s["address"] + s["total_size"] for s in torch.npu.memory_snapshot())
storage = torch_npu._C._construct_storage_from_data_pointer(start, tensor.device, tensor.nbytes)
again = torch.empty(0, dtype=torch.float32, device="npu").set_(storage, 0, (60, 100))
assert torch.equal(again.cpu(), wanted)

import ctypes
simulator = ctypes.CDLL("libascendcl.so")
simulator.mc2_sim_violation_text.restype = ctypes.c_char_p
assert simulator.mc2_sim_violations() == 0, simulator.mc2_sim_violation_text()

tensor = torch.arange(12_000_000, dtype=torch.int32).to("npu")
torch.npu.synchronize()
print("handle", bytes(ForkingPickler.dumps(tensor[5_000_000:].view(7000, 1000))).hex(), flush=True)
assert sys.stdin.readline() == "done\\n"
assert tensor[6_000_000:6_000_010].cpu().tolist() == [-5] * 10
assert simulator.mc2_sim_violations() == 0, simulator.mc2_sim_violation_text()
"""

IMPORT = """
import pickle, sys, torch, torch_npu
torch.npu.set_device(0)
tensor = pickle.loads(bytes.fromhex(sys.stdin.readline()))
assert tensor.device.type == "npu" and tensor.shape == (7000, 1000)
assert torch.equal(tensor.clone().cpu().view(-1), torch.arange(5_000_000, 12_000_000, dtype=torch.int32))
rows = tensor.index_select(0, torch.tensor([6999, 1]).to("npu")).cpu()
assert rows[:, 0].tolist() == [11_999_000, 5_001_000]
tensor[1000:1001].fill_(-5)
torch.npu.synchronize()
print("equal")
"""

ALLOCATORS = pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"])


@ALLOCATORS
def test_tensors_here_and_in_another_process(npu_environment: NpuEnvironment, allocator: str) -> None:
    variables = npu_environment.variables(PYTORCH_NPU_ALLOC_CONF=allocator, MC2_ACL_SIM_POISON="0xa5")
    owner, user = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=variables,
            cwd=npu_environment.folder.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for program in (TENSORS, IMPORT)
    ]
    try:
        assert owner.stdout is not None
        handle = next(line.split()[1] for line in owner.stdout if line.startswith("handle "))
        imported, _ = user.communicate(f"{handle}\n", timeout=250)
        assert imported.splitlines()[-1] == "equal"
        owner.communicate("done\n", timeout=250)
        assert (owner.returncode, user.returncode) == (0, 0)
    finally:
        for process in (owner, user):
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_unknown_operators_end_the_process(npu_environment: NpuEnvironment) -> None:
    program = "import torch, torch_npu; a = torch.zeros(3, device='npu'); print((a + a).cpu())"
    with pytest.raises(AssertionError, match="is not simulated"):
        npu_environment.run(program)
