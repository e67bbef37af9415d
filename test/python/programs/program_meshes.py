"""Which part of a model each rank of a random program holds."""

import torch.distributed as dist
from dist_helpers import full_mesh

_layout = {"part": 0, "parts": 1}  # of the program under way
_meshes = {}


def own_part():
    """Which rows of sharded weights this rank holds; without sharding, each its own."""
    return _layout["part"]


def part_count():
    return _layout["parts"]


def lay_out(setup, ranks):
    shards = setup.shards(ranks) if setup.sharded else ranks
    _layout.update(part=dist.get_rank() % shards, parts=shards)


def mesh_of(setup, ranks):
    """A mesh of more than one dimension makes process groups: it is kept as long as this world is."""
    if setup.mesh == "shards":
        return full_mesh()
    key = setup.mesh, dist.group.WORLD
    if key not in _meshes:
        _meshes.clear()
        hsdp = {"hsdp": ((2, ranks // 2), ("replicate", "shard")), "replicate": ((ranks,), ("replicate",))}
        shape, names = hsdp[setup.mesh]
        _meshes[key] = full_mesh(*shape, names=names)
    return _meshes[key]
