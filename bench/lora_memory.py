"""Peak memory and time of a LoRA step over a frozen base, plain bf16 and quantized: a slice of Llama's layers on one
GPU. Autograd keeps of a frozen linear what plain torch keeps, so the quantized base takes no more than the plain one.

    python bench/lora_memory.py [--layers 8] [--dim 4096] [--tokens 4096] [--compiled]

A row: bytes of parameters, peak memory of steps above what was there before the model, and median ms of a step.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import qshard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from llama import Llama, LlamaConfig  # noqa: E402

RECIPES = {
    "bf16": None,
    "float8_tensorwise": qshard.Float8CurrentScaling(),
    "float8_delayed": qshard.DelayedScaling(),
    "float8_blockwise": qshard.Float8BlockScaling(),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
}


class Adapted(nn.Module):
    """A frozen linear and its low-rank update."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        options = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, **options)
        self.up = nn.Linear(rank, base.out_features, **options)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module, rank: int) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.layers:
        for parent in (layer.attention, layer.ffn):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child, rank))
    return model


def measure(recipe, args, device):
    torch.manual_seed(0)
    start = torch.cuda.memory_allocated() if device == "cuda" else 0
    config = LlamaConfig(vocab=args.vocab, dim=args.dim, layers=args.layers, heads=args.dim // 128 or 1,
                         kv_heads=max(args.dim // 512, 1), hidden=args.dim * 7 // 2, max_seq_len=args.tokens)
    with torch.device(device):
        model = Llama(config).bfloat16()
    if recipe is not None:
        in_layers = lambda _, name: name.startswith("layers.")  # noqa: E731
        qshard.quantize_(model, recipe, filter_fn=in_layers, keep_master=False)
    model = adapted(model, args.rank)
    held = torch.cuda.memory_allocated() - start if device == "cuda" else 0
    run = torch.compile(model) if args.compiled else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = torch.randint(args.vocab, (1, args.tokens), device=device)
    times = []
    for step in range(args.steps + args.warmup):
        if step == args.warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        logits = run(tokens)
        nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() - start if device == "cuda" else 0
    return held, peak, median(times[args.warmup :]) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=list(RECIPES), help=f"of {', '.join(RECIPES)}")
    for name, default in dict(layers=8, dim=4096, tokens=4096, vocab=8192, rank=16, steps=5, warmup=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = None
    print(f"{'base':20}{'parameters':>14}{'peak':>14}{'of bf16':>9}{'ms':>9}")
    for name in args.formats:
        held, peak, ms = measure(RECIPES[name], args, device)
        plain = peak if name == "bf16" else plain
        share = f"{peak / plain:.2f}" if plain else "-"
        print(f"{name:20}{held / 1e6:11.0f} MB{peak / 1e6:11.0f} MB{share:>9}{ms:9.1f}", flush=True)


if __name__ == "__main__":
    main()
