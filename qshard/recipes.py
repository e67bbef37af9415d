"""Recipes: which format weights get, and with it how activations and gradients are quantized.

Names and arguments follow TransformerEngine's recipes (transformer_engine/common/recipe).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Float8CurrentScaling:
    """One scale per tensor, from its current amax. E4M3 weights and activations, E5M2 gradients.

    use_power_2_scales: round scales down to powers of two. Quantizing a dequantized weight again
        then gives the same values, so checkpoints of weights without a master lose nothing; the
        price is 2.66 % instead of 2.65 % quantization error on normal data.
    """

    use_power_2_scales: bool = True

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        return "float8_tensorwise" if self.use_power_2_scales else "float8_tensorwise_fp32_scale"


@dataclass(frozen=True)
class Float8BlockScaling:
    """One scale per 128x128 block of a weight and per 1x128 block of activations and gradients, all
    E4M3 (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    use_f32_scales: keep the scale's mantissa instead of rounding it down to a power of two.
    """

    use_f32_scales: bool = False

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        return "float8_blockwise_fp32_scale" if self.use_f32_scales else "float8_blockwise"
