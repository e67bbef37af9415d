"""Other libraries' quantized training, measured beside ours; imported only where it is asked for.

torchao_tensorwise   Float8Linear with a scale per tensor; FSDP2 gathers its weights in FP8
torchao_rowwise      the same with a scale per row; FSDP2 gathers its weights in bf16

torchao's conversion changes how torch's inductor generates code in this process, for everybody: peers
are measured last.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

PEERS = {"torchao_tensorwise": "tensorwise", "torchao_rowwise": "rowwise"}  # torchao's recipes
COUNTERPARTS = {"float8_tensorwise": "torchao_tensorwise"}  # of ours, what does the same


def convert(model: nn.Module, name: str, filter_fn) -> Callable[[], None]:
    """Makes the model's linears those of a peer, before fully_shard; without FP8 GEMMs (on CPU) they
    are emulated. Returns what is to be called after each optimizer.step()."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = replace(
        Float8LinearConfig.from_recipe_name(PEERS[name]),
        enable_fsdp_float8_all_gather=name == "torchao_tensorwise",
        emulate=next(model.parameters()).device.type == "cpu",
    )
    convert_to_float8_training(model, config=config, module_filter_fn=filter_fn)
    return lambda: precompute_float8_dynamic_scale_for_fsdp(model)  # nothing to do for rows


def gathered_element_size(shard: torch.Tensor) -> int:
    """Bytes per element that FSDP2 gathers of a weight that is not ours, computing in bf16."""
    return 1 if hasattr(shard, "fsdp_pre_all_gather") else 2


def versions() -> dict[str, str]:
    """Of the peers that were imported."""
    return {name: sys.modules[name].__version__ for name in ("torchao",) if name in sys.modules}
