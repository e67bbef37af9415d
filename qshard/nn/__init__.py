"""Modules whose weights can be quantized. `Linear` and `Embedding` are what `quantize_` turns those of
torch.nn into; the others take the arguments of TransformerEngine's modules of the same names, and their
parameters have the same names and shapes."""

from qshard.nn.dot_product_attention import DotProductAttention
from qshard.nn.embedding import Embedding
from qshard.nn.grouped import GroupedExperts, GroupedLinear
from qshard.nn.l2_normalization import L2Normalization
from qshard.nn.layer_norm import LayerNorm
from qshard.nn.layer_norm_linear import LayerNormLinear
from qshard.nn.layer_norm_mlp import LayerNormMLP
from qshard.nn.linear import Linear
from qshard.nn.losses import LinearCrossEntropyLoss, linear_cross_entropy
from qshard.nn.multihead_attention import MultiheadAttention
from qshard.nn.rms_norm import RMSNorm
from qshard.nn.rotary import RotaryPositionEmbedding, apply_rotary_emb, apply_rotary_pos_emb
from qshard.nn.transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Embedding",
    "GroupedExperts",
    "GroupedLinear",
    "L2Normalization",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearCrossEntropyLoss",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_emb",
    "apply_rotary_pos_emb",
    "linear_cross_entropy",
]
