"""Gradients in few bits on the wire: the kernels, what training steps gain, and what blocks cost.

    python bench/gradients.py kernels [float8 mxfp8 nvfp4] # one GPU
    python bench/gradients.py blocks                       # CPU: errors of small parameters
    torchrun --nproc-per-node 2 bench/gradients.py steps   # a table of steps, with bytes sent

kernels: device time of a message's making and of the sum, next to the device's copy bandwidth in the
same run. Logical bytes per gradient, with v of its dtype and m of the message (1 + 1/128, 1 + 1/32,
1/2 + 1/16 + 1/1024): v + m to quantize, ranks x m + v / ranks each to sum.

steps: train_fsdp.py's model and loop for bf16, per tensor and nvfp4, each with plain reductions and with
reduce_gradients_; of bf16's step, and of the same recipe with plain reductions. `--over tcp` has NCCL
send over TCP sockets of this machine, as between nodes without RDMA; `--replicas 2` makes halves of the
ranks replicas (HSDP; all of them of two ranks: shards of one rank, whose gradients stay plain). Sent: bytes
that leave a rank per step by qshard.report.

blocks: relative errors of the gradients of a small Llama, trained for 60 steps on the standard library,
as FSDP2 packs them for some numbers of ranks: blocks of the flat buffer, which parameters share where one
ends, beside blocks that start anew with each parameter.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Results, Row, at_least, at_most, describe, environment, first_line
from measuring import interleaved, out_of_time, save, table, time_of

import qshard

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from data import StandardLibrary  # noqa: E402
from llama import Llama, LlamaConfig  # noqa: E402

ops = torch.ops.qshard
MESSAGE_BYTES = {"float8": 1 + 1 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16 + 1 / 1024}
TCP = {"NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1, "NCCL_IB_DISABLE": 1, "NCCL_SOCKET_IFNAME": "lo",
       "NCCL_NCHANNELS_PER_NET_PEER": 8, "NCCL_SOCKET_NTHREADS": 4, "NCCL_NSOCKS_PERTHREAD": 4}
CONFIGURATIONS = ("bf16", "bf16:reduced_float8", "float8_tensorwise",
                  "float8_tensorwise:reduced_float8", "nvfp4", "nvfp4:reduced_float8",
                  "nvfp4:reduced_nvfp4")


# ----------------------------------------------------------------------------------- kernels


def kernels(args):
    device = "cpu" if args.tiny else "cuda"
    numel = 1 << 16 if args.tiny else 218_112_000  # a layer of Llama-8B; a multiple of 8 x 128
    results = Results("qshard gradient kernels", args.seconds)
    copied = {}

    def copy():
        source = torch.randn(numel, device=device)
        target = torch.empty_like(source)
        (calls,) = interleaved([lambda: target.copy_(source)], device)
        copied["GB/s"] = 2 * source.nbytes / time_of(calls) / 1e3
        yield Row("copy", f"{numel}", copied["GB/s"], None, "GB/s")

    def share(name, shape, bytes, calls, goal):
        return Row(name, shape, bytes / time_of(calls) / 1e3, copied["GB/s"], "GB/s", goal)

    def both(format, dtype, ranks, ragged, rounding):
        n = numel // ranks - (3 if ragged else 0)
        values = torch.randn(ranks * n, device=device).to(dtype)
        state = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
        options = {"rounding": state} if rounding == "stochastic" else {}
        out = torch.empty(n, dtype=dtype, device=device)
        messages = ops.quantize_gradients(values, format, ranks, n)[None]
        made, summed = interleaved([
            lambda: ops.quantize_gradients(values, format, ranks, n, **options),
            lambda: ops.sum_gradients(messages, format, n, out, factor=1 / ranks),
        ], device)
        name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        shape = f"{ranks} x {n} {name}"
        v, m = dtype.itemsize, MESSAGE_BYTES[format]
        goal = at_least(0.85)
        kind = " stochastic" if rounding == "stochastic" else ""
        yield share(f"quantize {format}{kind}", shape, ranks * n * (v + m), made, goal)
        if rounding == "nearest":
            yield share(f"sum {format}", shape, n * (ranks * m + v), summed, goal)

    results.add("copy", copy)
    for format in args.configurations or MESSAGE_BYTES:
        for dtype in (torch.bfloat16, torch.float32):
            for ranks, ragged in ((2, False), (8, False), (2, True)):
                results.add(f"{format} {dtype} {ranks}",
                            lambda: both(format, dtype, ranks, ragged, "nearest"))
            for ranks, ragged in ((2, False), (8, False), (2, True)):
                results.add(f"{format} {dtype} {ranks} stochastic",
                            lambda: both(format, dtype, ranks, ragged, "stochastic"))
    results.save(args.json)
    results.print()


# ------------------------------------------------------------------------------------- steps


def steps(args):
    if args.over == "tcp":  # NCCL reads these when the first communicator is made
        os.environ.update({name: str(value) for name, value in TCP.items()})
    from train_fsdp import SLICE, TINY, Trainer, free_memory
    from training_report import Configuration

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                            timeout=timedelta(seconds=120))
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    shape, names = (ranks, 1), ("dp", "tp")
    if args.replicas > 1:
        shape = (args.replicas, ranks // args.replicas, 1)
        names = ("replicate", "shard", "tp")
    mesh = dist.device_mesh.init_device_mesh(device, shape, mesh_dim_names=names)
    args.seq_len = (TINY if args.tiny else SLICE).max_seq_len
    started, measured = time.monotonic(), {}
    for configuration in map(Configuration.parse, args.configurations or CONFIGURATIONS):
        if out_of_time(started, args.seconds, device):
            if is_first:
                print(f"SKIPPED {configuration}: {args.seconds:.0f} s are over", flush=True)
            continue
        free_memory(device)
        trainer = None
        try:
            trainer = Trainer(configuration, TINY if args.tiny else SLICE, args.seq_len, args, mesh)
            intervals, losses = trainer.train()
            ms = median(intervals)
            sent = qshard.report(trainer.model).sent()
            peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
            measured[configuration] = (ms, sent.weights, sent.gradients, peak, losses)
            if is_first:
                print(f"{configuration}: {ms:.1f} ms a step", flush=True)
        except Exception as error:
            print(f"FAILED {configuration} on rank {dist.get_rank()}: {first_line(error)}", flush=True)
        del trainer
    if is_first:
        of = f" as {args.replicas} replicas" if args.replicas > 1 else ""
        print(f"\ngradients, {ranks} ranks{of} over {args.over}: {describe(environment())}\n")
        print(step_table(measured))
        save(args.json, {"ranks": ranks, "replicas": args.replicas, "over": args.over,
                         "steps": {str(c): row for c, row in measured.items()}})
    dist.destroy_process_group()


def step_table(measured) -> str:
    header = ["", "step ms", "of bf16", "of plain reduction", "weights MB", "gradients MB", "peak GB",
              "loss 5", "last 10"]
    rows = []
    for configuration, (ms, weights, gradients, peak, losses) in measured.items():
        bf16 = next((row for c, row in measured.items() if str(c) == "bf16"), None)
        plain = measured.get(configuration.with_plain_reduction())
        last = losses[-10:]
        rows.append([
            configuration, f"{ms:.1f}", f"{ms / bf16[0]:.3f}" if bf16 else "",
            f"{ms / plain[0]:.3f}" if plain and configuration.reduced else "",
            f"{weights / 1e6:,.0f}", f"{gradients / 1e6:,.0f}", f"{peak:.2f}",
            f"{losses[4]:.4f}" if len(losses) > 4 else "", f"{sum(last) / len(last):.4f}",
        ])
    return table(header, rows)


# ------------------------------------------------------------------------------------ blocks


def blocks(args):
    torch.manual_seed(1)
    model = Llama(LlamaConfig(dim=128, hidden=352, layers=3, heads=8, max_seq_len=128))
    data = StandardLibrary(128, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
    for step in range(4 if args.tiny else 61):
        optimizer.zero_grad()
        inputs, targets = data.batch(step, 12, 0, 1)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        if step < 60:
            optimizer.step()
    results = Results("shared blocks", args.seconds)
    for format in MESSAGE_BYTES:
        for ranks in (3, 7, 8):
            results.add(f"{format} {ranks}", lambda: errors(model, format, ranks))
    results.save(args.json)
    results.print()


def errors(model, format: str, ranks: int):
    """The largest error of any layer, by parameter: in blocks of the flat buffer, and of its own."""
    largest = {}
    for layer in model.layers:
        names = [name for name, _ in layer.named_parameters()]
        shards = [packed(p.grad, ranks) for p in layer.parameters()]
        sizes = [shard.shape[1] for shard in shards]
        flat = sent(torch.cat(shards, 1), format).split(sizes, 1)
        for name, shard, shared in zip(names, shards, flat):
            of = [((got - shard).norm() / shard.norm()).item() for got in (shared, sent(shard, format))]
            before = largest.get(name, (shard.shape[1], 0, 0))
            largest[name] = (shard.shape[1], max(before[1], of[0]), max(before[2], of[1]))
    for name, (size, shared, own) in largest.items():
        yield Row(f"{format} {ranks} ranks", f"{name} {size}", shared, own, "error", at_most(1.1))


def packed(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    """(ranks, padded shard), as in FSDP2's flat buffer."""
    rows = -(-gradient.shape[0] // ranks)
    matrix = gradient.reshape(gradient.shape[0], -1)
    return F.pad(matrix, (0, 0, 0, rows * ranks - len(matrix))).view(ranks, -1)


def sent(shards: torch.Tensor, format: str) -> torch.Tensor:
    """What arrives."""
    ranks, n = shards.shape
    messages = ops.quantize_gradients(shards, format, ranks, n)
    out = torch.empty_like(shards).view(-1)
    ops.sum_gradients(messages[:, None], format, n, out)
    return out.view(shards.shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("kernels", "steps", "blocks"))
    parser.add_argument("configurations", nargs="*",
                        help="of kernels: formats; of steps: as train_fsdp.py's")
    parser.add_argument("--over", choices=("nccl", "tcp"), default="nccl")
    parser.add_argument("--replicas", type=int, default=1, help="of the model (HSDP)")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help="sequences per GPU")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--backend", default="inductor", help="torch.compile's")
    parser.add_argument("--seconds", type=float, default=400, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="on CPU, to try the script")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    {"kernels": kernels, "steps": steps, "blocks": blocks}[args.what](args)


if __name__ == "__main__":
    main()
