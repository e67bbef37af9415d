"""Trains a small Llama, byte by byte, with FSDP2 and quantized weights. Run by torchrun:

    torchrun --nproc-per-node 2 examples/train_llama.py --format float8_blockwise
    torchrun --nproc-per-node 4 examples/train_llama.py --format float8_blockwise --tp 2

The loop is stock PyTorch. `qshard.quantize_` quantizes the weights; `qshard.fuse_`, `qshard.clip_grad_norm_` and, for
--gradients, `qshard.reduce_gradients_` make steps faster, and stock torch works in their place. With --tp the styles of
parallelize_module are qshard's, to gather activations as codes.
"""

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from data import StandardLibrary
from llama import FeedForward, Llama, LlamaConfig, Rotary, tensor_parallel_plan
from metering import collective_bytes, weight_bytes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from tqdm import tqdm

import qshard

PLAIN = "bf16"  # plain FSDP2: float32 parameters, gathered and multiplied in bfloat16
RECIPES = {
    recipe.format: recipe
    for recipe in (
        qshard.Float8CurrentScaling(),
        qshard.DelayedScaling(),
        qshard.Float8BlockScaling(),
        qshard.Float8BlockScaling(x_block_scaling_dim=1),
        qshard.MXFP8BlockScaling(),
        qshard.MXFP8BlockScaling(weight_block=(1, 32)),
        qshard.NVFP4BlockScaling(),
        qshard.NVFP4BlockScaling(disable_2d_quantization=True),
    )
}

# What fuse_ may take from llama.py, besides torch's norms.
qshard.fuse.register(FeedForward, qshard.fuse.GatedMLP("gate", "up", "down", F.silu))
qshard.fuse.register(Rotary, qshard.fuse.Rotary(keeps_dtype=True))


def make_parser(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--format", nargs="+", default=["float8_blockwise"], dest="formats",
                        choices=[PLAIN, *RECIPES], metavar="FORMAT",
                        help=f"'{PLAIN}' for plain FSDP2, or: {', '.join(RECIPES)}; several train one "
                             "after the other")
    parser.add_argument("--gradients", choices=["float8", "mxfp8", "nvfp4"],
                        help="reduce gradients in this format, not as they are")
    parser.add_argument("--head-format", choices=list(RECIPES), metavar="FORMAT",
                        help="multiply the head in this format, in one step with the loss; else it stays bf16")
    parser.add_argument("--head-forward", choices=["bf16"], help="its forward stays bf16")
    parser.add_argument("--token-bytes", type=int, choices=[1, 2], default=1,
                        help="of one token: 256 words, or 65,536")
    parser.add_argument("--gradient-rounding", choices=["nearest", "stochastic"], default="nearest")
    parser.add_argument("--steps", type=int, default=300, help="length of the whole schedule")
    parser.add_argument("--stop-at", type=int, help="save a checkpoint and stop after this step")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to on --stop-at")
    parser.add_argument("--resume", type=Path, help="such a folder to go on from")
    parser.add_argument("--out", type=Path, help="folder for the measurements, FORMAT.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS",
                        help="tensor parallelism over so many ranks, FSDP2 over the others")
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, all ranks together")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=704)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--validate-every", type=int, default=50)
    parser.add_argument("--sample", type=int, default=0, help="bytes of text to generate at the end")
    return parser


def parse_arguments(arguments=None):
    parser = make_parser(__doc__.splitlines()[0])
    args = parser.parse_args(arguments)
    kv_heads = LlamaConfig.kv_heads
    for name, size in (("key and value heads", kv_heads), ("--seq-len", args.seq_len)):
        if args.tp < 1 or size % args.tp:
            parser.error(f"--tp {args.tp} does not divide {name} {size}")
    if args.head_format and args.tp > 1:
        parser.error("--head-format is for heads that --tp does not cut")
    if args.sample and args.token_bytes > 1:
        parser.error("--sample writes tokens of one byte")
    return args


def build_model(format, args, mesh):
    torch.manual_seed(args.seed)  # the same on every rank, whatever their number
    model = Llama(LlamaConfig(vocab=256**args.token_bytes, dim=args.dim, hidden=args.hidden, layers=args.layers,
                              heads=args.heads, max_seq_len=args.seq_len))
    model.to(mesh.device_type)
    qshard.fuse_(model)  # keeps less for backward; the same values
    if args.tp > 1:
        plan = tensor_parallel_plan(args.layers, qshard.tensor_parallel)
        parallelize_module(model, mesh["tp"], plan)
    if format != PLAIN:
        qshard.quantize_(model, RECIPES[format], filter_fn=lambda module, name: name != "head")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    if args.gradients:
        qshard.reduce_gradients_(model, args.gradients, rounding=args.gradient_rounding)
    return model


def learning_rate(step: int, args) -> float:
    """Linear warm-up, then linear decay to a tenth."""
    warm = min(1.0, (step + 1) / 20)
    return args.lr * warm * (1 - 0.9 * step / args.steps)


class Trainer:
    def __init__(self, format, args, mesh):
        self.format, self.args, self.mesh, self.device = format, args, mesh, mesh.device_type
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Ranks of one tensor-parallel group train on the same sequences.
        self.part, self.parts = mesh["dp"].get_local_rank(), mesh["dp"].size()
        if args.batch % self.parts:
            raise ValueError(f"--batch {args.batch} does not divide by {self.parts} ranks of FSDP2")
        self.data = StandardLibrary(args.seq_len, args.seed, args.token_bytes)
        self.model = self.build()
        self.optimizer = torch.optim.AdamW(self.parameter_groups(), lr=args.lr, betas=(0.9, 0.95),
                                           weight_decay=0.1, fused=True)

    def build(self):
        return build_model(self.format, self.args, self.mesh)

    def parameter_groups(self):
        return [{"params": list(self.model.parameters())}]

    def loss(self, inputs, targets):
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        if self.args.head_format is None:
            return F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())

        def head_and_loss(x, weight):
            return qshard.nn.linear_cross_entropy(x, weight, targets, format=self.args.head_format,
                                                  forward_precision=self.args.head_forward)

        return self.model(inputs, head_and_loss)

    def step(self, step: int) -> float:
        batch = self.data.batch(step, self.args.batch, self.part, self.parts)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.args)
        loss = self.loss(*batch)
        loss.backward()
        qshard.clip_grad_norm_(self.model.parameters(), 1.0, self.optimizer)  # by the fused step
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean(loss)

    @torch.no_grad()
    def validate(self) -> float:
        batch = self.data.validation_batch(4 * self.args.batch, self.part, self.parts)
        return self.mean(self.loss(*batch))

    def mean(self, loss) -> float:
        loss = loss.detach()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        return loss.item() / self.world_size

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.7) -> str:
        """Samples on all ranks alike, since every forward gathers the weights from all of them."""
        generator = torch.Generator().manual_seed(self.args.seed)
        text = list(prompt)
        for _ in range(length):
            window = text[-self.args.seq_len :]
            padding = [0] * (-len(window) % self.args.tp)  # attention does not look ahead
            tokens = torch.tensor([window + padding], device=self.device)
            logits = self.model(tokens)[0, len(window) - 1].float().cpu()
            # Rank 0 decides: logits are equal on all ranks only as far as their GEMMs are.
            probabilities = torch.softmax(logits / temperature, dim=-1)
            choice = torch.multinomial(probabilities, 1, generator=generator).to(self.device)
            dist.broadcast(choice, src=0)
            text.append(choice.item())
        return bytes(text).decode("utf-8", errors="replace")

    def save(self, path: Path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model,
                       optim_state_dict=optimizer)


def train(trainer: Trainer, first: int, last: int) -> dict:
    args, losses, validation, seconds = trainer.args, {}, {}, []
    wire = {}
    metered = min(first + 5, last - 1)
    where = f"{trainer.world_size} ranks" + (f", tp {args.tp}" if args.tp > 1 else "")
    progress = tqdm(range(first, last), desc=f"{trainer.format:>17} on {where}",
                    disable=trainer.rank != 0, mininterval=0.5, ncols=100)
    for step in progress:
        start = time.perf_counter()
        if step == metered:
            with collective_bytes() as wire:
                losses[step] = trainer.step(step)
        else:
            losses[step] = trainer.step(step)
            if step >= first + 3:  # the first steps allocate and warm up
                seconds.append(time.perf_counter() - start)
        if (step + 1) % args.validate_every == 0 or step + 1 == args.steps:
            validation[step + 1] = trainer.validate()
        progress.set_postfix(loss=f"{losses[step]:.3f}", refresh=False)
    seconds.sort()
    return {
        "format": trainer.format,
        "world_size": trainer.world_size,
        "tp": args.tp,
        "first_step": first,
        "losses": losses,
        "validation": validation,
        "steps_per_second": 1 / seconds[len(seconds) // 2] if seconds else float("nan"),
        "weight_bytes": weight_bytes(trainer.model),
        "gathered_bytes": sum(n for name, n in wire.items() if name.startswith("allgather")),
        "dispatched_bytes": wire.get("alltoall_base", 0),
        "collective_bytes": wire,
    }


def main():
    args = parse_arguments()
    with process_group() as device:
        ranks = dist.get_world_size()
        if ranks % args.tp:
            raise ValueError(f"--tp {args.tp} does not divide the {ranks} processes")
        mesh = init_device_mesh(device, (ranks // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
        for format in args.formats:
            run(Trainer(format, args, mesh), args)


@contextlib.contextmanager
def process_group():
    """Makes the process group of all ranks, and ends it after the context. Yields the device that they train on."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    yield "cuda" if cuda else "cpu"
    # Gloo's threads let go of a collective's tensors a little after its end, and abort the process if Python
    # has ended by then (https://github.com/pytorch/pytorch/issues/190489). A barrier has no tensors.
    dist.barrier()
    dist.destroy_process_group()


def run(trainer: Trainer, args):
    """One format from the beginning or a checkpoint to the end or --stop-at."""
    first, last = 0, args.stop_at or args.steps
    if args.resume:
        trainer.load(args.resume / trainer.format)
        first = json.loads((args.resume / trainer.format / "step.json").read_text())
    result = train(trainer, first, last)
    if args.checkpoints:
        trainer.save(args.checkpoints / trainer.format)
        if trainer.rank == 0:
            (args.checkpoints / trainer.format / "step.json").write_text(json.dumps(last))
    if args.sample:
        result["sample"] = trainer.generate(b"def ", args.sample)
    if trainer.rank == 0 and args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{trainer.format}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
