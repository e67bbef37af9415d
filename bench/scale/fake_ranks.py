"""One process as one rank of 1,024 or 8,192: local bytes beside the formula's, and host time beside plain FSDP2's.

    python bench/scale/fake_ranks.py [--ranks 1024 8192] [--meshes fsdp hsdp tp ep] [--rounds 5] [--json FILE]

torch's fake process group sends nothing and answers at once, so that a step is this rank's own work. The models are
narrow, on the CPU, with one thread; times are the process's own, so that other processes do not count. On each mesh the
first, the middle and the last rank run. A weight with more rows than ranks has rows on all of them, and a weight with
fewer has none on the last. The plain model and one of each format take turns, step by step; a step is forward, backward,
AdamW (with the flush) and zero_grad. The extra host time of a parameter is the median step, less the plain model's, over
the number of quantized parameters.
"""

import argparse
import gc
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import qshard

sys.path.insert(0, str(Path(__file__).resolve().parent))
from local_bytes import LocalBytes, Weight  # noqa: E402

PLAIN = "bf16"
FORMATS = ("float8_tensorwise", "float8_delayed", "float8_rowwise", "float8_blockwise", "mxfp8", "nvfp4")
MESHES = ("fsdp", "hsdp", "tp", "ep")
GROUP = 8  # replicas of HSDP, ranks of tensor and of expert parallelism
MOST_US = 20  # more host time for a parameter than plain FSDP2 takes
DIM, HIDDEN, ROWS, EXPERTS = 64, 704, 16384, 2048


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


class Experts(nn.Module):
    """Matrices of which each rank of the expert mesh has some; x has a row for each of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, DIM) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, 16) / 4)

    def forward(self, x):
        hidden = torch.bmm(x.expand(len(self.up.to_local()), -1, -1), self.up.to_local().mT)
        return x + torch.bmm(hidden, self.down.to_local().mT).mean(0, keepdim=True)


def make_mesh(kind: str, ranks: int) -> DeviceMesh:
    if kind == "fsdp":
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    if kind == "hsdp":
        return init_device_mesh("cpu", (GROUP, ranks // GROUP), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (ranks // GROUP, GROUP), mesh_dim_names=("shard", kind))


def quantize(model: nn.Module, one: str, format_of: Callable[[str], str], inner: DeviceMesh | None) -> None:
    """The weights whose format is `one`, stacks of experts among them."""
    qshard.quantize_(
        model,
        one,
        filter_fn=lambda _, name: format_of(f"{name}.weight") == one,
        parameter_fn=lambda parameter, name: parameter.dim() == 3 and format_of(name) == one,
        tp_mesh=inner,
    )


def make_model(kind: str, mesh: DeviceMesh, format_of: Callable[[str], str], blocks: int) -> nn.Module:
    """`format_of` gives the format of a weight by its name, or PLAIN."""
    torch.manual_seed(0)
    if kind == "ep":
        model = nn.Sequential(*(Experts() for _ in range(blocks)))
        for block in model:
            for name in ("up", "down"):
                part = distribute_tensor(getattr(block, name).detach(), mesh["ep"], [Shard(0)])
                setattr(block, name, nn.Parameter(part))
    else:
        model = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(DIM, ROWS, bias=False))
    if kind == "tp":
        plan = {str(blocks): ColwiseParallel()}
        for block in range(blocks):
            plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    formats = {format_of(name) for name, _ in model.named_parameters()}
    for one in sorted(formats - {PLAIN}):
        quantize(model, one, format_of, mesh[kind] if kind in ("tp", "ep") else None)
    data = mesh if kind == "hsdp" else mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mesh=data, mp_policy=policy)
    return fully_shard(model, mesh=data, mp_policy=policy)


def predicted(kind: str, name: str) -> Weight:
    """What FSDP2 cuts of a weight of make_model, from its whole shape."""
    is_up = ".up" in name
    if kind == "ep":
        whole = Weight(16, DIM, EXPERTS) if is_up else Weight(DIM, 16, EXPERTS)
        return whole.of_experts(GROUP)
    is_head = not (is_up or ".down" in name)
    whole = Weight(ROWS, DIM) if is_head else Weight(HIDDEN, DIM) if is_up else Weight(DIM, HIDDEN)
    if kind == "tp":
        return whole.cut_in_rows(GROUP) if is_up or is_head else whole.cut_in_columns(GROUP)
    return whole


def local_bytes(model: nn.Module) -> dict[str, LocalBytes]:
    """By the name of each quantized weight, what this rank holds."""
    weights = {name for name, p in model.named_parameters() if qshard.is_quantized(p)}
    return {
        row.name: LocalBytes(row.image, row.master, row.grid)
        for row in qshard.report(model)
        if row.image and row.name in weights
    }


def different(kind: str, mesh: DeviceMesh, model: nn.Module, format_of: Callable[[str], str]) -> list[str]:
    """Weights whose local bytes are not the formula's, with both."""
    shards, found = mesh["shard"].size(), local_bytes(model)
    expected = {name: predicted(kind, name).on_a_rank(format_of(name), shards) for name in found}
    return [f"{name}: {found[name]} for {expected[name]}" for name in found if found[name] != expected[name]]


def step(model: nn.Module, optimizer) -> None:
    x = torch.ones(1, 8, DIM)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def start(rank: int, ranks: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


@dataclass
class Result:
    mesh: str
    ranks: int
    rank: int
    format: str
    weights: int
    rows: int  # rows of all quantized weights that this rank has
    bytes: int  # image, master and grid of them
    different: list[str]
    ms: float = 0.0
    plain_ms: float = 0.0

    @property
    def us_more(self) -> float:
        return (self.ms - self.plain_ms) * 1e3 / self.weights


def measure(kind: str, ranks: int, rank: int, formats, rounds: int, blocks: int) -> list[Result]:
    start(rank, ranks)
    try:
        mesh = make_mesh(kind, ranks)
        models = {name: make_model(kind, mesh, lambda _: name, blocks) for name in (PLAIN, *formats)}
        optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}
        times = {name: [] for name in models}
        gc.disable()  # a collection would be charged to the model that runs then
        for i in range(rounds + 1):  # the first warms up
            for name, model in models.items():
                began = time.process_time_ns()
                step(model, optimizers[name])
                if i:
                    times[name].append((time.process_time_ns() - began) / 1e6)
        gc.enable()
        results = []
        for name in formats:
            found = local_bytes(models[name])
            rows = sum(p.to_local().shape[0] for n, p in models[name].named_parameters() if n in found)
            held = sum(b.image + b.master + b.grid for b in found.values())
            wrong = different(kind, mesh, models[name], lambda _: name)
            plain = median(times[PLAIN])
            results.append(
                Result(kind, ranks, rank, name, len(found), rows, held, wrong, median(times[name]), plain)
            )
        return results
    finally:
        dist.destroy_process_group()
        gc.collect()


def processor() -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


HEADS = (
    "mesh", "ranks", "rank", "format", "rows here", "bytes here", "as predicted", "step, ms", "plain, ms", "of plain",
    "µs more a parameter",
)  # fmt: skip


def cells(r: Result) -> list[str]:
    as_predicted = "yes" if not r.different else "NO: " + r.different[0]
    return [
        r.mesh, f"{r.ranks:,}", f"{r.rank:,}", f"`{r.format}`", f"{r.rows:,}", f"{r.bytes:,}", as_predicted,
        f"{r.ms:.1f}", f"{r.plain_ms:.1f}", f"{r.ms / r.plain_ms:.2f}", f"{r.us_more:+.0f}",
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--meshes", nargs="+", default=MESHES, choices=MESHES)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # A process for each rank: DTensor's caches keep meshes of earlier worlds.
    processes = multiprocessing.get_context("fork")
    results = []
    for ranks in args.ranks:
        for kind in args.meshes:
            for rank in (0, ranks // 2, ranks - 1):
                with processes.Pool(1) as pool:
                    new = pool.apply(measure, (kind, ranks, rank, args.formats, args.rounds, args.blocks))
                print(tabulate(map(cells, new), HEADS, "pipe", disable_numparse=True), flush=True)
                results += new
    wrong = sum(bool(r.different) for r in results)
    slow = sum(r.us_more > MOST_US for r in results)
    print(
        f"\ntorch {torch.__version__}, {processor()}, one thread, median of {args.rounds} steps. {len(results)} models: "
        f"{wrong} with other bytes than predicted, {slow} above {MOST_US} µs a parameter more than plain"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
