"""Host time of a quantized tensor against a plain one, measured side by side in one run.

    python bench/host_overhead.py [--device cpu|cuda] [--rounds N] [--format NAME]

Plain and quantized calls alternate, round by round, so that both see the same machine. On CUDA the
times are the host's: calls are enqueued, and the device is waited for outside the clock.
"""

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from measuring import describe, environment, save, synchronize, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_report import RECIPES

import qshard

HEADER = ("µs of the host", "plain", "(min)", "quantized", "(min)", "difference", "ratio", "goal",
          "met")


@dataclass
class Comparison:
    """One row of the result: times in µs, one per round."""

    name: str
    goal: str  # for people
    met: object  # (plain µs, quantized µs) -> bool, or None for no goal
    plain: list
    quantized: list

    def row(self) -> list[str]:
        p, q = median(self.plain), median(self.quantized)
        verdict = "" if self.met is None else "yes" if self.met(p, q) else "NO"
        times = [f"{t:.2f}" for t in (p, min(self.plain), q, min(self.quantized))]
        return [self.name, *times, f"{q - p:+.2f}", f"{q / p:.2f}x", self.goal, verdict]


def compare(name, plain, quantized, *, calls, rounds, goal="", met=None, per_call=1):
    """Times two callables in turn; `per_call`: how many units of work one call does."""
    clocks = [], []
    for _ in range(rounds + 1):  # the first round warms up
        for function, clock in zip((plain, quantized), clocks):
            synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                function()
            clock.append((time.perf_counter_ns() - start) / 1e3 / calls / per_call)
            synchronize()
    return Comparison(name, goal, met, clocks[0][1:], clocks[1][1:])


def native_ops(device, args):
    """Operators that a quantized tensor answers itself; small, so that the host's part shows."""
    x = torch.randn(64, 64, device=device)
    q = torch.ops.qshard.quantize(x, args.format, keep_master=True)
    target = torch.ops.qshard.quantize(x, args.format, keep_master=True)
    source = torch.randn_like(x)
    ops = {
        "detach": lambda t: t.detach(),
        "view": lambda t: t.view(64, 64),
        "slice": lambda t: t[:32],
        "narrow": lambda t: t.narrow(0, 16, 32),
        "split": lambda t: t.split(32),
        "chunk": lambda t: t.chunk(2),
        "as_strided": lambda t: t.as_strided((64, 64), (64, 1)),
        "t": lambda t: t.t(),
        "empty_like": lambda t: torch.empty_like(t),
        "new_zeros": lambda t: t.new_zeros(64, 64),
        "clone": lambda t: t.clone(),
    }
    within = dict(goal="plain + 0.5", met=lambda p, q: q <= p + 0.5)
    with torch.no_grad():
        for name, op in ops.items():
            yield compare(name, lambda: op(x), lambda: op(q), calls=500, rounds=args.rounds,
                          **within)
        # The master takes the values; the image follows at the next flush.
        yield compare("copy_ (from plain)", lambda: x.copy_(source), lambda: target.copy_(source),
                      calls=500, rounds=args.rounds, **within)


def unshard_reshard(device, args, parameters=32):
    """FSDP2's unshard and reshard of one group, per parameter; world size 1, so no waiting."""
    mesh = init_device_mesh(device, (1,))

    def group(quantized):
        layers = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(parameters)]
        model = nn.Sequential(*layers).to(device)
        if quantized:
            for layer in model:
                weight = layer.weight.detach()
                weight = torch.ops.qshard.quantize(weight, args.format, keep_master=True)
                layer.weight = nn.Parameter(weight)
        return fully_shard(model, mesh=mesh)

    def cycle(model):
        model.unshard()
        model.reshard()

    plain, quantized = group(False), group(True)
    yield compare(f"unshard + reshard, {parameters} parameters", lambda: cycle(plain),
                  lambda: cycle(quantized), calls=10, rounds=args.rounds, per_call=parameters,
                  goal="plain + 10", met=lambda p, q: q <= p + 10)


def linear(device, args, size=1024):
    """Stock nn.Linear, `size` rows, `size` in, `size` out, bfloat16."""
    plain = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
    quantized = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
    weight = torch.ops.qshard.quantize(plain.weight.detach(), args.format, keep_master=True)
    quantized.weight = nn.Parameter(weight)
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    gradient = torch.randn_like(x)

    def forward(layer):
        # Another tensor each time: the codes of one that was seen before would be there already.
        return layer(x.detach().requires_grad_())

    def both(layer):
        forward(layer).backward(gradient)
        layer.weight.grad = None

    calls = 20 if device == "cuda" else 1
    goal = dict(goal="2x", met=lambda p, q: q <= 2 * p) if device == "cuda" else {}
    label = f"{size}x{size}, {size} rows"
    yield compare(f"linear forward, {label}", lambda: forward(plain),
                  lambda: forward(quantized), calls=calls, rounds=args.rounds, **goal)
    yield compare(f"linear forward + backward, {label}", lambda: both(plain),
                  lambda: both(quantized), calls=calls, rounds=args.rounds, **goal)


def tensor_parallel(device, args, size=128, rows=64):
    """A column- and a row-parallel linear, sequence parallel, per linear; over a group that sends nothing.
    Plain: bfloat16, with torch's styles."""
    mesh = init_device_mesh(device, (2,))
    recipe = RECIPES.get(args.format)
    if recipe is None:
        return

    def model(styles, quantized):
        torch.manual_seed(0)
        up, down = nn.Linear(size, 2 * size, bias=False), nn.Linear(2 * size, size, bias=False)
        made = nn.Sequential(up, down).to(device)
        plan = {
            "0": styles.ColwiseParallel(input_layouts=Shard(1)),
            "1": styles.RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(made if quantized else made.bfloat16(), mesh, plan)
        return qshard.quantize_(made, recipe, tp_mesh=mesh) if quantized else made

    x = torch.randn(1, rows, size, device=device, dtype=torch.bfloat16)

    def forward(model):
        return model(x.detach().requires_grad_())

    def both(model):
        forward(model).sum().backward()
        model.zero_grad()

    plain = model(torch.distributed.tensor.parallel, False)
    within = dict(calls=10, rounds=args.rounds, per_call=2, goal="1.3x", met=lambda p, q: q <= 1.3 * p)
    for whose, styles in (("torch's", torch.distributed.tensor.parallel), ("our", qshard.tensor_parallel)):
        quantized = model(styles, True)
        name = f"tensor-parallel linear, {whose} styles"
        yield compare(f"{name}, forward", lambda: forward(plain), lambda: forward(quantized), **within)
        yield compare(f"{name}, + backward", lambda: both(plain), lambda: both(quantized), **within)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--format", default="float8_blockwise")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write medians and minima here")
    args = parser.parse_args()

    torch.manual_seed(0)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()  # a collection inside a round would be charged to the section that runs then
    results = []
    for section in (native_ops, unshard_reshard, linear):
        results += section(args.device, args)
        gc.collect()
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    results += tensor_parallel(args.device, args)
    dist.destroy_process_group()

    print(f"\nqshard host overhead: {args.format}, {describe(environment())}, "
          f"{torch.get_num_threads()} threads, median of {args.rounds} rounds\n")
    print(table(HEADER, [result.row() for result in results]))
    save(args.json, {r.name: {"plain": median(r.plain), "plain_min": min(r.plain),
                              "quantized": median(r.quantized), "quantized_min": min(r.quantized),
                              "goal": r.goal} for r in results})


if __name__ == "__main__":
    main()
