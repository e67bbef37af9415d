"""Other libraries' quantized training, measured beside ours; imported only where it is asked for.

torchao_tensorwise   Float8Linear with a scale per tensor; FSDP2 gathers its weights in FP8
torchao_rowwise      the same with a scale per row; FSDP2 gathers its weights in bf16

torchao's conversion changes how torch's inductor generates code in this process, for all models: peers
are measured last.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

PEERS = {"torchao_tensorwise": "tensorwise", "torchao_rowwise": "rowwise"}  # torchao's recipes
COUNTERPARTS = {  # by our format: the peer that does the same
    "float8_tensorwise": "torchao_tensorwise",
    "float8_rowwise": "torchao_rowwise",
}


def convert(model: nn.Module, name: str, filter_fn=None) -> nn.Module:
    """The model with linears of a peer, before fully_shard; on CPU their GEMMs are emulated."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(PEERS[name]),
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


def gathered_element_size(shard: torch.Tensor) -> int:
    """Bytes per element that FSDP2 gathers of a weight that is not ours, computing in bf16."""
    return 1 if hasattr(shard, "fsdp_pre_all_gather") else 2


def versions() -> dict[str, str]:
    """The versions of the peers that were imported."""
    return {name: sys.modules[name].__version__ for name in ("torchao",) if name in sys.modules}
