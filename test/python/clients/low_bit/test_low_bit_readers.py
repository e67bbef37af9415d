"""What others' own CPU code makes of our files: transformers' fp8 dequantization and
compressed-tensors."""

import json

import pytest
import torch
from low_bit_models import ROWS, saved, weights  # noqa: F401
from safetensors.torch import load_file

import qshard
from qshard.checkpoint import save_quantized


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("deepseek")])
def test_transformers_reads_checkpoints(saved, row):
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    _, values, tensors, config = saved(row)
    read = FineGrainedFP8Config(**{k: v for k, v in config.items() if k not in ("quant_method", "fmt")})
    assert tuple(read.weight_block_size) == (128, 128) and read.modules_to_not_convert == ["lm_head"]
    is_ue8m0 = row == "deepseek-fp8, ue8m0"
    assert read.scale_fmt == ("ue8m0" if is_ue8m0 else "float")
    reader = Fp8Dequantize(None)
    compared = 0
    for module, codes, scale in weights(tensors, "weight", "weight_scale_inv"):
        if codes.shape[0] > 128 and codes.shape[0] % 128:
            continue  # its loader divides rows evenly among blocks
        assert scale.dtype == (torch.float8_e8m0fnu if is_ue8m0 else torch.float32)
        got = reader._dequantize_one(codes, scale, torch.float32)
        assert torch.equal(got, values[f"{module}.weight"])
        compared += 1
    assert compared == 4


def compressed(config, ignore=("lm_head",)):
    """(compressor, scheme), as the package makes them of config.json's entry."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(config)
    assert read.ignore == list(ignore)
    return BaseCompressor.get_value_from_registry(read.format), read.config_groups["group_0"]


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("compressed")])
def test_compressed_tensors_reads_checkpoints(saved, row):
    _, values, tensors, config = saved(row)
    compressor, scheme = compressed(config)
    names = {"compressed-tensors, nvfp4": ("weight_packed", "weight_scale", "weight_global_scale")}
    suffixes = names.get(row, ("weight", "weight_scale"))
    for module, *planes in weights(tensors, *suffixes):
        state = dict(zip(suffixes, planes))
        want = values[f"{module}.weight"]
        got = compressor.decompress(state, scheme)["weight"].float()
        if row == "compressed-tensors, nvfp4":
            # In bf16 as it comes; in fp32 to 2 ulps: the file has a rounded reciprocal, by which the
            # reader divides scales.
            torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
            got = in_fp32(state, scheme)
            assert torch.equal(got.signbit(), want.signbit())
            assert (got.view(torch.int32) - want.view(torch.int32)).abs().max() <= 2
            continue
        assert torch.equal(got, want)


@pytest.mark.parametrize("row", [f"compressed-tensors, {kind}" for kind in ("tensor", "channel", "block")])
def test_compressed_tensors_reads_ragged_weights(row, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 150), torch.nn.Linear(150, 7))
    qshard.quantize_(model, ROWS[row][1], filter_fn=lambda module, name: name == "0")
    save_quantized(model, tmp_path, layout="compressed-tensors")
    (file,) = tmp_path.glob("*.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    compressor, scheme = compressed(config, ignore=["1"])
    tensors = load_file(file)
    state = {name: tensors[f"0.{name}"] for name in ("weight", "weight_scale")}
    got = compressor.decompress(state, scheme)["weight"].float()
    assert torch.equal(got, qshard.ops.dequantize(model[0].weight.detach()))


def in_fp32(state, scheme):
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = state["weight_packed"].shape
    return dequantize(
        x_q=unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32),
        scale=state["weight_scale"].float(),
        args=scheme.weights,
        global_scale=state["weight_global_scale"],
        dtype=torch.float32,
    )
