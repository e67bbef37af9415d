"""load_library alone, without importing the package, is enough to train and to checkpoint."""

import subprocess
import sys

import qshard

SCRIPT = """
import datetime, sys, tempfile
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

torch.ops.load_library(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
                        timeout=datetime.timedelta(seconds=20))
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
for module in (model[0], model[2]):
    quantized = torch.ops.qshard.quantize(module.weight.detach(), "float8_blockwise",
                                          keep_master=True)
    module.weight = torch.nn.Parameter(quantized)
    fully_shard(module, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
x = torch.randn(16, 48)
for _ in range(5):
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    before = model[0].weight.full_tensor()
    with torch.no_grad():
        model[0].weight.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    assert torch.equal(model[0].weight.full_tensor(), before)
assert torch.ops.qshard.is_quantized(model[0].weight.to_local())
assert "qshard" not in sys.modules
dist.destroy_process_group()
print("trained", losses[0], "->", losses[-1])
"""


def test_trains_and_checkpoints_without_the_package(tmp_path):
    script = tmp_path / "only_library.py"
    script.write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, str(script), qshard.library_path()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "trained" in result.stdout
