"""Quantized models under FSDP2, and the plain ones that they must be like."""

import torch
from dist_helpers import device, full_mesh
from models.blocks import Model
from models.formats import quantize_model
from models.plain_twins import make_plain
from torch.distributed.fsdp import fully_shard


def shard(model, mesh=None, **kwargs):
    """fully_shard per block and for the rest, as one does."""
    mesh = mesh or full_mesh()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def build(format, *, rows=257, keep_master=True, recompute=None, prepare=None, **kwargs):
    """A quantized, sharded Model; `prepare(model)` runs in between."""
    torch.manual_seed(0)
    model = Model(rows, recompute=recompute, format=format).to(device())
    quantize_model(model, format, keep_master=keep_master)
    if prepare:
        prepare(model)
    return shard(model, **kwargs)


def build_oracle(format, *, rows=257, recompute=None, prepare=None, **kwargs):
    """As build(), with plain fp32 parameters only."""
    torch.manual_seed(0)
    model = make_plain(Model(rows, recompute=recompute, format=format), format).to(device())
    if prepare:
        prepare(model)
    return shard(model, **kwargs)
