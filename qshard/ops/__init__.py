"""The public operators, as Python functions. `qshard.ops.quantize` is `torch.ops.qshard.quantize`, which
needs only the library; here each has a signature and a docstring, and the operator the same docstring.

Tensors of `rows` x `columns` stand for tensors of two or more dimensions too: the leading ones are rows, each
index of them one matrix. No operator but `flush` is a collective. Errors are raised before anything is
changed: TypeError and ValueError for arguments, RuntimeError else, `NotImplementedError` for what is not
there yet. Each names its operator.

The accessors (`is_quantized`, `format`, `codes`, `master` and so on) read the local tensor of a DTensor, and
return that rank's part, plain.

All tensors of a call lie on one device, found_inf of a GradScaler excepted, and are strided. An argument
that an operator writes is plain: not quantized (a master is, and its tensor hears of the write), without
elements that share memory with each other or with another argument, not lazily negated, and does not
require grad unless under `torch.no_grad()`. Its version counter moves, as that of a plain in-place
operator's.
"""

import inspect

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard.ops.accessors import (
    codes,
    columnwise_codes,
    columnwise_scale_inv,
    format,
    is_quantized,
    master,
    row_image,
    scale_inv,
    tensor_scale_inv,
)
from qshard.ops.losses import cross_entropy_and_gradient, linear_cross_entropy
from qshard.ops.norms import norm_linear
from qshard.ops.operator_calls import operator
from qshard.ops.rotary import join_rotary_embedding, rotary_embedding, split_rotary_embedding
from qshard.ops.swiglu import (
    swiglu_experts,
    swiglu_linear_backward,
    swiglu_linear_backward_accumulate,
    swiglu_linear_forward,
    swiglu_mlp,
)

_ops = torch.ops.qshard


__all__ = [
    "backend_report",
    "codes",
    "columnwise_codes",
    "columnwise_scale_inv",
    "cross_entropy_and_gradient",
    "dequantize",
    "flush",
    "format",
    "format_info",
    "formats",
    "from_planes",
    "from_row_image",
    "grouped_linear",
    "is_quantized",
    "join_rotary_embedding",
    "linear",
    "linear_backward",
    "linear_backward_accumulate",
    "linear_backward_codes",
    "linear_backward_codes_accumulate",
    "linear_cross_entropy",
    "linear_forward",
    "master",
    "norm_linear",
    "quantize",
    "quantize_gradients",
    "quantize_input",
    "rotary_embedding",
    "row_image",
    "scale_inv",
    "split_rotary_embedding",
    "sum_gradients",
    "swiglu_experts",
    "swiglu_linear_backward",
    "swiglu_linear_backward_accumulate",
    "swiglu_linear_forward",
    "swiglu_mlp",
    "tensor_scale_inv",
]


@operator
def quantize(
    self: Tensor,
    format: str,
    *,
    keep_master: bool = False,
    logical_rows: int | None = None,
    row_offset: int = 0,
) -> Tensor:
    """A quantized tensor with the value, shape, dtype and device of `self`; a copy, no alias.

    self: float32, bfloat16 or float16 of two or more dimensions, on cpu, cuda or meta, with any strides.
    format: one of `formats()`, with options in brackets: `nvfp4[stochastic]`, `mxfp8[emulate]`,
        `float8_delayed[margin=1,history=16]`. For activations there are formats of rows, too: `row_image`.
    keep_master: keep the value beside the codes, in its dtype. It is then the tensor's value.
    logical_rows, row_offset: `self` is a shard, rows [row_offset, row_offset + rows) of a tensor with
        `logical_rows` rows. Scales that reach beyond the shard are agreed upon by the first flush, which
        is then a collective.

    Autograd: the gradient passes unchanged. Raises ValueError for an unknown format, fewer than two
    dimensions, rows that do not lie within `logical_rows`, or a row count that the format cannot have;
    TypeError for another dtype. Formulas: docs, Concepts.
    """


@operator
def from_planes(
    codes: Tensor,
    scale_inv: Tensor,
    format: str,
    *,
    tensor_scale_inv: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    keep_master: bool = False,
    columns: int | None = None,
    logical_rows: int | None = None,
    row_offset: int = 0,
    rows_of_each: int = 0,
) -> Tensor:
    """A quantized tensor of codes and scales made elsewhere; a copy, no alias. They stay what they are until
    the tensor is written: no flush or gather requantizes them.

    codes, scale_inv, tensor_scale_inv: plain, on one device, with any strides, of the dtypes and shapes that
        the accessors of these names give. Rows of one 32x32 or 16x16 block have the same scales; scales of
        `float8_tensorwise` and `float8_blockwise` are powers of two, those of `..._fp32_scale` any.
        `mxfp8_1x32` quantizes its columnwise codes from the values.
    format, keep_master: as `quantize`. A master is the dequantized value, rounded to `dtype`.
    dtype: of the tensor, float32, bfloat16 or float16.
    columns: where nvfp4 codes have an odd number of them.
    logical_rows, row_offset: as `quantize`; `codes` are of the shard, and so are scales of single rows. fp32
        scales are those of all logical rows, the same on all ranks: nothing is left to agree upon.
    rows_of_each: of a stack cut inside its matrices: `codes` (matrices, rows_of_each, columns) have the rows from
        row_offset on of each matrix of logical_rows in all.

    No autograd. Raises TypeError for a wrong dtype; ValueError for a wrong shape or device, an unknown format
    and scales that the format cannot have.
    """


@operator
def from_row_image(
    image: Tensor, format: str, *, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A quantized tensor (rows, columns) of rows that `row_image` gave, here or on another rank; a copy, no
    alias.

    image: plain uint8 (rows, bytes of a row), with any strides, on cpu, cuda or meta.
    format: theirs, `float8_1x128`, `float8_1xK` or `mxfp8_1x32[rowwise]`.
    columns: elements of a row.
    dtype: of the tensor, float32, bfloat16 or float16.

    No autograd. Bytes are taken as they are; only what lies between codes and scales becomes zero. Raises
    TypeError for another kind of image or dtype; ValueError for an unknown format or one whose rows share
    scales, and for rows of another length.
    """


def dequantize(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The values of the codes, code x scale_inv: a plain contiguous tensor of the same shape, in `dtype`,
    else the tensor's own. No alias. With a master this is not the tensor's value: `self + 0` is.

    Autograd: the gradient passes unchanged. Raises TypeError for a plain tensor or a `dtype` that is not
    floating point, RuntimeError for a written shard whose flush needs other ranks.
    """
    if isinstance(self, DTensor):
        raise TypeError(
            "qshard::dequantize: expected a quantized tensor, got a DTensor; give its part on this rank, "
            "tensor.to_local(), or take tensor.full_tensor(), whose values are whole"
        )
    return _ops.dequantize(self, dtype=dtype)


@operator
def flush(self: list[Tensor]) -> None:
    """Requantizes those of the tensors that were written since their last flush, in place.

    Collective: where a scale spans ranks, all ranks of its group call it with the same tensors in the same
    order; one all-reduce a group. `qshard.flush(model)` knows the groups of a model's parameters. Raises
    TypeError for a plain tensor.
    """


@operator
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_only: bool = False,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    residual: Tensor | None = None,
    input_is_kept: bool = False,
) -> Tensor:
    """input @ weight^T + bias, as `torch.nn.functional.linear`: on the codes of input and weight where the
    device can, or what emulates that for a format with the option `emulate`, else on the dequantized weight;
    `backend_report` says which. The output is in the dtype of `input`, no alias.

    input: (..., columns), floating point; or quantized in the format of rows that the weight's activations have
        (`row_image`), without a master: its codes are multiplied as they are. So are those of the output's gradient.
    weight: quantized (rows, columns). bias: (rows,) or None.
    weight_only: leave the input and its gradients in their dtype, and multiply by the dequantized weight.
    format: of the weight, for compiled code, where linears of one input then share its codes.
    weight_state: given, `weight` is plain and is quantized to `format` for this call, and, as autograd
        saves it plain, again in backward. Empty; or where all scales are in a grid, perhaps its amaxes,
        float32 (grid entries,), if they are known; or of delayed scaling float32 (3, history), slot 0 of
        whose rows collects amaxes of input and gradient, and (3, 3), where [0, 0] is what the weight is
        scaled by: kernels/scaling/scaling_state.h.
    residual: (..., rows) in the dtype of `input`: what the output, rounded, is added to; within the GEMM where
        that can, which rounds once.
    input_is_kept: something else keeps `input` until backward: autograd then keeps no codes of it for wgrad, which
        are made again.

    Autocast: input, bias and residual are cast to its dtype, eager and compiled, as for a plain linear; so
    it is for `norm_linear` and `swiglu_mlp`.
    Autograd: dgrad and wgrad are quantized in the same way; no double backward. Raises RuntimeError for
    shapes or devices that do not fit.
    """


@operator
def grouped_linear(
    input: Tensor,
    weight: Tensor,
    offs: Tensor,
    *,
    weight_only: bool = False,
    format: str | None = None,
) -> Tensor:
    """The linears of experts: rows [offs[e - 1], offs[e]) of the output are `linear(input[rows], weight[e])`,
    forward and backward. Each expert's rows are quantized by themselves, so that a format with one scale per
    tensor has one per expert; delayed scaling has one for all of them after its first step. No number of rows
    is asked of an expert.

    input: float32, bfloat16 or float16 (rows, in), or in codes, as of `linear`.
    weight: quantized (experts, out, in), or the transpose of a quantized (experts, in, out): scales of 1x32 and 1x16
        blocks are then no GEMM's, as in `input @ stack[e]`.
    offs: int32 (experts,), where each expert's rows end. An end before the last one, or behind the last row,
        counts as that.
    weight_only, format: as of `linear`.

    Rows of no expert, from offs[-1] on, are zero in the output and in the gradient of `input`, whatever they
    hold, and enter nothing else. An expert without rows has a weight gradient of zeros, and leaves its part of
    `.grad` alone.

    `torch.nn.functional.grouped_mm(input, weight.mT, offs=offs)` and `grouped_mm(input, stack, offs=offs)` run the
    same where `input` has the weight's dtype.

    There are three paths, which `qshard.backend_report()` names. Hopper multiplies FP8 codes, in 128x128 blocks or
    with one scale for each expert, in one GEMM for all of them (out features are a multiple of 16). Other formats run
    on bfloat16 values, there and on compute capability 10: `torch.nn.functional.grouped_mm` multiplies by the
    dequantized stack, which takes 2 bytes per element at each call, and rounds the weight's gradient to bfloat16. The
    host waits for the device on neither path, and CUDA graphs capture both. Elsewhere, and with float32 or float16
    values of these formats, each expert is a linear of its own, and the host reads `offs` once per call.

    Autocast, autograd: as `linear`. Raises RuntimeError for shapes, dtypes or devices that do not fit.
    """


@operator
def linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    save_quantized_input: bool,
    weight_only: bool = False,
    input_rows: Tensor | None = None,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    residual: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `linear` and `grouped_linear` run below autograd: (output, saved_input). To be named in the policies
    of selective activation checkpointing.

    save_quantized_input: give the input's codes for wgrad, transposed, as uint8 of one dimension; else
        saved_input is empty, (0,). Hopper only.
    input_rows: the first result of `quantize_input`, in place of quantizing here.
    weight_state: as of `linear`, for a plain weight. residual: as of `linear`.
    offs: as of `grouped_linear`, with an input, a weight and weight_only alone.

    Errors: as `linear`.
    """


@operator
def quantize_input(input: Tensor, format: str, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Codes of an input for linears whose weights have `format`, once for all of them: what compiled code
    calls.

    input: float32, bfloat16 or float16 (..., columns). rows, columns: which of the two to make, for
        `linear_forward` and for `linear_backward`; uint8 of one dimension, empty (0,) if not asked for.

    Raises RuntimeError where the device has no FP8 GEMM, and for delayed scaling, whose linears scale by
    histories of their own.
    """


@operator
def linear_backward(
    grad: Tensor,
    weight: Tensor,
    input: Tensor,
    input_is_quantized: bool,
    needs_input: bool,
    needs_weight: bool,
    weight_only: bool = False,
    grad_dtype: torch.dtype | None = None,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    *,
    grad_columns: Tensor | None = None,
    grad_size: list[int] | None = None,
    value_dtype: torch.dtype | None = None,
    input_sum: Tensor | None = None,
    weight_grad: Tensor | None = None,
    offs: Tensor | None = None,
    grad_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(grad_input, grad_weight) of `linear_forward`; (0,) what is not needed, or was added to a tensor that
    was given. The gradient is quantized once for both.

    grad: (..., rows). input: plain (..., columns), or what linear_forward saved, if `input_is_quantized`.
    grad_dtype: of the weight's gradient, float32, bfloat16 or float16; else the weight's own.
    format, weight_state: as of `linear`, for a plain weight.
    grad_columns, grad_size, value_dtype: for a gradient in codes, which `swiglu_linear_backward` or
        `cross_entropy_and_gradient` made: `grad` is its codes for dgrad, grad_columns those for wgrad, the others are the
        size and dtype of its values.
    grad_scale: float32 of one element: the gradient is so many times what the codes stand for. The device is not
        waited for.
    input_sum: plain and contiguous, in the dtype of the gradient's values: grad_input is added to it, in place,
        within the GEMM where it can.
    weight_grad: plain (rows, columns) of float32, bfloat16 or float16: grad_weight is added to it, in the same
        way. Both need what they are given for.
    offs: as of `grouped_linear`, with a gradient in values and no input_sum; weight_grad has the weight's shape.

    Raises RuntimeError for shapes that do not fit, for codes of another size, and for codes beside a weight that
    is not float8; ValueError where only some of what describes codes is given.
    """


@operator
def linear_backward_accumulate(
    grad: Tensor,
    weight: Tensor,
    input: Tensor,
    input_is_quantized: bool,
    needs_input: bool,
    weight_grad: Tensor,
    weight_only: bool = False,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
) -> Tensor:
    """Another name of `linear_backward` with `weight_grad`. Returns grad_input, (0,) if not needed."""


@operator
def linear_backward_codes(
    rows: Tensor,
    columns: Tensor,
    size: list[int],
    dtype: torch.dtype,
    weight: Tensor,
    input: Tensor,
    input_is_quantized: bool,
    needs_input: bool,
    needs_weight: bool,
    grad_dtype: torch.dtype | None = None,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    input_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Another name of `linear_backward` for a gradient in codes: `rows` is its `grad`, `columns`, `size` and
    `dtype` its `grad_columns`, `grad_size` and `value_dtype`."""


@operator
def linear_backward_codes_accumulate(
    rows: Tensor,
    columns: Tensor,
    size: list[int],
    dtype: torch.dtype,
    weight: Tensor,
    input: Tensor,
    input_is_quantized: bool,
    needs_input: bool,
    weight_grad: Tensor,
    format: str | None = None,
    weight_state: list[Tensor] | None = None,
    input_sum: Tensor | None = None,
) -> Tensor:
    """`linear_backward_codes` with `weight_grad`. Returns grad_input."""


@operator
def quantize_gradients(
    values: Tensor,
    format: str,
    chunks: int,
    chunk_numel: int,
    *,
    rounding: Tensor | None = None,
    first_noise: int = 0,
) -> Tensor:
    """Gradients as messages of bytes: uint8 (chunks, bytes), of `chunk_numel` values each, with zeros after
    the last value. Layout: kernels/messages/gradient_message.h. No alias.

    values: float32, bfloat16 or float16 of any shape, at most chunks x chunk_numel of them.
    format: float8, mxfp8 or nvfp4.
    rounding: None for nearest even, else int32 (key_low, key_high, count) on the values' device; value i of
        message c takes noise first_noise + c x round_up(chunk_numel, 16) + i (kernels/numerics/message_noise.h).

    Raises RuntimeError for values that do not fit, and for an unknown format.
    """


@operator
def sum_gradients(
    messages: Tensor, format: str, chunk_numel: int, out: Tensor, *, factor: float = 1.0
) -> None:
    """Sums what peers sent about the same values: in fp32, in the order of peers, times `factor`, rounded
    once to the dtype of `out`, which is written.

    messages: contiguous uint8 (chunks, peers, bytes) of `quantize_gradients`, from 16-byte aligned memory.
    out: contiguous, float32, bfloat16 or float16, on the same device, of at most chunks x chunk_numel values.

    Raises RuntimeError for shapes that do not fit, ValueError for an unknown format.
    """


@operator
def formats() -> list[str]:
    """Names of all formats of weights, without their options."""


@operator
def format_info(name: str) -> str:
    """The description of a format, as JSON: its scale levels (dtype, the block that one scale covers, whether
    they lie in the grid or in the rows), the code dtypes of weights, activations and gradients, its rounding,
    amax history and second image, and which GEMMs multiply it on which compute capabilities. Dtypes have
    torch's names; a block's rows or columns are null where they are all of a matrix's.

    name: one of `formats()`, with options in brackets, or ValueError is raised."""


@operator
def backend_report() -> str:
    """One line per GEMM path taken so far in this process: format, direction, backend (cuBLASLt's, emulated or
    dequantized), count, and why if the weight was dequantized. `qshard.backend_report` says besides what the devices can."""


for _name in __all__:
    getattr(_ops, _name).__doc__ = inspect.cleandoc(globals()[_name].__doc__)
