"""examples/finetune.py runs as its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import qshard

BUDGET_S = 60  # two processes that import transformers
SCRIPT = Path(__file__).parents[4] / "examples" / "finetune.py"
SMALL = "--steps 3 --width 32 --layers 1 --length 32 --batch 2".split()


def run(folder, *arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "QSHARD_LIBRARY": qshard.library_path()}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(folder), *SMALL, *arguments],
        capture_output=True, text=True, timeout=240, env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_it_trains_all_weights_and_then_adapters(tmp_path):
    done = run(tmp_path)
    assert "optimizer: torch.optim.adamw.AdamW: known" in done.stdout
    assert "3/3" in done.stderr  # the progress bar
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    run(tmp_path, "--lora", "--format", "nvfp4")
    assert (tmp_path / "lora.png").stat().st_size > 10_000
    assert (tmp_path / "nvfp4-lora" / "adapter_model.safetensors").exists()
