"""The benchmarks of training run to their end, on a tiny model: nothing else on a CPU runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
RUNS = {
    "train_fsdp.py": "bf16 float8_tensorwise:complex:plain_loss:clipped float8_blockwise:fused:complex:folded:grouped "
    "--no-host-times",
    "gradients.py": "steps bf16 float8_tensorwise:reduced_float8",
}


@pytest.mark.parametrize("script", RUNS)
def test_a_benchmark_runs(script, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(CHECKOUT / "bench" / script), *RUNS[script].split()]
    command += ["--tiny", "--steps", "3", "--warmup", "1", "--backend", "eager", "--json", str(tmp_path / "result.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "FAILED" not in run.stdout and (tmp_path / "result.json").stat().st_size > 100
