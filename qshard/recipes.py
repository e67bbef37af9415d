"""Recipes: which format weights get, and with it how activations and gradients are quantized.

Names and arguments follow TransformerEngine's recipes (transformer_engine/common/recipe).

Every recipe takes emulate=True: linears compute on any device what the GEMMs of codes compute on the GPU
that has them. It is part of the format's name, and nothing that is stored or sent depends on it.
"""

from dataclasses import dataclass


def _with_options(base: str, *options: str) -> str:
    """The name of a format with the options that are not empty."""
    given = ",".join(filter(None, options))
    return f"{base}[{given}]" if given else base


@dataclass(frozen=True)
class Float8CurrentScaling:
    """One scale per tensor, from its current amax. E4M3 weights and activations, E5M2 gradients.

    use_power_2_scales: round scales down to powers of two. Quantizing a dequantized weight again
        then gives the same values, so checkpoints of weights without a master lose nothing; the
        price is 2.66 % instead of 2.65 % quantization error on normal data.
    emulate: compute on any device what GEMMs of codes compute; see Recipes, "Emulation", in the docs.
    """

    use_power_2_scales: bool = True
    emulate: bool = False

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        base = "float8_tensorwise" if self.use_power_2_scales else "float8_tensorwise_fp32_scale"
        return _with_options(base, "emulate" * self.emulate)


@dataclass(frozen=True)
class DelayedScaling:
    """One scale per tensor, from amaxes of earlier optimizer steps (arXiv:2209.05433, section 3.3):
    of the weight, and of the input and output gradient of its linear. All ranks agree on them in the
    all-reduce that ends a step. They are part of the model's state_dict.

    What a step leaves is scaled by amaxes of steps before it alone. After a load, or writes of your
    own, of another magnitude, values have scales of their own once they are flushed: by the next
    forward, or by qshard.flush(model) where a step comes first. Else that step's codes are clipped.

    margin: scales leave a factor of 2^margin up to the largest code.
    fp8_format: "HYBRID", E4M3 weights and activations with E5M2 gradients, or "E4M3" for all.
    amax_history_len: steps that are remembered.
    amax_compute_algo: "max" over the history, or "most_recent".
    emulate: compute on any device what GEMMs of codes compute; see Recipes, "Emulation", in the docs.
    """

    margin: int = 0
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    emulate: bool = False

    def __post_init__(self):
        if self.fp8_format not in ("HYBRID", "E4M3"):
            raise ValueError(f'fp8_format must be "HYBRID" or "E4M3", not {self.fp8_format!r}')
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f'amax_compute_algo must be "max" or "most_recent", not {self.amax_compute_algo!r}'
            )

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        return _with_options(
            "float8_delayed",
            f"margin={self.margin}" * (self.margin != 0),
            f"history={self.amax_history_len}" * (self.amax_history_len != 1024),
            "most_recent" * (self.amax_compute_algo == "most_recent"),
            "e4m3" * (self.fp8_format == "E4M3"),
            "emulate" * self.emulate,
        )


@dataclass(frozen=True)
class Float8RowwiseScaling:
    """One scale per row of a weight, one per token of activations and gradients, and one per feature of what
    the weight's gradient is computed from, all E4M3: torchao's recipe "rowwise", and what vLLM and
    compressed-tensors call FP8 per channel.

    use_f32_scales: keep the scale's mantissa instead of rounding it down to a power of two. The input's
        gradient is computed of the output's times the scales of the weight's rows, which is exact for powers
        of two. With others each product is rounded once, to fp32, before it is quantized.
    emulate: compute on any device what GEMMs of codes compute; see Recipes, "Emulation", in the docs.
    """

    use_f32_scales: bool = False
    emulate: bool = False

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        base = "float8_rowwise_fp32_scale" if self.use_f32_scales else "float8_rowwise"
        return _with_options(base, "emulate" * self.emulate)


@dataclass(frozen=True)
class Float8BlockScaling:
    """One scale per 128x128 block of a weight and per 1x128 block of activations and gradients, all
    E4M3 (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    use_f32_scales: keep the scale's mantissa instead of rounding it down to a power of two.
    x_block_scaling_dim: of the inputs that the weight's gradient is computed from. 1: blocks of 128
        tokens of one feature, as in DeepSeek-V3 and TransformerEngine. 2: of 128x128, which Hopper's
        GEMMs multiply faster. Outputs are the same: forward reads its inputs in 1x128 blocks in both.
    emulate: compute on any device what GEMMs of codes compute; see Recipes, "Emulation", in the docs.
    """

    use_f32_scales: bool = False
    x_block_scaling_dim: int = 2
    emulate: bool = False

    def __post_init__(self):
        if self.x_block_scaling_dim not in (1, 2):
            raise ValueError(
                "Float8BlockScaling: x_block_scaling_dim must be 1 or 2, got "
                f"{self.x_block_scaling_dim!r}"
            )

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        base = "float8_blockwise_fp32_scale" if self.use_f32_scales else "float8_blockwise"
        in_rows = "x_block_scaling_dim=1" * (self.x_block_scaling_dim == 1)
        return _with_options(base, in_rows, "emulate" * self.emulate)


@dataclass(frozen=True)
class MXFP8BlockScaling:
    """E4M3 codes with one power-of-two scale (E8M0) per block: 32x32 of a weight, so that its
    transpose needs no second copy (OCP Microscaling Formats v1.0; scales rounded up, so that no
    element overflows). The scales travel with the rows: 1.03125 bytes per element on the wire.

    weight_block: (1, 32) for less error, as TransformerEngine has it: one scale per 1x32 block for
        forward, and the weight once more in 32x1 blocks for dgrad, twice the bytes. The number of
        out features must be a multiple of 32.
    gather: what FSDP2 gathers of (1, 32) weights. "both" copies at every pass: 2.0625 bytes per
        element. "phase": in forward the one, in backward the other, 1.03125 bytes at each pass.
        That needs fully_shard(..., reshard_after_forward=True), for the root module too, and no
        activation checkpointing, which runs forward in backward.
    emulate: compute on any device what GEMMs of codes compute; see Recipes, "Emulation", in the docs.

    Its GEMM needs Blackwell; elsewhere weights are dequantized for a GEMM in the activations' dtype,
    or, with emulate=True, operands are quantized as on Blackwell.
    """

    weight_block: tuple[int, int] = (32, 32)
    gather: str = "both"
    emulate: bool = False

    def __post_init__(self):
        if self.weight_block not in ((32, 32), (1, 32)):
            raise ValueError(
                "MXFP8BlockScaling: weight_block must be (32, 32) or (1, 32), got "
                f"{self.weight_block!r}"
            )
        if self.gather not in ("both", "phase"):
            raise ValueError(
                f"MXFP8BlockScaling: gather must be 'both' or 'phase', got {self.gather!r}"
            )
        if self.gather == "phase" and self.weight_block != (1, 32):
            raise ValueError(
                "MXFP8BlockScaling: gather='phase' needs weight_block=(1, 32); 32x32 blocks serve "
                "forward and backward with one copy"
            )

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        base = "mxfp8" if self.weight_block == (32, 32) else "mxfp8_1x32"
        return _with_options(base, "phase" * (self.gather == "phase"), "emulate" * self.emulate)


@dataclass(frozen=True)
class NVFP4BlockScaling:
    """E2M1 codes, two per byte, with one E4M3 scale per 16x16 block of a weight and one fp32 scale
    per weight (arXiv:2509.25149): 0.5625 bytes per element on the wire.

    disable_rht: leave out the random Hadamard transform, which both operands of wgrad go through.
    disable_stochastic_rounding: round gradients to nearest.
    disable_2d_quantization: one scale per 1x16 block of a weight instead: less error, but the
        transposed weight that dgrad needs has other blocks, so dgrad multiplies dequantized values.
    four_over_six: scale each 1x16 block so that its largest value becomes code 6 or code 4, whichever
        leaves the block the smaller squared error (arXiv:2512.02010). That is every block of activations
        and gradients, and with disable_2d_quantization of weights. Blocks of 16x16 end in code 6: their
        rows may lie on several ranks, none of which sees the whole error.
    emulate: compute on any device what GEMMs of codes compute; see Recipes, "Emulation", in the docs.

    Its GEMM needs Blackwell; elsewhere weights are dequantized for a GEMM in the activations' dtype,
    or, with emulate=True, operands are quantized as on Blackwell.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    four_over_six: bool = False
    emulate: bool = False

    @property
    def format(self) -> str:
        """Name of the weights' format."""
        return _with_options(
            "nvfp4_1x16" if self.disable_2d_quantization else "nvfp4",
            "no_hadamard" * self.disable_rht,
            "nearest_gradients" * self.disable_stochastic_rounding,
            "4over6" * self.four_over_six,
            "emulate" * self.emulate,
        )


RECIPES = (
    Float8CurrentScaling,
    DelayedScaling,
    Float8RowwiseScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
_BY_NAME = {
    recipe.format: recipe
    for recipe in (
        *(recipe() for recipe in RECIPES),
        Float8CurrentScaling(use_power_2_scales=False),
        Float8RowwiseScaling(use_f32_scales=True),
        Float8BlockScaling(use_f32_scales=True),
        MXFP8BlockScaling(weight_block=(1, 32)),
        NVFP4BlockScaling(disable_2d_quantization=True),
    )
}


def recipe_of(given, function: str):
    """The recipe that an argument is or names. Raises TypeError and ValueError in the name of `function`."""
    if isinstance(given, str):
        if given not in _BY_NAME:
            raise ValueError(
                f"{function}: recipe {given!r} is not known; expected a recipe such as "
                f"qshard.Float8BlockScaling(), or one of {', '.join(_BY_NAME)}"
            )
        return _BY_NAME[given]
    if isinstance(given, type) and given in RECIPES:
        raise TypeError(
            f"{function}: recipe is the class {given.__name__}; expected a recipe, which calling it makes: "
            f"qshard.{given.__name__}()"
        )
    if not isinstance(getattr(given, "format", None), str):
        raise TypeError(
            f"{function}: recipe is {given!r}; expected a recipe such as qshard.Float8BlockScaling(), or its "
            "format's name, such as \"float8_blockwise\""
        )
    return given


def name_of(format: str) -> str:
    """The class of the recipe that a format is of."""
    base = format.partition("[")[0]
    return type(_BY_NAME[base]).__name__ if base in _BY_NAME else ""


def is_emulated(format: str) -> bool:
    """Whether linears of a format compute what GEMMs of codes would."""
    return "emulate" in format.partition("[")[2].removesuffix("]").split(",")
