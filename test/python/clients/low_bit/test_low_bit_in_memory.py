"""Modules of compressed-tensors and transformers that get a stream's tensors in memory compute what they compute of the files."""

import contextlib
import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from dist_helpers import World, full_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import qshard
from qshard.checkpoint import quantized_tensors, save_quantized

BUDGET_S = 60
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
RECIPES = {
    "tensor": qshard.Float8CurrentScaling(),
    "block": qshard.Float8BlockScaling(),
    "mxfp8": qshard.MXFP8BlockScaling(),
    "nvfp4": qshard.NVFP4BlockScaling(),
}


def config_of(kind):
    """transformers notes a model's dtype in the configuration that it is made from."""
    if kind == "dense":
        return transformers.LlamaConfig(**SIZES)
    return transformers.Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=32)


def trainer(kind, recipe, mesh=None):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    # As a model is trained for engines, which run q, k and v as one.
    share = {"share_tensor_scale": True} if recipe == "nvfp4" else {}
    qshard.quantize_(
        model, RECIPES[recipe], filter_fn=lambda module, name: "proj" in name or "experts" in name,
        parameter_fn=lambda parameter, name: "experts" in name, **share,
    )  # fmt: skip
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def send(kind, recipe, layout, dtype, folder):
    """On each rank of an FSDP2 world, once with files beside it; the stream's tensors."""
    model = trainer(kind, recipe, full_mesh())
    save_quantized(model, folder, layout="deepseek-fp8" if layout == "vllm" else layout)
    options = {"fused": {}} if layout == "vllm" else {}
    return dict(quantized_tensors(model, layout=layout, dst=0, plain_dtype=dtype, **options))


def sent(kind, recipe, layout, dtype, folder):
    tensors, other = World("cpu", 2).run(send, kind, recipe, layout, dtype, folder)
    assert tensors and not other and not dist.is_initialized()
    return tensors


@torch.no_grad()
def logits(model):
    return model.eval()(torch.arange(1, 33).view(2, 16)).logits.float()


@pytest.mark.parametrize("recipe", RECIPES)
def test_modules_of_compressed_tensors(recipe, tmp_path):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    tensors = sent("dense", recipe, "compressed-tensors", torch.bfloat16, tmp_path)
    of_files = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.manual_seed(1)
    in_memory = transformers.AutoModelForCausalLM.from_config(config_of("dense"), dtype=torch.bfloat16)
    config = QuantizationConfig.model_validate(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    apply_quantization_config(in_memory, config, run_compressed=False)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(in_memory)
    in_memory.load_state_dict(tensors)  # strict: these names and no others
    got, want = logits(in_memory), logits(of_files)
    assert torch.equal(got, want)
    assert torch.nn.functional.cosine_similarity(got, logits(trainer("dense", recipe)), dim=-1).min() > 0.98


def fp8_linear(input, weight, weight_scale_inv, block_size=None, bias=None, *_):
    """What transformers' kernel for GPUs multiplies by, with plain activations."""
    weight = finegrained_fp8._dequantize_fp8_weight(weight, weight_scale_inv, block_size, torch.float32)
    return torch.nn.functional.linear(input, weight, bias)


@contextlib.contextmanager
def without_a_gpu():
    """FP8 modules on a CPU, where transformers would dequantize them."""
    with (
        mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None),
        mock.patch.object(finegrained_fp8, "fp8_linear", fp8_linear),
    ):
        yield


# vLLM's names of stacks, and those of transformers' FP8Experts, which hold the same.
STACKS = {
    "w13_weight": "gate_up_proj", "w13_weight_scale_inv": "gate_up_proj_scale_inv",
    "w2_weight": "down_proj", "w2_weight_scale_inv": "down_proj_scale_inv",
}  # fmt: skip


@pytest.mark.parametrize("kind, layout", [("dense", "deepseek-fp8"), ("experts", "vllm")])
def test_modules_of_transformers(kind, layout, tmp_path):
    tensors = sent(kind, "block", layout, torch.float32, tmp_path)
    tensors = {".".join(STACKS.get(part, part) for part in name.split(".")): t for name, t in tensors.items()}
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    ignored = quantization["modules_to_not_convert"]
    with without_a_gpu():
        of_files = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, experts_implementation="eager"
        )
        torch.manual_seed(1)
        in_memory = transformers.AutoModelForCausalLM.from_config(config_of(kind), experts_implementation="eager")
        finegrained_fp8.replace_with_fp8_linear(
            in_memory,
            modules_to_not_convert=ignored,
            quantization_config=transformers.FineGrainedFP8Config(
                weight_block_size=(128, 128), modules_to_not_convert=ignored
            ),
            pre_quantized=True,
        )
        in_memory.load_state_dict(tensors, assign=True)
        modules = {type(module).__name__ for module in in_memory.modules()}
        assert {"FP8Linear", *(["FP8Experts"] if kind == "experts" else [])} <= modules
        assert torch.equal(logits(in_memory), logits(of_files))
        # Activations are plain in this trainer, too: what is left is the order of sums.
        torch.testing.assert_close(logits(in_memory), logits(trainer(kind, "block")), rtol=1e-4, atol=1e-5)
