"""Tensor parallelism by torch's own styles, alone and under FSDP2 and HSDP: the gathered weights are
those of the definition, bit for bit, in every order of set-up.

Scale blocks begin in each rank's part of the full tensor; a tensor's one scale, and its history, are the
full tensor's.
"""

import pytest
import torch
import torch.distributed as dist
from collective_calls import collectives, count
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from models.formats import DELAYED, FORMATS, RECIPES
from models.tensor_parallel import (
    Definition,
    build,
    fitted,
    full_value,
    give_gradient,
    local_part,
    varied,
)
from test_optimizers import OPTIMIZERS
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import qshard
from qshard.formats import info_of

BUDGET_S = 120
ops = torch.ops.qshard
SHAPES = [(256, 512), (192, 320), (200, 328), (100, 257), (64, 96), (100, 5), (5, 100), (100, 2)]
RAGGED = [(200, 328), (100, 257), (100, 2)]
STEPS = 3


def train_step(model, optimizer, mesh, step):
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():  # alike on all meshes, whatever the model computes
        full = torch.randn(param.shape, generator=generator).to(device())
        give_gradient(param, full)
    optimizer.step()
    optimizer.zero_grad()


def run_bits(shape, names, format, shapes, fused):
    mesh = full_mesh(*shape, names=names)
    wrong = {}
    for dim, hidden in shapes:
        dim, hidden = fitted(format, (dim, hidden), mesh["tp"].size())
        model = build(format, mesh, dim, hidden)
        definition = Definition(model, format, mesh["tp"])
        wrong[dim, hidden, 0] = definition.mismatches(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=not fused)
        for step in range(1, STEPS + 1):
            train_step(model, optimizer, mesh, step)
            definition.step(model)
            wrong[dim, hidden, step] = definition.mismatches(model)
    return {key: count for key, count in wrong.items() if count}


@pytest.mark.parametrize("format", FORMATS)
@on_worlds(2)
def test_gathered_bytes_of_two_ranks(world, format):
    for shape in ((1, 2), (2, 1)):
        results = world.run(run_bits, shape, ("dp", "tp"), format, SHAPES, False)
        assert results == [{}] * world.size, shape


@pytest.mark.parametrize("format", FORMATS)
@on_worlds(4)
def test_gathered_bytes_of_four_ranks(world, format):
    results = world.run(run_bits, (2, 2), ("dp", "tp"), format, SHAPES, True)
    assert results == [{}] * world.size


@pytest.mark.parametrize("mesh,names", [((4, 2), ("dp", "tp")), ((2, 2, 2), ("replicate", "dp", "tp"))],
                         ids=["fsdp", "hsdp"])
@on_worlds(8, devices=("cpu",))
def test_gathered_bytes_of_eight_ranks(world, mesh, names, pytestconfig):
    shapes = SHAPES if pytestconfig.getoption("--full") else RAGGED
    for format in FORMATS:
        results = world.run(run_bits, mesh, names, format, shapes, False)
        assert results == [{}] * world.size, format


@pytest.mark.parametrize("cuts", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))], ids=str)
@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": True, "keep_master": False}], ids=["master", "stochastic"])
@on_ranks(4)
def test_scales_of_rows_are_agreed_on_by_those_that_hold_their_columns(cuts, options):
    """Two dimensions of a mesh cut the weight, each in its own way."""
    mesh = full_mesh(2, 2, names=("a", "b"))
    layer = nn.Linear(36, 20, bias=False, device=device())
    full = varied(20, 36, 1).to(device())
    layer.weight = nn.Parameter(distribute_tensor(full, mesh, cuts))
    layer = qshard.quantize_(layer, RECIPES["float8_rowwise"], tp_mesh=mesh, filter_fn=lambda *_: True, **options)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    rows = torch.arange(20, device=device())[:, None].expand(20, 36)
    for step in range(3):
        qshard.flush(layer)
        local, held = layer.weight.to_local(), local_part(rows, layer.weight)[:, 0].tolist()
        scales = dict(zip(held, ops.scale_inv(local).view(-1).tolist(), strict=True))
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, scales)
        assert all(scale == of_rank[row] for of_rank in everywhere for row, scale in scales.items() if row in of_rank)
        if not options:
            whole = ops.quantize(full_value(layer.weight), "float8_rowwise")
            assert list(scales.values()) == ops.scale_inv(whole).view(-1)[held].tolist()
            assert torch.equal(ops.codes(local).float(), local_part(ops.codes(whole).float(), layer.weight))
        give_gradient(layer.weight, varied(20, 36, 2 + step).to(device()))
        optimizer.step()


NOT_FOR_DTENSORS = ("SGD fused", "Rprop", "Adafactor")  # which have no rules for their operators


@on_ranks(4)
def test_optimizers_step_parts_as_plain_full_tensors():
    """Three steps of each are those of plain full tensors, and codes follow."""
    mesh = full_mesh(2, 2, names=("dp", "tp"))
    for i, (name, make) in enumerate(OPTIMIZERS.items()):
        if name in NOT_FOR_DTENSORS:
            continue
        format = FORMATS[i % len(FORMATS)]
        for dim, hidden in ((96, 64), (100, 257)):
            model = build(format, mesh, *fitted(format, (dim, hidden), mesh["tp"].size()))
            definition = Definition(model, format, mesh["tp"])
            weights = [model.up.weight, model.down.weight]
            twins = [nn.Parameter(full_value(weight)) for weight in weights]
            optimizers = make(weights), make(twins)
            for step in range(STEPS):
                for seed, (weight, twin) in enumerate(zip(weights, twins)):
                    generator = torch.Generator().manual_seed(10 * step + seed)
                    twin.grad = torch.randn(weight.shape, generator=generator).to(device())
                    give_gradient(weight, twin.grad.clone())
                for optimizer in optimizers:
                    optimizer.step()
                definition.step(model)
            assert definition.mismatches(model) == 0, (name, format, dim)
            for weight, twin in zip(weights, twins):
                # Fused loops compute the ends of parts apart.
                close = torch.isclose(full_value(weight), twin.data, rtol=1e-5, atol=1e-6)
                assert close.all(), (name, format, dim)


def all_reduces_of_a_step(shape, names, formats):
    """Two of all weights: over FSDP's ranks, and over those of tensor parallelism of what belongs to full
    tensors. Where delayed scaling has replicas, one more."""
    mesh, found = full_mesh(*shape, names=names), {}
    for format in formats:
        model = build(format, mesh, *fitted(format, (72, 136), mesh["tp"].size()))  # FSDP2 cuts blocks
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        train_step(model, optimizer, mesh, 0)
        with collectives() as calls:
            train_step(model, optimizer, mesh, 1)
        found[format] = count(calls, "allreduce")
        assert len(calls) == found[format], calls
    return found


def expected(formats, fsdp=1, tp=1, replicas=0):
    """Ranks that cut columns agree on scales that span all of them; replicas, on histories."""
    levels = {f: (info_of(f).scale, info_of(f).outer_scale) for f in formats}
    of_full = {f: any(level and level.block_cols is None for level in levels[f]) for f in formats}
    return {f: fsdp + tp * full + replicas * (f == DELAYED) for f, full in of_full.items()}


@on_worlds(2)
def test_all_reduces_of_two_ranks(world):
    for shape, want in (((1, 2), expected(FORMATS, fsdp=0)), ((2, 1), expected(FORMATS, tp=0))):
        assert world.run(all_reduces_of_a_step, shape, ("dp", "tp"), FORMATS) == [want] * 2, shape


@on_ranks(4)
def test_all_reduces_of_a_step():
    assert all_reduces_of_a_step((2, 2), ("dp", "tp"), FORMATS) == expected(FORMATS)


@on_worlds(8, devices=("cpu",))
def test_all_reduces_of_a_step_of_replicas(world):
    formats, names = (DELAYED, "float8_tensorwise", "float8_blockwise"), ("replicate", "dp", "tp")
    want = [expected(formats, replicas=1)] * 8
    assert world.run(all_reduces_of_a_step, (2, 2, 2), names, formats) == want
