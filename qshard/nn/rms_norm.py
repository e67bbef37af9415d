"""RMSNorm with TransformerEngine's arguments."""

from qshard.nn.layer_norm import Norm


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions; with zero_centered_gamma times
    1 + weight. Computed in fp32 and rounded once. Arguments: those of LayerNorm."""

    normalization = "RMSNorm"
    has_bias = False
