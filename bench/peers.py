"""Other libraries' quantized training, measured beside ours; imported only where it is asked for.

torchao_tensorwise   Float8Linear with a scale per tensor; FSDP2 gathers its weights in FP8
torchao_rowwise      the same with a scale per row; FSDP2 gathers its weights in bf16
te_tensorwise        TransformerEngine's TransformerLayer under its Float8CurrentScaling; FSDP2 gathers bf16
te_blockwise         the same under its Float8BlockScaling
te_delayed           the same under its DelayedScaling

With the option fp8_weights TransformerEngine's parameters are FP8, as in its own
examples/pytorch/quantized_model_init/fully_shard.py: FSDP2 gathers FP8, and its FusedAdam keeps fp32 masters.

torchao's conversion changes how torch's inductor generates code in this process, for all models: peers
are measured last, and torchao's last of all.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from llama_of_modules import LlamaConfig, LlamaOfModules
from torch import nn
from torch.distributed.tensor import distribute_tensor

TORCHAO = {"torchao_tensorwise": "tensorwise", "torchao_rowwise": "rowwise"}  # torchao's recipes
TE = {  # classes of TransformerEngine's recipes
    "te_tensorwise": "Float8CurrentScaling",
    "te_blockwise": "Float8BlockScaling",
    "te_delayed": "DelayedScaling",
}
PEERS = (*TE, *TORCHAO)
COUNTERPARTS = {  # by our format: the peers that do the same
    "float8_tensorwise": ("torchao_tensorwise", "te_tensorwise"),
    "float8_delayed": ("te_delayed",),
    "float8_rowwise": ("torchao_rowwise",),
    "float8_blockwise": ("te_blockwise",),
}


def convert(model: nn.Module, name: str, filter_fn=None) -> nn.Module:
    """The model with linears of torchao, before fully_shard; on CPU their GEMMs are emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(TORCHAO[name]),
        enable_fsdp_float8_all_gather=name == "torchao_tensorwise",
        emulate=next(model.parameters()).device.type == "cpu",
    )
    return convert_to_float8_training(model, config=config, module_filter_fn=filter_fn)


def after_update(model: nn.Module) -> Callable[[], None]:
    """What is to be called after each optimizer.step(); of torchao_rowwise it does nothing."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    return lambda: precompute_float8_dynamic_scale_for_fsdp(model)


def torchao_linear(layer: nn.Linear) -> nn.Module:
    """torchao's tensorwise linear, its weight as FSDP2 gathers it from one rank: codes and a scale."""
    layer = convert(layer, "torchao_tensorwise")
    weight = layer.weight
    codes, scale = weight.fsdp_pre_all_gather(None)
    gathered, _ = weight.fsdp_post_all_gather(codes, scale, weight.dtype)
    layer.weight = nn.Parameter(gathered)
    return layer


def te_llama(config: LlamaConfig, name: str, **of_layer) -> LlamaOfModules:
    """The model with blocks of TransformerEngine, before fully_shard, whose policy must not cast what a block
    is given: angles of rotary embeddings are float32."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    model = LlamaOfModules(config, library=te, **of_layer)
    model.autocast = functools.partial(te.autocast, recipe=getattr(recipe, TE[name])())
    return model


def te_llama_of_fp8(config: LlamaConfig, name: str) -> LlamaOfModules:
    """te_llama with FP8 weights in its blocks, which are on the meta device until te_optimizer() fills them."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    with te.quantized_model_init(recipe=getattr(recipe, TE[name])()):
        return te_llama(config, name, device="meta")


def te_optimizer(model: nn.Module, plain: nn.Module, **arguments) -> torch.optim.Optimizer:
    """The optimizer of te_llama_of_fp8's model, which fully_shard() has sharded. Its FP8 weights, which are
    allocated here, and their masters have the values of te_llama's whole model `plain`."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for module in model.modules():
        if isinstance(module, TransformerEngineBaseModule):
            module.reset_parameters()
    values = dict(plain.named_parameters())
    optimizer = te.optimizers.FusedAdam(model.parameters(), master_weights=True, **arguments)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            optimizer.initialize_state(parameter, store_param_remainders=False)
            shard = parameter.to_local()
            if isinstance(shard, te.QuantizedTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                master = distribute_tensor(values[name], mesh, placements, src_data_rank=None).to_local()
                shard.quantize_(master)
                optimizer.set_scaled_state(parameter, "master_param", master)
    return optimizer


def gathered_element_size(shard: torch.Tensor) -> int:
    """Bytes per element that FSDP2 gathers of a weight that is not ours, computing in bf16."""
    return 1 if hasattr(shard, "fsdp_pre_all_gather") else 2


def versions() -> dict[str, str]:
    """The versions of the peers that were imported."""
    names = ("torchao", "transformer_engine")
    return {name: sys.modules[name].__version__ for name in names if name in sys.modules}
