"""Trains a small Llama for the heat map of docs/watching.md: python docs/watched_model.py, a few minutes on a CPU.

Writes docs/figures/watched.json, which draw_figures.py draws.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import qshard

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "examples"))
from data import StandardLibrary  # noqa: E402
from llama import Llama, LlamaConfig  # noqa: E402

STEPS, EVERY = 101, 5
SIZE = LlamaConfig(dim=128, hidden=320, layers=3, heads=4, max_seq_len=64)
RECIPE = qshard.NVFP4BlockScaling(emulate=True)


def main():
    torch.manual_seed(1)
    model, data, found = Llama(SIZE), StandardLibrary(SIZE.max_seq_len, seed=1), {}
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"head"}
    qshard.quantize_(model, RECIPE, filter_fn=lambda module, name: name in linears)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    with qshard.watch(model, every=EVERY, to=found.__setitem__):
        for step in range(STEPS):
            inputs, targets = data.batch(step, 8, 0, 1)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                print(step, f"{loss.item():.3f}", flush=True)
    percent = {
        operand: {
            name: [round(100 * getattr(of_step[name], operand).underflow, 1) for of_step in found.values()]
            for name in found[0]
        }
        for operand in ("input", "gradient")
    }
    result = {"recipe": type(RECIPE).__name__, "steps": list(found), "underflow_percent": percent}
    (CHECKOUT / "docs/figures/watched.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
