"""from_planes: codes and scales come in as they are, and planes that are handed out."""

import pytest
import torch
import torch.distributed as dist
from dist_helpers import on_ranks
from helpers import FORMATS, assert_same, fit, has_two_images, ops, value, weight

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

DTYPES = (torch.float32, torch.bfloat16)
ALL_FORMATS = (*FORMATS, "float8_blockwise_fp32_scale", "float8_tensorwise_fp32_scale")


def planes(q):
    tensor_scale = ops.tensor_scale_inv(q) if info_of(ops.format(q)).outer_scale else None
    return ops.codes(q), ops.scale_inv(q), tensor_scale


def rebuilt(q, **kwargs):
    codes, scale, tensor_scale = planes(q)
    columns = q.shape[-1]
    return qshard.from_planes(
        codes, scale, ops.format(q), tensor_scale_inv=tensor_scale, columns=columns, **kwargs
    )


def same_planes(a, b):
    for x, y in zip(planes(a), planes(b)):
        assert (x is None) == (y is None)
        if x is not None:
            assert_same(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
@pytest.mark.parametrize("shape", [(64, 40), (33, 17), (3, 20, 24), (0, 16), (16, 0)], ids=str)
@pytest.mark.parametrize("fmt", ALL_FORMATS)
def test_planes_of_a_tensor_give_it_back(fmt, shape, keep_master):
    shape = (*shape[:-2], fit(fmt, shape[-2]), shape[-1])
    q = ops.quantize(weight(*shape), fmt)
    for dtype in DTYPES:
        r = rebuilt(q, dtype=dtype, keep_master=keep_master)
        assert r.dtype == dtype and r.shape == q.shape and ops.format(r) == fmt
        same_planes(r, q)
        assert_same(ops.dequantize(r), ops.dequantize(q, dtype=dtype))
        assert (ops.master(r) is not None) == keep_master
        assert_same(r + 0, ops.dequantize(q, dtype=dtype))
        ops.flush([r])
        same_planes(r, q)


@pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
def test_scales_that_quantize_would_not_choose_stay_until_a_write(keep_master):
    codes = torch.randn(130, 140).clamp(-4, 4).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.3
    q = qshard.from_planes(codes, scale, "float8_blockwise_fp32_scale", keep_master=keep_master)
    blocks = scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :140]
    assert_same(ops.dequantize(q), codes.float() * blocks)
    ops.flush([q])
    assert_same(ops.scale_inv(q), scale)
    assert_same(ops.scale_inv(q.clone()), scale)
    with torch.no_grad():
        q.mul_(2)
    ops.flush([q])
    assert not torch.equal(ops.scale_inv(q), scale)
    assert_same(value(q), (codes.float() * blocks) * 2 if keep_master else ops.dequantize(q))


def test_strided_planes_and_no_alias():
    q = ops.quantize(weight(48, 40), "mxfp8")
    codes, scale = ops.codes(q).clone().t().contiguous().t(), ops.scale_inv(q).clone()
    r = qshard.from_planes(codes, scale, "mxfp8")
    codes.view(torch.uint8).zero_()
    same_planes(r, q)


def test_columnwise_codes_are_made_of_the_values():
    q = ops.quantize(weight(64, 40), "mxfp8_1x32")
    r = rebuilt(q)
    again = ops.quantize(ops.dequantize(q), "mxfp8_1x32")
    assert_same(
        ops.columnwise_codes(r).float(), ops.columnwise_codes(again).float()
    )
    assert_same(
        ops.columnwise_scale_inv(r).view(torch.uint8), ops.columnwise_scale_inv(again).view(torch.uint8)
    )


def refused():
    codes, scale = torch.zeros(64, 40).to(torch.float8_e4m3fn), torch.ones(1, 1)
    e8m0 = torch.ones(64, 2).to(torch.float8_e8m0fnu)
    uneven = e8m0.view(torch.uint8).clone()
    uneven[3] += 1
    packed, e4m3 = torch.zeros(64, 20, dtype=torch.uint8), torch.ones(64, 3).to(torch.float8_e4m3fn)
    one = {"tensor_scale_inv": torch.ones(1, 1)}
    return {
        "unknown format": ((codes, scale, "float7"), {}, ValueError, "float7"),
        "dtype of codes": ((codes.float(), scale, "float8_blockwise"), {}, TypeError, "Float8_e4m3fn"),
        "dtype of scales": ((codes, scale.double(), "float8_blockwise"), {}, TypeError, "as scale_inv"),
        "dtype": ((codes, scale, "float8_blockwise"), {"dtype": torch.int32}, TypeError, "dtype"),
        "shape": ((codes, torch.ones(2, 1), "float8_blockwise"), {}, ValueError, r"shape \[1, 1\]"),
        "dimensions": ((codes[0], scale, "float8_blockwise"), {}, ValueError, "2 dimensions"),
        "device": ((codes, scale.to("meta"), "float8_blockwise"), {}, ValueError, "is on meta"),
        "quantized": ((ops.quantize(codes.float(), "mxfp8"), e8m0, "mxfp8"), {}, TypeError, "plain"),
        "rows": ((codes, e8m0, "mxfp8"), {"logical_rows": 60}, ValueError, "logical_rows=60"),
        "negative": ((codes, -scale, "float8_blockwise"), {}, ValueError, "negative"),
        "NaN": ((codes, scale * float("nan"), "float8_tensorwise"), {}, ValueError, "NaN"),
        "mantissa": ((codes, scale * 1.5, "float8_blockwise"), {}, ValueError, "two.*fp32_scale"),
        "a block of two scales": (
            (codes, uneven.view(torch.float8_e8m0fnu), "mxfp8"), {}, ValueError, "mxfp8_1x32"
        ),
        "no tensor scale": ((packed, e4m3, "nvfp4"), {}, ValueError, "needs tensor_scale_inv"),
        "a tensor scale": ((codes, e8m0, "mxfp8"), one, ValueError, "has no tensor_scale_inv"),
        "sign of a scale": ((packed, (-e4m3.float()).to(e4m3.dtype), "nvfp4"), one, ValueError, "negative or NaN"),
        "columns": ((packed, e4m3, "nvfp4"), {**one, "columns": 42}, ValueError, "columns=42"),
        "stochastic": (
            (packed, e4m3, "nvfp4[stochastic]"), {**one, "keep_master": True}, ValueError, "one of"
        ),
        "cut blocks": (
            (codes, e8m0, "mxfp8_1x32"),
            {"logical_rows": 96, "row_offset": 8},
            ValueError,
            "whole blocks",
        ),
    }


@pytest.mark.parametrize("case", refused())
def test_what_is_refused(case):
    args, kwargs, error, message = refused()[case]
    with pytest.raises(error, match=f"qshard::from_planes.*{message}"):
        qshard.from_planes(*args, **kwargs)


@on_ranks(2, devices=("cpu",))
@pytest.mark.parametrize("fmt", [f for f in ALL_FORMATS if not has_two_images(f)])
def test_shards_of_given_planes_are_rows_of_the_whole(fmt):
    """Each rank's rows: nothing is left to agree upon."""
    whole = ops.quantize(weight(96, 40), fmt)
    size, rank = dist.get_world_size(), dist.get_rank()
    chunk = -(-96 // size)
    first = min(chunk * rank, 96)
    codes, scale, tensor_scale = planes(whole)
    rows = slice(first, min(first + chunk, 96))
    shard = qshard.from_planes(
        codes[rows],
        scale[rows] if info_of(fmt).scale.place == "rows" else scale,
        fmt,
        tensor_scale_inv=tensor_scale,
        logical_rows=96,
        row_offset=first,
    )
    TensorState(shard).set_reduction_group(dist.group.WORLD.group_name)
    ops.flush([shard])
    assert_same(ops.codes(shard).view(torch.uint8), codes[rows].view(torch.uint8))
    assert_same(ops.dequantize(shard), ops.dequantize(whole)[rows])


# -------------------------------------------------------------------- writes through the planes


@pytest.mark.parametrize("plane", ["codes", "scale_inv", "tensor_scale_inv", "columnwise_codes"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_beside_a_master_a_written_plane_is_made_anew(fmt, plane):
    q = ops.quantize(weight(64, 40), fmt, keep_master=True)
    try:
        view = getattr(ops, plane)(q)
    except ValueError:  # of a plane that the format does not have
        return
    before = [p if p is None else p.clone() for p in planes(q)], ops.dequantize(q).clone()
    view.view(torch.uint8).fill_(3)
    assert_same(q + 0, weight(64, 40))
    for now, then in zip(planes(q), before[0]):
        if then is not None:
            assert_same(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8))
    assert_same(ops.dequantize(q), before[1])
    assert_same(getattr(ops, plane)(q).view(torch.uint8), view.view(torch.uint8))


@pytest.mark.parametrize("plane", ["codes", "scale_inv", "tensor_scale_inv"])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if not has_two_images(f)])
def test_without_a_master_a_written_plane_is_the_value(fmt, plane):
    """Copies made before and after a write to codes or scales have those of then and of now."""
    q = ops.quantize(weight(64, 40), fmt)
    try:
        view = getattr(ops, plane)(q)
    except ValueError:  # of a plane that the format does not have
        return
    copy, like, rows = q.clone(), q.new_zeros(q.shape), q.new_zeros(q.shape)
    value = ops.dequantize(q).clone()
    view.view(torch.uint8).copy_(view.view(torch.uint8).flip(-1))
    if view.dtype == torch.float32:
        view.mul_(2)
    written = ops.dequantize(q).clone()
    assert not torch.equal(written, value)
    assert_same(ops.dequantize(copy), value)
    for later in (like, q.new_zeros(q.shape), torch.empty_like(q)):
        assert_same(ops.dequantize(later.copy_(q)), written)
    rows[:32].copy_(q[:32])
    assert_same(rows[:32] + 0, written[:32])
    assert_same(torch.cat([copy[:32], q[32:]]) + 0, torch.cat([value[:32], written[32:]]))


def test_reading_planes_writes_nothing():
    q = ops.quantize(weight(64, 40), "nvfp4", keep_master=True)
    version = q._version
    (ops.codes(q).float() + ops.codes(q)[0].float()).sum()
    ops.scale_inv(q).float(), ops.tensor_scale_inv(q).clone()
    assert q._version == version
