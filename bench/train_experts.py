"""End to end: layers of experts trained with FSDP2, plain and with quantized weights.

    torchrun --nproc-per-node 2 bench/train_experts.py [CONFIGURATION …] [--layers 2] [--tokens 8192] [--steps 12]
    torchrun --nproc-per-node 2 bench/train_experts.py --ep 2 [float8_blockwise float8_blockwise:values]

A layer is an RMSNorm, a router over 32 experts of which a token takes 4, and SwiGLU experts of width 1536 at a
dimension of 4096: a slice of a model that is shaped like DeepSeek's. Attention is left out. bf16 is plain FSDP2
(fp32 parameters, computing in bfloat16, F.grouped_mm); a format quantizes the stacks, and runs `swiglu_experts`. The
configurations take turns, step by step, from the same values on the same tokens.

--ep N: N ranks share the experts of a layer, and FSDP2 is over the others. bf16 sends a row for each expert of a token,
as torchtitan's ExpertParallel does. qshard.TokenDispatcher sends tokens to the experts of a format: in codes, or, as
FORMAT:values says, in bf16. bf16:values are plain experts that get tokens so.

Step: median of the time between CUDA events around a step with its optimizer. Gathered: what a rank receives of one
layer's parameters, once. Dispatched: what a rank sends to experts of all ranks in a step, tokens and gradients of
results; exchanged: these, results, gradients of tokens, and numbers. Kept: memory between forward and backward, less
that before. Loss: the mean over the last three steps, which should be near bf16's.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from measuring import Results, Row, Stopwatch, at_least, at_most
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import qshard

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from metering import collective_bytes  # noqa: E402

EXPERTS, CHOSEN = 32, 4
DIM, WIDTH = (4096, 1536) if "--tiny" not in sys.argv else (256, 96)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM) / DIM**0.5)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, DIM) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, WIDTH) / WIDTH**0.5)

    def forward(self, x, offs):
        gate, up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.gate, self.up, self.down))
        if torch.ops.qshard.is_quantized(gate):
            return torch.ops.qshard.swiglu_experts(x, gate, up, down, offs)
        hidden = F.silu(F.grouped_mm(x, gate.mT, offs=offs)) * F.grouped_mm(x, up.mT, offs=offs)
        return F.grouped_mm(hidden, down.mT, offs=offs)

    def distribute(self, mesh):
        for name, stack in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(stack.detach(), mesh, [Shard(0)])))


class RowsByExpert:
    """Sends bfloat16 rows, one for each expert of a token, in plain torch."""

    def __init__(self, mesh):
        self.group, self.ranks = mesh.get_group(), mesh.size()

    def dispatch(self, x, ids, format):
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=EXPERTS).view(self.ranks, -1)
        arriving = funcol.all_to_all_single(counts, None, None, self.group)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = x.index_select(0, order // CHOSEN)
        rows = funcol.all_to_all_single_autograd(rows, received, sent, self.group)
        experts = torch.arange(arriving.shape[1], device=x.device).repeat(self.ranks)
        by_expert = experts.repeat_interleave(arriving.flatten(), output_size=len(rows)).argsort(stable=True)
        return rows.index_select(0, by_expert), arriving.sum(0), (len(x), order, by_expert, sent, received)

    def combine(self, rows, routes, weights):
        tokens, order, by_expert, sent, received = routes
        rows = torch.zeros_like(rows).index_copy(0, by_expert, rows)
        rows = funcol.all_to_all_single_autograd(rows, sent, received, self.group)
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return rows.new_zeros(tokens, rows.shape[1]).index_add(0, order // CHOSEN, rows)


class Layer(nn.Module):
    """dispatcher: what sends tokens, or None; format: tokens travel in its codes, or as values without."""

    def __init__(self, dispatcher, format):
        super().__init__()
        self.dispatcher, self.format = dispatcher, format
        self.norm = nn.RMSNorm(DIM)
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        normed = self.norm(x)
        weights, chosen = self.router(normed).float().softmax(-1).topk(CHOSEN)
        if self.dispatcher is not None:
            rows, counts, routes = self.dispatcher.dispatch(normed, chosen, self.format)
            rows = self.experts(rows, counts.cumsum(0, dtype=torch.int32))
            return x + self.dispatcher.combine(rows, routes, weights.to(rows.dtype))
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
        rows = self.experts(normed[order // CHOSEN], counts.cumsum(0, dtype=torch.int32))
        weighted = rows * weights.flatten()[order].unsqueeze(1).to(rows.dtype)
        return x.index_add(0, order // CHOSEN, weighted)


class Training:
    """One configuration: its model, optimizer and records."""

    def __init__(self, name, layers, mesh, expert_mesh):
        torch.manual_seed(0)
        self.name, is_parallel = name, expert_mesh["ep"].size() > 1
        format, _, option = name.partition(":")
        if option not in ("", "values"):
            raise SystemExit(f"{name}: unknown {option}")
        dispatcher = None
        if is_parallel:
            mesh_of_experts = expert_mesh["ep"]
            is_plain = name == "bf16"
            dispatcher = RowsByExpert(mesh_of_experts) if is_plain else qshard.TokenDispatcher(EXPERTS, mesh_of_experts)
        with torch.device(DEVICE):
            self.model = nn.Sequential(
                *(Layer(dispatcher, None if "bf16" == format or option else format) for _ in range(layers))
            )
        for layer in self.model if is_parallel else ():
            layer.experts.distribute(expert_mesh["ep"])
        if format != "bf16":
            qshard.quantize_(
                self.model, format, filter_fn=lambda module, name: False,
                parameter_fn=lambda parameter, name: parameter.dim() == 3,
                tp_mesh=expert_mesh["ep"] if is_parallel else None,
            )  # fmt: skip
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in self.model:
            if is_parallel:
                experts = fully_shard(layer.experts, mesh=expert_mesh["efsdp"], mp_policy=bf16)
                experts.set_gradient_divide_factor(mesh.size())
                experts.set_force_sum_reduction_for_comms(DEVICE == "cpu")  # gloo cannot multiply first
            fully_shard(layer, mesh=mesh, mp_policy=bf16)
        fully_shard(self.model, mesh=mesh, mp_policy=bf16)
        experts = [p for layer in self.model for p in layer.experts.parameters()]
        others = [p for p in self.model.parameters() if not any(p is expert for expert in experts)]
        groups = [{"params": others}, {"params": experts}]  # an operator on several DTensors takes one mesh
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        self.milliseconds, self.losses, self.kept = [], [], []

    def step(self, x, target):
        watch = Stopwatch(DEVICE)
        watch.mark()
        before = allocated()
        loss = F.mse_loss(self.model(x).float(), target.float())
        self.kept.append((allocated() - before) / 2**20)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        watch.mark()
        self.milliseconds.append(watch.intervals()[0])
        self.losses.append(loss.item())

    def exchanged(self, x, target):
        """MiB of a step's all-to-alls: of those in codes, and all."""
        with collective_bytes(by_dtype=True) as bytes:
            self.step(x, target)
        self.milliseconds.pop(), self.losses.pop(), self.kept.pop()
        found = {dtype: n / 2**20 for (name, dtype), n in bytes.items() if name == "alltoall_base"}
        return found.get("unsigned char", 0), sum(found.values())

    def gathered(self):
        """MiB that one layer's parameters take on the wire."""
        total = 0
        for parameter in self.model[0].parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if torch.ops.qshard.is_quantized(local):
                total += torch.ops.qshard.codes(local).nbytes
            else:
                total += 2 * local.numel()
        return total * dist.get_world_size() / 2**20


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="*", default=["float8_blockwise"])
    parser.add_argument("--ep", type=int, default=1, help="ranks that share experts")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank and step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to try the script")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    experts = init_device_mesh(DEVICE, (mesh.size() // args.ep, args.ep), mesh_dim_names=("efsdp", "ep"))
    runs = [Training(name, args.layers, mesh, experts) for name in ("bf16", *args.configurations)]
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(args.steps):
        x = torch.randn(args.tokens, DIM, device=DEVICE, dtype=torch.bfloat16)
        target = torch.randn(args.tokens, DIM, device=DEVICE, dtype=torch.bfloat16)
        for run in runs:
            run.step(x, target)
    sent = {run: run.exchanged(x, target) for run in runs} if args.ep > 1 else {}
    plain, *others = runs
    results = Results("qshard train_experts", seconds=600)
    size = f"{args.layers} layers, {args.tokens} tokens, {dist.get_world_size()} GPUs"

    def of(run):
        yield Row(f"step, {run.name}", size, median(run.milliseconds[3:]), median(plain.milliseconds[3:]), "ms", at_most(0.75))
        if not sent:
            yield Row(f"gathered, {run.name}", size, run.gathered(), plain.gathered(), "MiB", at_most(0.51))
        if sent:
            (codes, exchanged), (_, of_plain) = sent[run], sent[plain]
            # Half of the plain rows are tokens and gradients of results, which this run may send in codes.
            if codes:
                yield Row(f"dispatched, {run.name}", size, codes, of_plain / 2, "MiB", at_most(0.53))
            yield Row(f"exchanged, {run.name}", size, exchanged, of_plain, "MiB")
        if DEVICE == "cuda":
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
