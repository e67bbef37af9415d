"""The rows of the study: a recipe, which blocks it leaves plain, and when it hands over to bf16."""

from dataclasses import dataclass, replace

import qshard

LAST_BLOCKS = 0.15  # the share of blocks that stay plain (arXiv:2509.25149, section 4.1)
LAST_STEPS = 0.18  # the share of steps that run in bf16 (the same paper, appendix)


@dataclass(frozen=True)
class Row:
    """One way of training. Embedding and head are plain in all of them."""

    title: str
    recipe: object = None  # None: bf16
    plain_blocks: float = 0.0  # the share of the blocks, the last ones, that stay plain
    last_steps: float = 0.0  # the share of the steps, the last ones, whose forward is in bf16
    plain_backward: bool = False  # and whose backward is, too


def _nvfp4(**options) -> Row:
    """The recipe of arXiv:2509.25149, but for `options`."""
    return Row("NVFP4, the paper's recipe", qshard.NVFP4BlockScaling(emulate=True, **options), LAST_BLOCKS)


ROWS = {
    "bf16": Row("bf16"),
    "fp8": Row("FP8, one scale per tensor", qshard.Float8CurrentScaling(emulate=True)),
    "fp8_blocks": Row("FP8, blocks of 128", qshard.Float8BlockScaling(emulate=True)),
    "mxfp8": Row("MXFP8, 32x32 weights", qshard.MXFP8BlockScaling(emulate=True)),
    "mxfp8_1x32": Row("MXFP8, 1x32 weights", qshard.MXFP8BlockScaling(weight_block=(1, 32), emulate=True)),
    "nvfp4": _nvfp4(),
    "nvfp4_all_blocks": replace(_nvfp4(), title="every block in NVFP4", plain_blocks=0.0),
    "nvfp4_no_hadamard": replace(_nvfp4(disable_rht=True), title="no Hadamard transform"),
    "nvfp4_nearest": replace(_nvfp4(disable_stochastic_rounding=True), title="gradients to nearest"),
    "nvfp4_1x16": replace(_nvfp4(disable_2d_quantization=True), title="1x16 weights"),
    "nvfp4_plain": replace(
        _nvfp4(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
        title="none of the four",
        plain_blocks=0.0,
    ),
    "nvfp4_4over6": replace(_nvfp4(four_over_six=True), title="four over six"),
    "nvfp4_4over6_1x16": replace(
        _nvfp4(four_over_six=True, disable_2d_quantization=True), title="four over six, 1x16 weights"
    ),
    "nvfp4_forward_bf16": replace(_nvfp4(), title="forward of the last 18 % of steps in bf16", last_steps=LAST_STEPS),
    "nvfp4_4over6_forward_bf16": replace(
        _nvfp4(four_over_six=True), title="both: four over six, and that forward", last_steps=LAST_STEPS
    ),
    "nvfp4_then_bf16": replace(
        _nvfp4(), title="the last 18 % of steps in bf16", last_steps=LAST_STEPS, plain_backward=True
    ),
}
REFERENCE = "bf16"
REFERENCE_SEEDS, SEEDS = 5, 3  # how many seeds the reference has, and each other row


def is_plain(row: Row, name: str, blocks: int) -> bool:
    """Whether a row leaves the linear of this name plain."""
    if not name.startswith("layers."):
        return True
    return int(name.split(".")[1]) >= blocks - round(row.plain_blocks * blocks)
