"""torch.distributed.pipelining with stages that begin with a quantized linear, alone and with FSDP2
within each stage: losses and weights are those of one process, bit for bit.

A stage receives every step's activations into the same leaf tensors, and no version counter shows
it: on CUDA a linear must not take its codes of the step before (`ops/linear/recorded_activation.h`).
"""

import torch
import torch.nn.functional as F
from dist_helpers import device, full_mesh, on_ranks
from helpers import value
from models.formats import FORMATS, RECIPES
from models.training import adamw
from models.weights import local
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor

import qshard
from qshard._runtime.classes import Process

SCHEDULES = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
WIDTH, CHUNKS, MICROBATCHES, TOKENS, STEPS = 96, 4, 4, 16, 3


class Chunk(nn.Module):
    """A quarter of the model. What it receives is read by a quantized linear first."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.shared = set()  # whether linears share codes of its input, and of the norm's result

    def forward(self, x):
        h = self.norm(self.first(x))
        self.shared.add((Process.shares_input_codes(x), Process.shares_input_codes(h)))
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def chunks_of(format):
    """The same on every rank."""
    torch.manual_seed(0)
    chunks = [Chunk().to(device(), torch.bfloat16) for _ in range(CHUNKS)]
    return [qshard.quantize_(chunk, RECIPES[format]) for chunk in chunks]


def batch(step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    size = (2, MICROBATCHES * TOKENS, WIDTH)
    return torch.randn(size, generator=generator).to(device(), torch.bfloat16).unbind()


def loss_of(output, target):
    return F.mse_loss(output.float(), target.float())


def gradients_of(model, x, target):
    """One replica's: the microbatches' losses, and the sums of their gradients by parameter."""
    losses = []
    for mine, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)):
        losses.append(loss_of(model(mine), wanted))
        losses[-1].backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [loss.item() for loss in losses], gradients


def train_alone(format, replicas):
    """One process: by replica the losses, and the chunks as they are afterwards. The counts that
    gradients are divided by are powers of two, so that it is no matter when."""
    chunks = chunks_of(format)
    model = nn.Sequential(*chunks)
    optimizer = adamw(model)
    losses = [[] for _ in range(replicas)]
    for step in range(STEPS):
        gradients = []
        for replica in range(replicas):
            of_replica, mine = gradients_of(model, *batch(step, replica))
            losses[replica] += of_replica
            gradients.append(mine)
        for p, *parts in zip(model.parameters(), *gradients):
            p.grad = sum(parts[1:], parts[0]) / (replicas * MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return losses, chunks


def train_in_pipeline(format, schedule_type, mesh):
    """This rank's losses if it has the last stage, and its chunks by their number."""
    pipeline, replica = mesh["pipeline"], mesh["replica"].get_local_rank()
    rank, ranks = pipeline.get_local_rank(), pipeline.size()
    interleaved = schedule_type is ScheduleInterleaved1F1B
    numbers = [[rank], [rank + ranks]] if interleaved else [[2 * rank, 2 * rank + 1]]
    chunks = chunks_of(format)
    like = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    stages = []
    for mine in numbers:
        module = nn.Sequential(*(chunks[i] for i in mine))
        if mesh["replica"].size() > 1:
            for chunk in module:
                fully_shard(chunk, mesh=mesh["replica"], reshard_after_forward=False)
            fully_shard(module, mesh=mesh["replica"], reshard_after_forward=False)
        index, count = mine[0] // len(mine), CHUNKS // len(mine)
        # Shapes are given: to find them a stage runs on zeros, which delayed scaling would count.
        group = pipeline.get_group()
        stages.append(PipelineStage(module, index, count, device(), like, like, group=group))
    schedule = schedule_type(stages if interleaved else stages[0], MICROBATCHES, loss_of)
    model = nn.ModuleList(stage.submod for stage in stages)
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        x, target = batch(step, replica)
        ours = {"target": target, "losses": []} if rank == ranks - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **ours)
        losses += [loss.item() for loss in ours.get("losses", [])]
        optimizer.step()
        optimizer.zero_grad()
    for mine in numbers:
        assert chunks[mine[0]].shared == {(False, True)}, (mine, chunks[mine[0]].shared)
    return losses, {i: chunks[i] for mine in numbers for i in mine}


def differences(formats, replicas):
    """What differs from one process, on this rank."""
    mesh = full_mesh(2, replicas, names=("pipeline", "replica"))
    replica, found = mesh["replica"].get_local_rank(), []
    is_last = mesh["pipeline"].get_local_rank() == 1
    for format in formats:
        expected, whole = train_alone(format, replicas)
        assert len(set(expected[replica])) == STEPS * MICROBATCHES
        for schedule in SCHEDULES:
            losses, chunks = train_in_pipeline(format, schedule, mesh)
            name_of_run = f"{format} {schedule.__name__}"
            if losses != (expected[replica] if is_last else []):
                found.append(f"{name_of_run}: {losses}, expected {expected[replica]}")
            for i, chunk in chunks.items():
                alone = whole[i].state_dict()
                for name, tensor in chunk.state_dict().items():
                    wanted = value(alone[name])
                    if isinstance(tensor, DTensor):
                        wanted = wanted.chunk(replicas)[replica]
                    if not torch.equal(value(local(tensor)), wanted):
                        found.append(f"{name_of_run}: chunk {i}, {name}")
    return found


@on_ranks(2)
def test_pipelines_equal_one_process():
    assert differences(FORMATS, 1) == []


@on_ranks(4)
def test_pipelines_of_sharded_stages_equal_one_process():
    assert differences(FORMATS, 2) == []
