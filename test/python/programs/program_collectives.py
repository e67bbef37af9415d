"""Steps of random programs that are collectives on quantized tensors: c10d moves their values. See
program_steps.py."""

import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from dist_helpers import device, full_mesh, gather_objects
from program_meshes import part_count
from program_steps import step
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import qshard


def gathered(tensor):
    pieces = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return torch.stack(pieces)


def gathered_into_tensor(tensor):
    rows = dist.get_world_size() * tensor.size(0)
    out = torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    dist.all_gather_into_tensor(out, tensor)
    return out


def gathered_into_quantized(tensor):
    """What receives is of the tensor's kind."""
    pieces = [tensor.clone() for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    return torch.stack([piece * 1 for piece in pieces])


def scattered(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    # Replicas get the same.
    pieces = [torch.full_like(tensor, i % part_count() + 0.5) for i in range(size)] if rank == 0 else None
    dist.scatter(tensor, pieces, src=0)


def passed_on(tensor):
    """From each rank to the next, into a tensor of its kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return None
    received = tensor.clone()
    # As a batch: NCCL runs single ones of a pair of ranks one after the other.
    batch = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(batch):
        request.wait()
    return received * 1


# On a window that has the same shape on all ranks. None needs more than gloo has.
COLLECTIVES = {
    "broadcast": lambda t: dist.broadcast(t, src=0),
    "broadcast from the last": lambda t: dist.broadcast(t, src=dist.get_world_size() - 1),
    "all_reduce": dist.all_reduce,
    "all_reduce max": lambda t: dist.all_reduce(t, dist.ReduceOp.MAX),
    "all_gather": gathered,
    "all_gather_into_tensor": gathered_into_tensor,
    "all_gather into quantized": gathered_into_quantized,
    "scatter": scattered,
    "send and receive": passed_on,
    "objects": lambda t: torch.stack([sent.to(t.device) * 1 for sent in gather_objects(t.clone())]),
    "functional all_reduce": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD) * 1,
    "functional all_gather": lambda t: functional.all_gather_tensor(t, 0, dist.group.WORLD) * 1,
}


# Started, and waited for by their future; with what they work on between the two.
FUTURES = {
    "broadcast": lambda t: (dist.broadcast(t, src=0, async_op=True), t),
    "all_reduce": lambda t: (dist.all_reduce(t, async_op=True), t),
    "all_reduce of a copy": lambda t: started(dist.all_reduce, t.clone()),
    "broadcast of a copy": lambda t: started(dist.broadcast, t.clone(), 0),
}


def started(collective, tensor, *args):
    return collective(tensor, *args, async_op=True), tensor


def common_rows(setup, ranks, layer):
    """How many rows of a weight every rank has."""
    rows, shards = setup.layers[layer].rows, setup.shards(ranks)
    return max(0, rows - (shards - 1) * -(-rows // shards)) if setup.sharded else rows


def draw_collective(d):
    layer = d.rng.randrange(len(d.setup.layers))
    rows = common_rows(d.setup, d.ranks, layer)
    if rows == 0:
        return None
    first = d.rng.randrange(rows)
    return {
        "layer": layer,
        "rows": (first, rows) if d.chance(0.5) else (0, rows),
        "kind": d.choice(COLLECTIVES),
    }


@step(4, draw_collective)
@torch.no_grad()
def collective(subject, layer, rows, kind):
    result = COLLECTIVES[kind](subject.tensor(f"w{layer}")[rows[0] : rows[1]])
    return result if isinstance(result, torch.Tensor) else None


def draw_future(d):
    drawn = draw_collective(d)
    if drawn is None:
        return None
    between = d.choice(("nothing", "flush", "write", "wait"))
    return {**drawn, "kind": d.choice(FUTURES), "between": between}


@step(2, draw_future)
@torch.no_grad()
def future(subject, layer, rows, kind, between):
    """Another parameter may be written, and all be flushed, before what was sent is there. A flush waits
    for what its tensors receive, and rounds that with the rows beside it."""
    if between == "flush" and dist.get_rank() == 0:
        time.sleep(0.02)  # others flush while they wait for what this rank sends
    work, tensor = FUTURES[kind](subject.tensor(f"w{layer}")[rows[0] : rows[1]])
    if between == "flush":
        qshard.flush(subject.model) if subject.quantized else work.wait()
        yield  # the twin takes over what is rounded
    if between == "write":
        subject.tensor(f"w{(layer + 1) % len(subject.setup.layers)}").mul_(0.5)
    if between == "wait":
        work.wait()
    work.get_future().wait()
    yield tensor * 1


def draw_distribute(d):
    if d.setup.sharded:
        return None
    placement = d.choice(("rows", "columns", "replicas"))
    return {"target": d.parameter(), "placement": placement, "into": d.new_register()}


@step(1.5, draw_distribute)
@torch.no_grad()
def distribute(subject, target, placement, into):
    """The local part is a tensor of its own."""
    placements = {"rows": Shard(0), "columns": Shard(-1), "replicas": Replicate()}
    tensor = subject.tensor(target)
    dtensor = distribute_tensor(tensor.to(device()), full_mesh(), [placements[placement]])
    subject.keep(into, dtensor.to_local().clone())
    yield dtensor.full_tensor() * 1
