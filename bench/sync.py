"""Seconds per weight sync: what a trainer under FSDP2 hands to an inference engine that holds FP8 in blocks of 128x128.

    torchrun --nproc-per-node 2 bench/sync.py [--syncs 9] [--vocabulary 32000] [--bucket-mib 256] [--json FILE]
    torchrun --nproc-per-node 2 bench/sync.py --device cpu --tiny

The model is an eight-layer slice of Llama-8B with fp32 masters, in which embedding and head stay plain and travel in
bf16 in every configuration (--vocabulary 0: without them). Each sync ends with all tensors copied into those that a
receiver holds on the device, of every rank or, for "to rank 0", of that rank alone:

    codes               quantized_tensors(model, layout="deepseek-fp8"): the trainer's codes and scales
    bf16, gathered      each parameter as bf16, DTensor.full_tensor(): no receiver has it yet
    bf16, requantized   that, quantized to 128x128 blocks by a plain function (compiled on a GPU), as trainers do today

The configurations take turns. Before each sync, outside the clock, the masters are written and flushed, as an optimizer's
step leaves them. Sync: seconds from a barrier until the device of the last rank has finished, median over the syncs.
Schedule: of these, until the stream is made: what ranks agree on, before the first tensor. Wire: MiB that the rank
sends that sends most. Peak: MiB of rank 0's device memory above what model and receivers hold.
"""

import argparse
import cProfile
import pstats
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from measuring import Results, Row, at_most, synchronize
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qshard
from qshard.checkpoint import quantized_tensors

BLOCK, LARGEST = 128, 448.0
SLICE = {"layers": 8, "dim": 4096, "hidden": 14336, "key_values": 1024}
TINY = {"layers": 2, "dim": 256, "hidden": 512, "key_values": 128}


class Parts(nn.Module):
    """Modules by their names. A sync runs no forward; fully_shard wants modules that have one."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self):
        raise NotImplementedError


def slice_of_llama(layers, dim, hidden, key_values, vocabulary):
    def linear(rows, columns):
        return nn.Linear(columns, rows, bias=False)

    def layer():
        attention = Parts(
            q_proj=linear(dim, dim), k_proj=linear(key_values, dim), v_proj=linear(key_values, dim), o_proj=linear(dim, dim)
        )
        mlp = Parts(gate_proj=linear(hidden, dim), up_proj=linear(hidden, dim), down_proj=linear(dim, hidden))
        norms = {name: nn.RMSNorm(dim) for name in ("input_layernorm", "post_attention_layernorm")}
        return Parts(self_attn=attention, mlp=mlp, **norms)

    ends = {"embed_tokens": nn.Embedding(vocabulary, dim), "lm_head": linear(vocabulary, dim)} if vocabulary else {}
    return Parts(layers=nn.ModuleList(layer() for _ in range(layers)), norm=nn.RMSNorm(dim), **ends)


def quantize_in_blocks(weight):
    """(codes, scale_inv), the scale of a block its amax / 448, as receivers of bf16 make them."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), scale


def trainer(args, mesh, is_quantized):
    torch.manual_seed(0)
    with torch.device(args.device):
        model = slice_of_llama(**(TINY if args.tiny else SLICE), vocabulary=args.vocabulary)
    if is_quantized:
        qshard.quantize_(model, "float8_blockwise", filter_fn=lambda module, name: name != "lm_head")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Sync:
    """One configuration: a trainer's model, its receiver's tensors and its records."""

    def __init__(self, name, model, args, mesh):
        self.name, self.model, self.args, self.mesh = name, model, args, mesh
        self.is_codes = name.startswith("codes")
        self.quantize = torch.compile(quantize_in_blocks, dynamic=False) if args.device == "cuda" else quantize_in_blocks
        self.seconds, self.schedules, self.peak, self.sent, self.received = [], [], 0, 0, {}
        self()  # makes the receiver's tensors

    def receive(self, name, tensor):
        if name in self.received:
            self.received[name].copy_(tensor)
        else:
            self.received[name] = tensor.clone()

    def __call__(self):
        """Seconds until the schedule was fixed."""
        return self.send_codes() if self.is_codes else self.send_bf16()

    def send_codes(self):
        dst, begin = 0 if self.name.endswith("rank 0") else None, time.perf_counter()
        stream = quantized_tensors(
            self.model, layout="deepseek-fp8", dst=dst, bucket_bytes=self.args.bucket_mib * 2**20
        )
        schedule = time.perf_counter() - begin
        for name, tensor in stream:
            self.receive(name, tensor)
        self.sent = sum(vars(stream.sent()).values())
        return schedule

    @torch.no_grad()
    def send_bf16(self):
        self.sent = 0
        for name, parameter in self.model.named_parameters():
            whole = parameter.to(torch.bfloat16).full_tensor()
            self.sent += 2 * parameter.to_local().numel() * (self.mesh.size() - 1)
            if self.name.endswith("gathered"):
                continue
            if "_proj" in name:
                codes, scale = self.quantize(whole)
                self.receive(name, codes)
                self.receive(f"{name}_scale_inv", scale)
            else:
                self.receive(name, whole)
        return 0.0

    @torch.no_grad()
    def write(self):
        for parameter in self.model.parameters():
            parameter.to_local().mul_(0.999)
        if self.is_codes:
            qshard.flush(self.model)

    def measure(self):
        self.write()
        on_gpu = self.args.device == "cuda"
        synchronize()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        schedule = self()
        synchronize()
        measured = torch.tensor([time.perf_counter() - begin, schedule, self.sent], dtype=torch.double, device=self.args.device)
        if on_gpu:
            self.peak = max(self.peak, (torch.cuda.max_memory_allocated() - before) / 2**20)
        dist.all_reduce(measured, dist.ReduceOp.MAX)
        seconds, schedule, self.sent = measured.tolist()
        self.seconds.append(seconds)
        self.schedules.append(schedule)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that this works")
    parser.add_argument("--vocabulary", type=int, help="0: no embedding and no head; default 32000")
    parser.add_argument("--syncs", type=int, default=9, help="of each configuration, after one that is not counted")
    parser.add_argument("--bucket-mib", type=int, default=256, help="of quantized_tensors")
    parser.add_argument("--profile", action="store_true", help="of host functions, in one more sync of codes on rank 0")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    if args.vocabulary is None:
        args.vocabulary = 256 if args.tiny else 32000
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(args.device, (ranks,))
    codes, plain = (trainer(args, mesh, is_quantized) for is_quantized in (True, False))
    models = {"codes": codes, "codes, to rank 0": codes, "bf16, gathered": plain, "bf16, requantized": plain}
    syncs = {name: Sync(name, model, args, mesh) for name, model in models.items()}
    for _ in range(args.syncs):
        for sync in syncs.values():
            sync.measure()
    results = Results("qshard sync", seconds=600)
    layers = len(codes.layers)
    size = f"{layers} layers, vocabulary {args.vocabulary}, {ranks} ranks"
    reference = syncs["bf16, requantized"]

    def of(sync):
        goal = at_most(0.5) if sync.name == "codes" else None
        yield Row(f"sync, {sync.name}", size, 1e3 * median(sync.seconds), 1e3 * median(reference.seconds), "ms", goal)
        if sync.is_codes:
            yield Row(f"schedule, {sync.name}", size, 1e3 * median(sync.schedules), None, "ms")
        yield Row(f"wire, {sync.name}", size, sync.sent / 2**20, reference.sent / 2**20, "MiB")
        if args.device == "cuda":
            yield Row(f"peak, {sync.name}", size, sync.peak, reference.peak, "MiB")

    for sync in syncs.values():
        if rank == 0:
            results.add(sync.name, lambda: of(sync))
    if rank == 0:
        results.save(args.json)
        results.print()
    if args.profile:
        with cProfile.Profile() as profile:
            syncs["codes"]()
            synchronize()
        if rank == 0:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(50)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
