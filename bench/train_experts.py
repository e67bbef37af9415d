"""End to end: layers of experts trained with FSDP2, plain and with quantized weights.

    torchrun --nproc-per-node 2 bench/train_experts.py [FORMAT …] [--layers 2] [--tokens 8192] [--steps 12]

A layer is an RMSNorm, a router over 32 experts of which a token takes 4, and SwiGLU experts of width 1536 at a
dimension of 4096: a slice of a model that is shaped like DeepSeek's. Attention is left out. bf16 is plain FSDP2
(fp32 parameters, computing in bfloat16, F.grouped_mm); a FORMAT quantizes the stacks, and runs `swiglu_experts`. The
configurations take turns, step by step, from the same values on the same tokens.

Step: median of the time between CUDA events around a step with its optimizer. Gathered: what a rank receives of one
layer's parameters, once. Kept: memory between forward and backward, less that before. Loss: the mean over the last
three steps, which should be near bf16's.
"""

import argparse
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Results, Row, Stopwatch, at_least, at_most
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qshard

DIM, WIDTH, EXPERTS, CHOSEN = 4096, 1536, 32, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM) / DIM**0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, WIDTH) / WIDTH**0.5)

    def forward(self, x, offs):
        if torch.ops.qshard.is_quantized(self.gate):
            return torch.ops.qshard.swiglu_experts(x, self.gate, self.up, self.down, offs)
        hidden = F.silu(F.grouped_mm(x, self.gate.mT, offs=offs)) * F.grouped_mm(x, self.up.mT, offs=offs)
        return F.grouped_mm(hidden, self.down.mT, offs=offs)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        normed = self.norm(x)
        weights, chosen = self.router(normed).float().softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
        rows = self.experts(normed[order // CHOSEN], counts.cumsum(0, dtype=torch.int32))
        weighted = rows * weights.flatten()[order].unsqueeze(1).to(rows.dtype)
        return x.index_add(0, order // CHOSEN, weighted)


class Training:
    """One configuration: its model, optimizer and records."""

    def __init__(self, name, layers, mesh):
        torch.manual_seed(0)
        self.name = name
        with torch.device("cuda"):
            self.model = nn.Sequential(*(Layer() for _ in range(layers)))
        if name != "bf16":
            qshard.quantize_(
                self.model, name, filter_fn=lambda module, name: False,
                parameter_fn=lambda parameter, name: parameter.dim() == 3,
            )  # fmt: skip
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in self.model:
            fully_shard(layer, mesh=mesh, mp_policy=bf16)
        fully_shard(self.model, mesh=mesh, mp_policy=bf16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.milliseconds, self.losses, self.kept = [], [], []

    def step(self, x, target):
        watch = Stopwatch("cuda")
        watch.mark()
        before = torch.cuda.memory_allocated()
        loss = F.mse_loss(self.model(x).float(), target.float())
        self.kept.append((torch.cuda.memory_allocated() - before) / 2**20)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        watch.mark()
        self.milliseconds.append(watch.intervals()[0])
        self.losses.append(loss.item())

    def gathered(self):
        """MiB that one layer's parameters take on the wire."""
        total = 0
        for parameter in self.model[0].parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if torch.ops.qshard.is_quantized(local):
                total += torch.ops.qshard.codes(local).nbytes
            else:
                total += 2 * local.numel()
        return total * dist.get_world_size() / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", default=["float8_blockwise"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank and step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    runs = [Training(name, args.layers, mesh) for name in ("bf16", *args.formats)]
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        x = torch.randn(args.tokens, DIM, device="cuda", dtype=torch.bfloat16)
        target = torch.randn(args.tokens, DIM, device="cuda", dtype=torch.bfloat16)
        for run in runs:
            run.step(x, target)
    plain, *others = runs
    results = Results("qshard train_experts", seconds=600)
    size = f"{args.layers} layers, {args.tokens} tokens, {dist.get_world_size()} GPUs"

    def of(run):
        yield Row(f"step, {run.name}", size, median(run.milliseconds[3:]), median(plain.milliseconds[3:]), "ms", at_most(0.75))
        yield Row(f"gathered, {run.name}", size, run.gathered(), plain.gathered(), "MiB", at_most(0.51))
        yield Row(f"kept, {run.name}", size, median(run.kept[3:]), median(plain.kept[3:]), "MiB", at_most(1))
        yield Row(f"loss, {run.name}", size, mean(run.losses[-3:]), mean(plain.losses[-3:]), "", at_least(0.99))

    for run in others:
        results.add(run.name, lambda: of(run))
    if dist.get_rank() == 0:
        results.save(args.json)
        results.print()
        print(qshard.backend_report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
