"""What nvidia-modelopt's own CPU code makes of our files."""

import json

import pytest
import torch
from low_bit_models import saved, weights  # noqa: F401


def test_modelopt_reads_mxfp8(saved):
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    _, values, tensors, _ = saved("modelopt, mxfp8")
    for module, codes, scale in weights(tensors, "weight", "weight_scale"):
        read = MXFP8QTensor(codes.shape, torch.float32, codes)
        assert torch.equal(read.dequantize(scale=scale), values[f"{module}.weight"])


def test_modelopt_reads_nvfp4(saved):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    _, values, tensors, _ = saved("modelopt, nvfp4")
    suffixes = "weight", "weight_scale", "weight_scale_2"
    for module, codes, scale, tensor_scale in weights(tensors, *suffixes):
        read = NVFP4QTensor((codes.shape[0], 2 * codes.shape[1]), torch.float32, codes)
        got = read.dequantize(scale=scale, double_scale=tensor_scale, block_sizes={-1: 16})
        assert torch.equal(got, values[f"{module}.weight"])  # a code of -0 reads as +0: equal


@pytest.mark.parametrize("row", ["modelopt, mxfp8", "modelopt, nvfp4"])
def test_modelopts_config_is_what_it_would_make(saved, row):
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    directory, _, _, config = saved(row)
    theirs = convert_hf_quant_config_format(json.loads((directory / "hf_quant_config.json").read_text()))
    for key in ("quant_method", "quant_algo", "ignore"):
        assert theirs[key] == config[key]
