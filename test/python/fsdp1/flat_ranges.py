"""Ranges of weights that flat parameters cut: (format, rows, cols, start) of each, for the tests of them."""

import torch

ops = torch.ops.qshard


def lists_of(ranges):
    """As operators take them."""
    return [r[0] for r in ranges], [number for r in ranges for number in r[1:]]


def grid_numel(format, rows, cols, *_):
    values = torch.empty(rows, cols, device="meta")
    return ops.scale_inv(ops.quantize(values, format)).numel()


def agree(values, ranges, *, own=(), is_known=(), amax=(), state=(), steps=None, groups=None, found_inf=None):
    """Alone, if no groups are named; steps: ops/wire/agree_on_ranges.h."""
    return ops._agree_on_ranges(
        list(values), *lists_of(ranges), list(own), list(is_known), list(amax), list(state),
        steps or [0] * len(ranges), groups or [0] * len(ranges), found_inf,
    )


def own_amaxes(values, ranges):
    own = [torch.full((grid_numel(*r),), 7.0, device=v.device) for v, r in zip(values, ranges)]
    agree(values, ranges, own=own)
    return own


def messages_of(flat, world, weights, amaxes, dtype=torch.bfloat16):
    """What each rank of FSDP1 sends of a flat parameter in equal shards."""
    shards = flat.chunk(world)
    return torch.stack([
        ops._write_message(shard, rank, world, *lists_of(weights), amaxes, dtype)
        for rank, shard in enumerate(shards)
    ])
