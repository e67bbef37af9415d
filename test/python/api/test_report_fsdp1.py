"""qshard.report on weights that are quantized at each use, and on FSDP1's units: what is sent is what it
says."""

import pytest
import torch
import torch.distributed as dist
from collective_calls import noted, single_or
from dist_helpers import device, full_mesh, on_ranks, on_worlds
from models.blocks import Model
from models.formats import DELAYED, MIXES
from models.fsdp1 import BF16, build_fsdp1, gathered_bytes, make_dynamic, wrap
from models.training import adamw, batch, loss_of
from torch.distributed.fsdp import fully_shard

import qshard


def rows_of(model):
    report = qshard.report(model)
    text = str(report)
    assert all(row.name in text and row.format in text for row in report)
    return {row.name: row for row in report}


def line_of(model, kind):
    lines = dict(line.split(": ", 1) for line in qshard.report(model).clients)
    return lines[kind]


@pytest.mark.parametrize("format", ["float8_blockwise", DELAYED])
def test_without_a_wrapper(format):
    model = make_dynamic(Model(), format)
    rows = rows_of(model)
    assert rows.keys() == dict(model.named_parameters()).keys()
    weight, norm = rows["blocks.0.up.weight"], rows["blocks.0.norm.weight"]
    assert weight.format == f"{format} dynamic" and norm.format == "float32"
    assert (weight.image, weight.master, weight.grid, weight.gathered) == (4 * 257 * 100, 0, 0, 0)
    assert line_of(model, "wrapper") == "none: known"
    checkpoint = line_of(model, "checkpoint")
    assert checkpoint.startswith("plain tensors in state_dict(), which the weights are")
    assert ("histories are in it" in checkpoint) == (format == DELAYED)
    assert line_of(Model(), "checkpoint") == "of a plain model"


def run_units(format, gather, **kwargs):
    """Rows, beside what FSDP1 and the all-gather of codes really send."""
    model = build_fsdp1(format, gather=gather, **kwargs)
    names = {name: tuple(p.shape) for name, p in Model(257, format=format).named_parameters()}
    optimizer = adamw(model)
    for step in range(2):
        rows = rows_of(model)
        assert {n: rows[n].shape for n in rows if "(padding)" not in n} == names
        reduce_scatter = single_or("reduce_scatter_tensor")
        with noted([reduce_scatter], lambda sent: sent.nbytes) as reduced, gathered_bytes() as sent:
            loss = loss_of(model, batch(step))
            by_forward = sum(sent) * dist.get_world_size()
            loss.backward()
        assert sum(row.gathered for row in rows.values()) == by_forward
        assert sum(row.reduced for row in rows.values()) == sum(reduced)
        optimizer.step()
        optimizer.zero_grad()
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    return rows, kept, line_of(model, "wrapper")


@pytest.mark.pairwise
@pytest.mark.parametrize("gather", ["quantized", "param_dtype"])
@pytest.mark.parametrize("mixed_precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("format", ["float8_blockwise", "mix-1"])
@on_worlds(2, 3)
def test_units_of_fsdp1(world, format, use_orig_params, mixed_precision, gather):
    results = world.run(
        run_units, format, gather, use_orig_params=use_orig_params, mixed_precision=mixed_precision
    )
    formats = MIXES.get(format, {})
    sends_codes = {"float8_tensorwise", "float8_blockwise", DELAYED}
    for rows, kept, wrapper in results:
        for name, row in rows.items():
            if "(padding)" in name:
                continue
            module, numel = name.removesuffix(".weight"), torch.Size(row.shape).numel()
            is_linear = module.split(".")[-1] in ("up", "down", "head")
            of = formats.get(module, format) if is_linear else ""
            is_codes = gather == "quantized" and mixed_precision is BF16 and of in sends_codes
            itemsize = 1 if is_codes else 4 if mixed_precision is None else 2
            dtype = "float32" if mixed_precision is None else "bfloat16"
            assert row.format == (f"{of} dynamic" if of else "float32"), name
            assert row.gathered_as == ("codes" if is_codes else dtype), name
            assert row.gathered == itemsize * numel and row.ranks == world.size, name
        assert 'known with weights="dynamic"' in wrapper and " of 3 units gather codes" in wrapper
        images = {n: r.image for n, r in rows.items()}
        # With use_orig_params FSDP1 shows no padding among the parameters.
        assert kept in (sum(images.values()), sum(b for n, b in images.items() if "(padding)" not in n))
    for name, row in results[0][0].items():
        if "(padding)" not in name:  # each element lies on one rank
            whole = sum(rows[name].image for rows, _, _ in results)
            assert whole == 4 * torch.Size(row.shape).numel(), name


@on_ranks(2)
def test_the_report_knows_wrappers_other_than_fsdp1():
    unsharded = build_fsdp1("float8_blockwise", strategy="NO_SHARD", mixed_precision=BF16)
    for row in rows_of(unsharded).values():
        assert (row.gathered, row.reduced, row.ranks, row.gathered_as) == (0, 0, 1, "")
    unprepared = wrap(make_dynamic(Model().to(device()), "nvfp4"))
    assert line_of(unprepared, "wrapper").endswith("call qshard.prepare_for_fsdp1(model)")
    assert rows_of(unprepared)["head.weight"].gathered_as == "float32"
    plain = rows_of(wrap(Model().to(device()), use_orig_params=False))
    assert plain["blocks.1.down.weight"].format == "float32"
    sharded = rows_of(fully_shard(make_dynamic(Model().to(device()), "nvfp4"), mesh=full_mesh()))
    assert sharded["head.weight"].format == "nvfp4 dynamic"
    assert sharded["head.weight"].gathered_as == "float32"
    quantized = qshard.quantize_(Model().to(device()), qshard.Float8BlockScaling())
    quantized = rows_of(fully_shard(quantized, mesh=full_mesh()))
    assert quantized["head.weight"].gathered_as == "codes"
