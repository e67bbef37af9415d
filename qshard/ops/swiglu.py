"""The operators of a SwiGLU MLP, and of MLPs with other activations; public as those of `qshard.ops`."""

import torch
from torch import Tensor

from qshard.ops.operator_calls import operator


@operator
def swiglu_mlp(
    input: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    weight_only: bool = False,
    format: str,
    down_format: str,
    gate_state: list[Tensor] | None = None,
    up_state: list[Tensor] | None = None,
    down_state: list[Tensor] | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
    rms: bool = False,
    zero_centered_gamma: bool = False,
    activation: str = "swiglu",
) -> Tensor:
    """linear(silu(linear(input, gate)) * linear(input, up), down): the values of these operators, one after
    the other, rounded where they round. Autograd keeps the results of gate and up, and nothing of what is
    made of them. On Hopper, with scales per tensor or in blocks of 128, the product and the gradients of
    gate and up are quantized as they are made and never stored: to the same codes, but for at most 1e-5 of
    them where torch was built with another exp.

    input: (..., columns). gate, up: quantized (inner, columns), of one format; up None: gate is
        (2 x inner, columns), gate's rows first. down: quantized (outputs, inner). biases: of their rows.
    format, down_format: of gate and up, and of down. A plain weight is quantized for this use.
    gate_state, up_state, down_state: of all weights or of none: weight_state of `linear`, for plain ones.
    weight_only: as of `linear`.
    residual: (..., outputs), as of `linear`.
    norm_weight, norm_bias, eps, rms, zero_centered_gamma: as of `norm_linear`, whose codes gate and up read then. A
        residual that is `input` itself costs no pass in backward.
    activation: what stands in the place of silu: "swiglu", "geglu" (GELU by tanh), "reglu" (relu) or "sreglu"
        (relu squared). "silu", "gelu", "relu" and "srelu" are that of linear(input, gate) alone: up is None, and gate
        (inner, columns). Codes of GELU are those of its formula rounded once; torch's operator is up to 1e-6 off
        where it is below -3.

    Returns (..., outputs) in the dtype of `input`. No double backward. Raises RuntimeError for shapes,
    devices or formats that do not go together.
    """


@operator
def swiglu_experts(
    input: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    offs: Tensor,
    *,
    weight_only: bool = False,
    format: str | None = None,
    down_format: str | None = None,
) -> Tensor:
    """The SwiGLU MLPs of experts: grouped_linear(silu(grouped_linear(input, gate)) * grouped_linear(input, up), down), the
    values of these operators, one after the other. Autograd keeps `input` and the results of gate and up;
    backward makes the product of both again.

    input: (rows, columns), or in codes, as of `linear`.
    gate, up: quantized (experts, inner, columns), of one format; up None: gate is (experts, 2 x inner, columns), each
        expert's rows of gate first. down: quantized (experts, outputs, inner).
    offs: int32 (experts,), as of `grouped_linear`, which says what rows of no expert and experts without rows give.
    format, down_format: of gate and up, and of down; compiled code needs them. A plain weight is quantized for this
        use.
    weight_only: as of `linear`.

    Returns (rows, outputs) in the dtype of `input`. No double backward. Raises RuntimeError for shapes, devices or
    formats that do not go together.
    """


@operator
def swiglu_linear_forward(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    keep_maxima: bool,
    weight_only: bool = False,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    residual: Tensor | None = None,
    offs: Tensor | None = None,
    activation: str = "swiglu",
) -> tuple[Tensor, Tensor]:
    """linear(silu(gate) * up), what `swiglu_mlp` runs below autograd: (output, maxima). Maxima, float32
    (1 + 32 x tiles,), are the amax of the product, then of each 8 rows of each tile of 128x128 of gate and up
    as matrices the largest magnitudes of silu(gate) and of up; (0,) unless kept.

    gate, up: (..., columns), with any strides. format: of the weight, which is checked; weight_state: as
        of `linear`, for a plain weight. residual: as of `linear`.
    offs: as of `grouped_linear`, of a stack (experts, outputs, columns), without bias, residual or state; keep_maxima then
        keeps the codes of the product that wgrad reads, uint8, in the place of maxima.
    activation: as of `swiglu_mlp`; up is None for those of gate alone. offs go with "swiglu".

    Raises RuntimeError for shapes, dtypes or devices that do not fit.
    """


@operator
def swiglu_linear_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    maxima: Tensor,
    needs_weight: bool,
    rows: bool,
    columns: bool,
    joined: bool,
    grad_format: str | None = None,
    weight_only: bool = False,
    grad_dtype: torch.dtype | None = None,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    *,
    weight_grad: Tensor | None = None,
    offs: Tensor | None = None,
    activation: str = "swiglu",
    bias_grads: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(grad_weight, gate, gate_columns, up, up_columns) of `swiglu_linear_forward`; (0,) what is not needed.

    grad_format: None for the gradients of gate and up, with no columns; else of the weights that they meet,
        for the codes that `linear_backward` takes: for dgrad if `rows`, for wgrad if `columns`. Without
        either no gradients are made.
    joined: as of one tensor (..., 2 x columns), which is gate's; up's are (0,).
    maxima: what forward kept. grad_dtype, format, weight_state, weight_grad: as of
        `linear_backward`. offs, activation: as forward had them; with offs grad_format is None.
    bias_grads: contiguous float32 (2 x columns,), or (columns,) without up: left with the sums of the gradients of
        gate and up over all rows, which the pass that makes their codes adds up in the same order in every run.

    Raises RuntimeError for shapes that do not fit, and for codes where the device has no FP8 GEMM.
    """


@operator
def swiglu_linear_backward_accumulate(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    maxima: Tensor,
    weight_grad: Tensor,
    rows: bool,
    columns: bool,
    joined: bool,
    grad_format: str | None = None,
    weight_only: bool = False,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    activation: str = "swiglu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Another name of `swiglu_linear_backward` with `weight_grad`. Returns the others."""
