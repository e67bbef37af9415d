"""What others' own CPU code makes of our files: transformers' fp8 dequantization, compressed-tensors
and nvidia-modelopt. (The `modelopt` tests skip where it is not installed: `make test-clients` does.)"""

import json
from importlib.util import find_spec

import pytest
import torch
from dist_helpers import World
from low_bit_models import ROWS, save
from safetensors.torch import load_file

NEEDS_MODELOPT = pytest.mark.skipif(
    find_spec("modelopt") is None,
    reason="nvidia-modelopt not installed; `make test-clients` installs it",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    known = {}

    def of(row):
        if row not in known:
            directory = tmp_path_factory.mktemp("model")
            values = World("cpu", 2).run(save, row, directory)[0][0]
            tensors = {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}
            config = json.loads((directory / "config.json").read_text())["quantization_config"]
            known[row] = directory, values, tensors, config
        return known[row]

    return of


def weights(tensors, *suffixes):
    """(module, its tensors of these suffixes)"""
    end = f"_proj.{suffixes[0]}"
    modules = sorted(k.removesuffix(f".{suffixes[0]}") for k in tensors if k.endswith(end))
    assert len(modules) == 6
    for module in modules:
        yield module, *(tensors[f"{module}.{suffix}"] for suffix in suffixes)


@pytest.mark.parametrize("row", ["deepseek-fp8", "deepseek-fp8, fp32 scales"])
def test_transformers(saved, row):
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    _, values, tensors, config = saved(row)
    read = FineGrainedFP8Config(**{k: v for k, v in config.items() if k not in ("quant_method", "fmt")})
    assert tuple(read.weight_block_size) == (128, 128) and read.modules_to_not_convert == ["lm_head"]
    reader = Fp8Dequantize(None)
    compared = 0
    for module, codes, scale in weights(tensors, "weight", "weight_scale_inv"):
        if codes.shape[0] > 128 and codes.shape[0] % 128:
            continue  # its loader divides rows evenly among blocks
        assert torch.equal(reader._dequantize_one(codes, scale), values[f"{module}.weight"])
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


@NEEDS_MODELOPT
def test_modelopt_mxfp8(saved):
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    _, values, tensors, _ = saved("modelopt, mxfp8")
    for module, codes, scale in weights(tensors, "weight", "weight_scale"):
        read = MXFP8QTensor(codes.shape, torch.float32, codes)
        assert torch.equal(read.dequantize(scale=scale), values[f"{module}.weight"])


@NEEDS_MODELOPT
def test_modelopt_nvfp4(saved):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    _, values, tensors, _ = saved("modelopt, nvfp4")
    suffixes = "weight", "weight_scale", "weight_scale_2"
    for module, codes, scale, tensor_scale in weights(tensors, *suffixes):
        read = NVFP4QTensor((codes.shape[0], 2 * codes.shape[1]), torch.float32, codes)
        got = read.dequantize(scale=scale, double_scale=tensor_scale, block_sizes={-1: 16})
        assert torch.equal(got, values[f"{module}.weight"])  # a code of -0 reads as +0: equal


@NEEDS_MODELOPT
@pytest.mark.parametrize("row", ["modelopt, mxfp8", "modelopt, nvfp4"])
def test_modelopts_config_is_what_it_would_make(saved, row):
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    directory, _, _, config = saved(row)
    theirs = convert_hf_quant_config_format(json.loads((directory / "hf_quant_config.json").read_text()))
    for key in ("quant_method", "quant_algo", "ignore"):
        assert theirs[key] == config[key]
