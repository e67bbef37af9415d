"""What format_info says of each format is what the reference says, and what tensors have."""

import json

import pytest
import torch
from reference import formats as reference

import qshard
from qshard.formats import info_of

ops = torch.ops.qshard
ON_ALL = pytest.mark.parametrize("name", list(reference.FORMATS))


def test_the_reference_has_the_same_formats():
    assert ops.formats() == list(reference.FORMATS)


def check_level(level, block, dtype, place, power_of_two):
    assert (level.block_rows, level.block_cols) == (block or (None, None))
    assert (level.dtype, level.place, level.power_of_two) == (dtype, place, power_of_two)


@ON_ALL
def test_as_the_reference(name):
    info, of = info_of(name), reference.FORMATS[name]
    assert info.name == info.base == name
    assert (info.code_dtype, info.code_bits) == (of.code_dtype, of.code_bits)
    is_float8 = of.code_dtype is torch.float8_e4m3fn
    assert info.code_max == (torch.finfo(of.code_dtype).max if is_float8 else 6.0)
    place = "grid" if of.row_scale is None else "rows"
    check_level(info.scale, of.block, of.row_scale or torch.float32, place, of.power_of_two_scales)
    assert (info.outer_scale is not None) == of.tensor_scale
    if of.tensor_scale:
        check_level(info.outer_scale, None, torch.float32, "grid", False)
    assert info.has_tensor_scale == (of.tensor_scale or of.block is None)
    assert info.activations.gradient_dtype == of.grad_dtype
    assert info.activations.input_dtype == of.code_dtype
    assert info.activations.power_of_two_scales == of.power_of_two_scales
    assert (info.columnwise is not None) == (of.columnwise is not None)
    if of.columnwise is not None:
        assert of.columnwise.sliced
        second = of.columnwise
        check_level(info.columnwise, second.block, second.row_scale, "slices", second.power_of_two_scales)
    assert info.gemm.kind == ("packed" if of.row_scale is None else "row_images")
    rows = {torch.float8_e8m0fnu: "mxfp8_1x32[rowwise]", torch.float8_e4m3fn: "nvfp4_1x16"}
    of_float8 = {"float8_tensorwise": "float8_1xK", "float8_rowwise": "float8_1xK", "float8_blockwise": "float8_1x128"}
    rows[None] = of_float8.get(name)
    assert info.activations.row_format == rows[of.row_scale]
    is_square = of.block is None or of.block[0] == of.block[1]
    assert info.gemm.transposes_weight == (is_square or of.scales_rows)
    assert info.gemm.folds_row_scales == of.scales_rows
    assert not (info.stochastic_rounding or info.gathers_by_phase or info.emulated or info.four_over_six)


@ON_ALL
def test_tensors_have_the_planes_that_it_says(name):
    info = info_of(name)
    q = ops.quantize(torch.randn(256, 256), name)
    rows = 256 // (info.scale.block_rows or 256) if info.scale.place == "grid" else 256
    assert ops.scale_inv(q).shape == (rows, 256 // (info.scale.block_cols or 256))
    assert ops.scale_inv(q).dtype == info.scale.dtype
    assert ops.codes(q).shape == (256, 256 * info.code_bits // 8)
    if info.outer_scale is not None:
        assert ops.tensor_scale_inv(q).dtype == info.outer_scale.dtype
    if info.columnwise is not None:
        blocks = 256 // info.columnwise.block_rows, 256 // info.columnwise.block_cols
        assert ops.columnwise_scale_inv(q).shape == blocks


def test_options_of_a_format_are_told():
    info = info_of("float8_delayed[margin=1,history=16,most_recent,e4m3,stochastic]")
    assert info.base == "float8_delayed" and info.stochastic_rounding
    history = info.amax_history
    assert (history.length, history.margin, history.most_recent) == (16, 1, True)
    assert info.activations.gradient_dtype is torch.float8_e4m3fn
    assert info_of("float8_tensorwise").amax_history is None
    assert info_of("mxfp8_1x32[phase]").gathers_by_phase
    for both in ("phase,rowwise", "rowwise,phase"):  # one image has no second phase
        with pytest.raises(ValueError, match="has no option"):
            info_of(f"mxfp8_1x32[{both}]")
    assert info_of("mxfp8[emulate]").emulated
    assert not info_of("nvfp4[no_hadamard]").activations.hadamard_columns
    assert not info_of("nvfp4[nearest_gradients]").activations.stochastic_gradients
    for name in ("nvfp4", "nvfp4_1x16"):  # of weights where no block has several rows
        info = info_of(f"{name}[4over6]")
        assert info.activations.row_format == "nvfp4_1x16[4over6]"
        assert info.four_over_six == (name == "nvfp4_1x16")
    columns = [
        info_of(f"float8_blockwise[x_block_scaling_dim={dim}]").activations.packed_input_columns
        for dim in (1, 2)
    ]
    assert columns == ["1x128", "128x128"]


def test_gemms_by_compute_capability():
    ranges = {
        name: (info_of(name).gemm.first_capability, info_of(name).gemm.last_capability)
        for name in ("float8_delayed", "float8_rowwise", "float8_blockwise", "mxfp8", "nvfp4")
    }
    assert ranges == {
        "float8_delayed": (89, None),
        "float8_rowwise": (90, 90),
        "float8_blockwise": (90, 90),
        "mxfp8": (100, None),
        "nvfp4": (100, None),
    }


def test_a_name_that_no_format_has():
    with pytest.raises(ValueError, match="qshard::format_info: unknown format 'float3'; known formats"):
        ops.format_info("float3")
    with pytest.raises(ValueError, match="unknown format 'float3'"):
        info_of("float3")


def test_it_is_json():
    assert json.loads(qshard.ops.format_info("nvfp4"))["code_dtype"] == "float4_e2m1fn_x2"


def test_traced_code_knows_it():
    def names(x):
        return x * json.loads(ops.format_info("nvfp4"))["code_bits"]

    x = torch.ones(3)
    traced = torch.fx.experimental.proxy_tensor.make_fx(names, tracing_mode="fake")(x)
    torch.testing.assert_close(traced(x), 4 * x)
