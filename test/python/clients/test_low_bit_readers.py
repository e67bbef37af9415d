"""What others' own CPU code makes of our files: transformers' fp8 dequantization and
compressed-tensors."""

import pytest
import torch
from low_bit_models import ROWS, saved, weights  # noqa: F401


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("deepseek")])
def test_transformers(saved, row):
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


def compressed(config):
    """(compressor, scheme), as the package makes them of config.json's entry."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(config)
    assert read.ignore == ["lm_head"]
    return BaseCompressor.get_value_from_registry(read.format), read.config_groups["group_0"]


@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("compressed")])
def test_compressed_tensors(saved, row):
    _, values, tensors, config = saved(row)
    compressor, scheme = compressed(config)
    names = {"compressed-tensors, nvfp4": ("weight_packed", "weight_scale", "weight_global_scale")}
    suffixes = names.get(row, ("weight", "weight_scale"))
    for module, *planes in weights(tensors, *suffixes):
        state = dict(zip(suffixes, planes))
        want = values[f"{module}.weight"]
        got = compressor.decompress(state, scheme)["weight"].float()
        if row == "compressed-tensors, nvfp4":
            # In bf16 as it comes; in fp32 to an ulp, since the file has a rounded reciprocal.
            torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
            got = in_fp32(state, scheme)
            torch.testing.assert_close(got, want, rtol=2**-22, atol=0)
            continue
        assert torch.equal(got, want)


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
