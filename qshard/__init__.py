"""Quantized sharded tensors: FP8, MXFP8 and NVFP4 weights that FSDP2, torch.optim, DCP and torch.compile take as
ordinary parameters."""

import importlib.metadata

from qshard._library import library_path  # loads the library
from qshard import _pickled_names, _runtime, checkpoint, nn, ops, serialization, tensor_parallel  # noqa: F401
from qshard.activation_checkpointing import selective_context_fn, selective_policy
from qshard.checkpoint.quantization_state import QuantizationState
from qshard.clipping import clip_grad_norm_
from qshard.dynamic_weights.fsdp1 import prepare_for_fsdp1
from qshard.experts.token_dispatcher import TokenDispatcher
from qshard.fuse import fuse_
from qshard.gradients import ddp_comm_hook, reduce_gradients_
from qshard.model.dequantize import dequantize_
from qshard.model.forward_precision import set_forward_precision
from qshard.model.large_layers import large_enough
from qshard.model.quantize import flush, is_quantized, mark_written, quantize_
from qshard.model.quantized_init import quantized_model_init
from qshard.ops import from_planes
from qshard.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from qshard.report import backend_report, debug, report, trace_fallbacks
from qshard.watching import watch

try:
    __version__ = importlib.metadata.version("qshard")
except importlib.metadata.PackageNotFoundError:  # a checkout, with QSHARD_LIBRARY
    __version__ = "0 (not installed)"

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizationState",
    "TokenDispatcher",
    "backend_report",
    "checkpoint",
    "clip_grad_norm_",
    "ddp_comm_hook",
    "debug",
    "dequantize_",
    "flush",
    "from_planes",
    "fuse_",
    "is_quantized",
    "large_enough",
    "library_path",
    "mark_written",
    "nn",
    "ops",
    "prepare_for_fsdp1",
    "quantize_",
    "quantized_model_init",
    "reduce_gradients_",
    "report",
    "selective_context_fn",
    "selective_policy",
    "serialization",
    "set_forward_precision",
    "tensor_parallel",
    "trace_fallbacks",
    "watch",
]
