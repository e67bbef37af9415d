"""End to end: eight layers of Llama-8B trained with FSDP2, plain and with quantized weights.

    torchrun --nproc-per-node 2 bench/train_fsdp.py [CONFIGURATION …] [--steps 20] [--breakdown]
    torchrun --nproc-per-node 2 bench/train_fsdp.py --tp 2 [CONFIGURATION …]
    python bench/train_fsdp.py --tp 2 --one-rank [CONFIGURATION …]
    torchrun --nproc-per-node 4 bench/train_fsdp.py --replicas 2 [CONFIGURATION …]

A CONFIGURATION is bf16 (plain FSDP2: fp32 parameters, computing in bf16), a format, or a peer of
peers.py (torchao_tensorwise, torchao_rowwise, te_tensorwise, te_blockwise, te_delayed: torchao or
TransformerEngine must be there), with options after colons:
    compiled       torch.compile of each block, before fully_shard
    checkpointed   activation checkpointing of each block
    no_master      bf16 parameters and moments; quantized weights keep no master
    fused          norms, MLPs and rotary embeddings as fused steps (qshard.fuse_)
    modules        blocks of qshard.nn.TransformerLayer: one qkv weight, one of gate and up
    fsdp1          FullyShardedDataParallel; weights stay plain, and its all-gathers carry codes
    reduced_FORMAT gradients reduced in float8, mxfp8 or nvfp4 (qshard.reduce_gradients_)
    stock          under --tp: torch's styles, not qshard.tensor_parallel's
    watched        qshard.watch, which samples one of --watch steps
    fp8_weights    of te_*: parameters in FP8, gathered in FP8, and TransformerEngine's FusedAdam
and for the model as people write it, whose other parts are not the fastest that there are:
    complex        rotary embeddings by complex numbers, as in Meta's Llama and torchtitan
    plain_loss     the loss is not compiled
    clipped        torch.nn.utils.clip_grad_norm_ before each step
    folded         qshard.clip_grad_norm_, which leaves the division to AdamW
    grouped        embedding and head are FSDP2 groups of their own, as in torchtitan
    kept           reshard_after_forward=False: gathered weights stay until backward
    head           the head is quantized too, and one step with the loss (qshard.nn.linear_cross_entropy)
    head_backward  such a step of a plain head in bf16, whose backward alone multiplies codes
    selective      selective activation checkpointing, every second product saved, as in torchtitan
They run one after the other in one process, peers last, each from the same initial values on the
same text. Each is compared with bf16 of the same options, if that runs too, and ours with its peer.

The cross-entropy is compiled in every configuration without `plain_loss`, eager ones and peers too (not under
--tp): in eager mode it takes three times the logits' memory, and time that no weight has a part in.

Step time: median between CUDA events at the ends of steps, after warm-up. Memory: peak while the
model is made (whole, on each GPU, then sharded), between steps, and peak of a step; the arithmetic
beside it is 13 B per quantized parameter (codes 1, master 4, moments 8) and 12 B per plain one, 5
and 6 B with no_master; 12 B of all with fsdp1; with fp8_weights 16 B of plain ones, which have masters
too. All-gather per layer: what a rank receives of one layer's parameters, once. Host times: FSDP's
pre_forward of a block, and forward with backward (128 tokens a sequence) and optimizer.step() of four, on an
idle GPU; the eager configurations take turns. A step includes our flush, and torchao's precomputed scales.
Span, idle and gaps: of one profiled step on rank 0, between its first and its last kernel; idle is the time in
which none ran but NCCL's, gaps how many times that was. --trace FILE: FILE-CONFIGURATION.json is Chrome's trace
of that step.

--tp N: tensor parallelism over N ranks, sequence parallel, with loss_parallel; FSDP2 over the others.
bf16 takes torch's styles. Activations gathered: bytes that a rank has after the all-gathers of one step
that are not FSDP2's, forward and backward: of each layer's two inputs and two gradients of outputs, of
the head's input, and of the gradient of the embedding's output. --one-rank: the part of one of these ranks,
on one GPU, without the link's time (one_rank_group.py).

--replicas N: HSDP, N replicas of the model, each sharded over the other ranks.
"""

import argparse
import contextlib
import functools
import gc
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import one_rank_group
import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama_of_modules import LlamaOfModules, LlamaWithComplexRotary
from measuring import (
    Stopwatch,
    first_line,
    gathered_activations,
    out_of_time,
    profile_step,
    save,
    synchronize,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.distributed.tensor.parallel import style as stock_styles
from training_report import (
    PLAIN,
    RECIPES,
    Configuration,
    HostTimes,
    Result,
    mean_of_watched,
    record,
    show,
)

import qshard

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from data import StandardLibrary  # noqa: E402
from llama import FeedForward, Llama, LlamaConfig, Rotary, tensor_parallel_plan  # noqa: E402

qshard.fuse.register(FeedForward, qshard.fuse.GatedMLP("gate", "up", "down", F.silu))
qshard.fuse.register(Rotary, qshard.fuse.Rotary(keeps_dtype=True))

DEFAULT = [Configuration(name, compiled) for compiled in (False, True)
           for name in (PLAIN, "float8_tensorwise", "float8_blockwise")]
SLICE = LlamaConfig(vocab=32000, dim=4096, layers=8, heads=32, kv_heads=8, hidden=14336,
                    max_seq_len=4096)
TINY = LlamaConfig(vocab=256, dim=64, layers=2, heads=4, kv_heads=2, hidden=160, max_seq_len=32)


@functools.cache
def text(seq_len: int) -> StandardLibrary:
    return StandardLibrary(seq_len, seed=1)


def all_but_head(module, name: str) -> bool:
    return name != "head"


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trainer:
    """One configuration: model, optimizer, text."""

    def __init__(self, configuration: Configuration, size: LlamaConfig, seq_len, args, mesh):
        self.configuration, self.args, self.device = configuration, args, mesh.device_type
        self.is_tensor_parallel = mesh["tp"].size() > 1
        self.after_update = lambda: None
        self.model = self.build(size, mesh)
        arguments = dict(lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        if configuration.fp8_weights:
            self.optimizer = peers.te_optimizer(self.model, self.whole_model(size), **arguments)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **arguments)
        self.watch = qshard.watch(self.model, args.watch) if configuration.watched else None
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / 20, total_iters=20)
        tensor = mesh["tp"].size()
        data, parts, part = text(seq_len), mesh.size() // tensor, dist.get_rank() // tensor
        self.tokens = args.batch * seq_len * parts  # of a step
        # DTensors of loss_parallel have rules of their own.
        is_plain = self.is_tensor_parallel or configuration.plain_loss
        self.cross_entropy = cross_entropy if is_plain else torch.compile(cross_entropy, backend=args.backend)
        steps = [data.batch(step, args.batch * parts, part, parts) for step in range(args.steps)]
        self.batches = [[part.to(self.device) for part in batch] for batch in steps]

    def whole_model(self, size: LlamaConfig, is_fp8: bool = False) -> Llama:
        name = self.configuration.format
        torch.manual_seed(1)  # the same on every rank and for every configuration
        with torch.device(self.device):
            if name in peers.TE:
                return peers.te_llama_of_fp8(size, name) if is_fp8 else peers.te_llama(size, name)
            if self.configuration.modules:
                return LlamaOfModules(size, self.is_tensor_parallel)
            return LlamaWithComplexRotary(size) if self.configuration.complex else Llama(size)

    def build(self, size: LlamaConfig, mesh):
        configuration = self.configuration
        model = self.whole_model(size, configuration.fp8_weights)
        if configuration.no_master:
            model.to(torch.bfloat16)
        if configuration.format in peers.TORCHAO:
            peers.convert(model, configuration.format, all_but_head)
            self.after_update = peers.after_update(model)
        is_stock = configuration.stock or configuration.format == PLAIN
        if self.is_tensor_parallel:
            styles = stock_styles if is_stock else qshard.tensor_parallel
            plan = tensor_parallel_plan(size.layers, styles, is_loss_parallel=True)
            if configuration.modules:
                plan = {name: style for name, style in plan.items() if not name.startswith("layers.")}
                for layer in model.layers:
                    layer.set_device_mesh(mesh["tp"])
            parallelize_module(model, mesh["tp"], plan)
        if configuration.format in RECIPES:
            qshard.quantize_(model, RECIPES[configuration.format],
                             weights="dynamic" if configuration.fsdp1 else "quantized",
                             keep_master=not configuration.no_master,
                             filter_fn=None if configuration.head else all_but_head,
                             tp_mesh=mesh["tp"] if self.is_tensor_parallel and is_stock else None)
        if configuration.fused:
            qshard.fuse_(model)
        dtypes = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        names = mesh.mesh_dim_names[:-1]  # ("dp",), or ("replicate", "shard")
        data_mesh = mesh[names if len(names) > 1 else names[0]]
        if configuration.fsdp1:
            shard = functools.partial(FullyShardedDataParallel, device_mesh=data_mesh,
                                      device_id=next(model.parameters()).device,
                                      mixed_precision=MixedPrecision(**dtypes),
                                      use_orig_params=True)
        else:
            # TransformerEngine's blocks are given float32 angles, and hidden states that are bf16 anyway.
            policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=configuration.format not in peers.TE)
            shard = functools.partial(fully_shard, mesh=data_mesh, mp_policy=policy,
                                      reshard_after_forward=not configuration.kept)
        for i, layer in enumerate(model.layers):
            if configuration.checkpointed:
                layer = model.layers[i] = checkpoint_wrapper(layer)
            if configuration.selective:
                contexts = qshard.selective_context_fn(every_second_matmul=True)
                layer = model.layers[i] = checkpoint_wrapper(layer, context_fn=contexts)
            if configuration.compiled:
                layer.compile(backend=self.args.backend)
            model.layers[i] = shard(layer)
        if configuration.grouped:
            shard(model.embedding)
            shard([model.norm, model.head], reshard_after_forward=False)
            model = shard(model, reshard_after_forward=None)
        else:
            model = shard(model)
        if configuration.fsdp1 and configuration.format != PLAIN:
            qshard.prepare_for_fsdp1(model)
        if configuration.reduced:
            qshard.reduce_gradients_(model, configuration.reduced)
        return model

    def forward_backward(self, step: int):
        inputs, targets = self.batches[step % len(self.batches)]
        with loss_parallel() if self.is_tensor_parallel else contextlib.nullcontext():
            # The logits have no name here: they live as long as the loss needs them.
            if self.configuration.has_coded_head:
                loss = self.model(inputs, functools.partial(self.head_and_loss, targets))
            else:
                loss = self.cross_entropy(self.model(inputs), targets)
            loss.backward()
        loss = loss.detach()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def head_and_loss(self, targets, x, weight):
        of_plain = {} if self.configuration.head else dict(format=self.configuration.format, forward_precision="bf16")
        return qshard.nn.linear_cross_entropy(x, weight, targets, **of_plain)

    def update(self):
        if self.configuration.clipped:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.configuration.folded:
            qshard.clip_grad_norm_(self.model.parameters(), 1.0, self.optimizer)
        self.optimizer.step()
        self.after_update()

    def step(self, step: int):
        loss = self.forward_backward(step)
        self.update()
        self.optimizer.zero_grad()
        return loss

    def train(self) -> tuple[list[float], list[float]]:
        """ms of each step, and the losses, means over the ranks. The device is not waited for between
        steps."""
        losses, watch = [], Stopwatch(self.device)
        for step in range(self.args.steps):
            if step == self.args.warmup:
                reset_peak(self.device)
                watch.mark()
            losses.append(self.step(step))
            self.schedule.step()
            if step >= self.args.warmup:
                watch.mark()
        losses = torch.stack(losses)
        dist.all_reduce(losses)
        return watch.intervals(), (losses / dist.get_world_size()).tolist()

    @torch.no_grad()
    def bytes(self) -> tuple[float, float]:
        """GB that the parameters and moments of this rank take by arithmetic; MB that FSDP gathers
        of one layer."""
        if self.configuration.fsdp1:
            rows = qshard.report(self.model)
            gathered = sum(row.gathered for row in rows if row.name.startswith("layers.0."))
            return 3 * sum(row.image for row in rows) / 1e9, gathered / 1e6
        kept, gathered = 0, 0
        shards = {name: p.to_local() for name, p in self.model.named_parameters()}
        for row in qshard.report(self.model):
            shard = shards[row.name]
            kept += row.image + row.master + row.grid + 2 * shard.numel() * shard.element_size()
            if self.configuration.fp8_weights:  # codes beside the master, or a master beside the parameter
                kept += shard.numel() * (1 if peers.gathered_element_size(shard) == 1 else 4)
            if row.name.startswith("layers.0."):
                if qshard.is_quantized(shard):
                    gathered += row.gathered
                else:  # counted in bf16
                    gathered += row.gathered // 2 * peers.gathered_element_size(shard)
        return kept / 1e9, gathered / 1e6

    def measure(self, init_gb: float) -> Result:
        intervals, losses = self.train()
        step_ms, watched_ms = median(intervals), 0.0
        if self.watch is not None:
            watched_ms = mean_of_watched(intervals, self.args.warmup, self.args.watch)
            self.watch.remove()
            assert self.watch.last
        peak = peak_gb(self.device)
        steady = torch.cuda.memory_allocated() / 1e9 if self.device == "cuda" else 0.0
        arithmetic, gathered = self.bytes()
        file = self.args.trace
        file = file and file.with_name(f"{file.stem}-{self.configuration}.json".replace(":", "-"))
        profile = profile_step(lambda: self.step(0), self.device, file)
        activations = 0
        if self.is_tensor_parallel and not self.args.one_rank:
            activations = gathered_activations(lambda: self.step(0))
        return Result(step_ms, self.tokens / step_ms * 1e3, init_gb, steady, arithmetic, peak, gathered,
                      activations / 1e6, losses, profile, watched_ms)

    def release(self):
        """Lets go of what FSDP1 keeps for good: flat parameters hold views of themselves, whose graph holds
        them, out of the garbage collector's sight."""
        if self.configuration.fsdp1:
            for unit in FullyShardedDataParallel.fsdp_modules(self.model):
                unit._handle.flat_param._tensors = None


def reset_peak(device: str):
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: str) -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0


def free_memory(device: str):
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def run(configuration, args, mesh) -> Result:
    device = mesh.device_type
    free_memory(device)
    reset_peak(device)
    left = peak_gb(device)
    if left > 0.1 and dist.get_rank() == 0:
        print(f"{left:.2f} GB are still allocated before {configuration}", flush=True)
    trainer = Trainer(configuration, args.size, args.seq_len, args, mesh)
    synchronize()
    result = trainer.measure(peak_gb(device))
    trainer.release()
    return result


# --------------------------------------------------------------------------------- host times


class HostClock:
    """Times a trainer's host work while the GPU has next to nothing to do."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.started, self.times = trainer, 0, HostTimes()
        for layer in trainer.model.layers:
            layer.register_forward_pre_hook(self.start, prepend=True)  # before FSDP2's own
            # FSDP1's is a part of its forward.
            inner = layer.module if trainer.configuration.fsdp1 else layer
            inner.register_forward_pre_hook(self.stop)

    def start(self, *_):
        self.started = time.perf_counter_ns()

    def stop(self, *_):
        self.times.pre_forward_us.append((time.perf_counter_ns() - self.started) / 1e3)

    def step(self):
        synchronize()
        started = time.perf_counter_ns()
        self.trainer.forward_backward(0)
        self.times.forward_backward_ms.append((time.perf_counter_ns() - started) / 1e6)
        synchronize()
        self.start()
        self.trainer.update()
        self.times.optimizer_ms.append((time.perf_counter_ns() - self.started) / 1e6)
        self.trainer.optimizer.zero_grad()


def host_times(configurations, args, mesh, rounds: int = 15) -> dict[Configuration, HostTimes]:
    """All eager configurations in turn, step by step: four blocks, short sequences. (In a compiled
    block Dynamo would trace the clock.)"""
    free_memory(mesh.device_type)
    small = TINY if args.tiny else replace(SLICE, layers=4, vocab=256)
    clocks = {c: HostClock(Trainer(c, small, min(args.seq_len, 128), args, mesh))
              for c in configurations if not c.compiled}
    for _ in range(3):  # warms up
        for clock in clocks.values():
            clock.step()
            clock.times = HostTimes()
    gc.collect()
    gc.disable()  # a collection would be charged to the configuration that runs then
    try:
        for _ in range(rounds):
            for clock in clocks.values():
                clock.step()
    finally:
        gc.enable()
    return {c: clock.times for c, clock in clocks.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", nargs="*", type=Configuration.parse, default=DEFAULT,
                        metavar="CONFIGURATION")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that are timed")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--one-rank", action="store_true", help="of --tp ranks, the part of one alone")
    parser.add_argument("--replicas", type=int, default=1, help="of the sharded model (HSDP)")
    parser.add_argument("--batch", type=int, default=2,
                        help="sequences per GPU, or per tensor-parallel group")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--vocabulary", type=int, help="words of the model; the text has 256")
    parser.add_argument("--lr", type=float, default=3e-5, help="after a warm-up of 20 steps")
    parser.add_argument("--watch", type=int, default=10, help="steps of which `watched` samples one")
    parser.add_argument("--backend", default="inductor", help="torch.compile's")
    parser.add_argument("--breakdown", action="store_true", help="device time of a step by kind")
    parser.add_argument("--no-host-times", action="store_true", help="steps alone")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Chrome's trace of a step")
    parser.add_argument("--seconds", type=float, default=420, help="begin nothing new after this")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a collective")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    size = TINY if args.tiny else SLICE
    size = args.size = replace(size, vocab=args.vocabulary or size.vocab)
    args.seq_len = args.seq_len or size.max_seq_len
    ranks = args.tp if args.one_rank else int(os.environ["WORLD_SIZE"])
    if args.tp < 1 or any(number % args.tp for number in (ranks, size.kv_heads, args.seq_len)):
        parser.error(f"--tp {args.tp} has to divide {ranks} ranks, {size.kv_heads} key and value heads "
                     f"and sequences of {args.seq_len}")
    if args.replicas < 1 or (ranks // args.tp) % args.replicas:
        parser.error(f"--replicas {args.replicas} has to divide {ranks // args.tp} data-parallel ranks")
    if args.tp > 1 and any(c.format in peers.PEERS or c.fsdp1 for c in args.configurations):
        parser.error("--tp is not measured of peers, nor of fsdp1")
    if args.one_rank and args.tp == 1:
        parser.error("--one-rank is about --tp")
    if args.tp == 1 and any(c.stock for c in args.configurations):
        parser.error("the option stock is about --tp")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.one_rank:
        one_rank_group.init_process_group(ranks)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                                timeout=timedelta(seconds=args.timeout))
    is_first = dist.get_rank() == 0
    shape, names = (ranks // args.tp, args.tp), ("dp", "tp")
    if args.replicas > 1:
        shape = (args.replicas, shape[0] // args.replicas, args.tp)
        names = ("replicate", "shard", "tp")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    layout = {"ranks": ranks, "tp": args.tp, "replicas": args.replicas}
    started, results = time.monotonic(), {}

    def attempt(name, function):
        """What function() returns; one line if it raises or comes too late."""
        if out_of_time(started, args.seconds, device):
            if is_first:
                print(f"SKIPPED {name}: {args.seconds:.0f} s are over", flush=True)
            return None
        try:
            return function()
        except Exception as error:
            print(f"FAILED {name} on rank {dist.get_rank()}: {type(error).__name__}: "
                  f"{first_line(error)}", flush=True)
            return None

    def place(configuration):
        return [configuration.format in names for names in (peers.TORCHAO, peers.TE)]

    for configuration in sorted(args.configurations, key=place):
        result = attempt(configuration, lambda: run(configuration, args, mesh))
        if result is not None:
            results[configuration] = result
            if is_first:
                print(f"{configuration}: {result.step_ms:.2f} ms a step, after "
                      f"{time.monotonic() - started:.0f} s", flush=True)
                save(args.json, {**layout, "results": record(results, {})})
    host = {}
    if not args.no_host_times:
        host = attempt("host times", lambda: host_times(list(results), args, mesh)) or {}
    if is_first:
        show(results, host, layout, args.tiny, args.breakdown)
        save(args.json, {**layout, "results": record(results, host)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
