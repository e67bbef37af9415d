"""The CPU's operators, and the linears that emulate GEMMs of codes, beside plain torch's arithmetic: what all other
checks compare with."""

from collections.abc import Iterator

import torch

from qshard.formats import FormatInfo, ScaleLevel, info_of
from qshard.verify.inputs import emulated, fit, short, uniform, values, whole
from qshard.verify.rows import Row, checked, compare_bits, compare_within

ops = torch.ops.qshard
RAGGED = (131, 47)
M, N, K = 96, 64, 160  # of the linears
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rows(formats: list[str]) -> Iterator[Row]:
    for format in formats:
        shape = (fit(format, RAGGED[0]), RAGGED[1])
        for what, check in (("quantize", _quantize), ("dequantize", _dequantize), ("AdamW", _adamw)):
            row = Row(f"{what}, CPU", "kernel", format, "x".join(map(str, shape)), "")
            yield checked(row, lambda row: check(row, format, shape))
        for what, check in (("exact sums", _exact_linear), ("sums in fp32", _near_linear)):
            row = Row(f"emulated linear, CPU, {what}", "kernel", emulated(format), f"{M}x{N}x{K}", "")
            yield checked(row, lambda row: check(row, format))
    yield checked(Row("rotary embedding, CPU", "kernel", "", "2x17x4x64", ""), _rotary)


# ---------------------------------------------------------------------------------------- kernels


def _of_matrix(scales: torch.Tensor, level: ScaleLevel, shape) -> torch.Tensor:
    """The scale of each element, in float32."""
    for dim, block in ((0, level.block_rows), (1, level.block_cols)):
        # Scales that lie in rows are there for each row of a block.
        repeats = 1 if scales.shape[dim] == shape[dim] else block or shape[dim]
        scales = scales.float().repeat_interleave(repeats, dim).narrow(dim, 0, shape[dim])
    return scales


def _codes(codes: torch.Tensor, info: FormatInfo, columns: int) -> torch.Tensor:
    """What codes are without their scales, in float32."""
    if info.code_bits == 8:
        return codes.float()
    halves = torch.stack([codes % 16, codes // 16], -1).flatten(-2)[:, :columns].int()
    return E2M1[halves % 8] * (1 - 2 * (halves // 8))


def dequantized(q: torch.Tensor) -> torch.Tensor:
    """codes * scales of a matrix, each product rounded to float32."""
    info = info_of(ops.format(q))
    scales = _of_matrix(ops.scale_inv(q), info.scale, q.shape)
    if info.outer_scale is not None:
        scales = scales * ops.tensor_scale_inv(q).float()
    return _codes(ops.codes(q), info, q.shape[1]) * scales


def _dequantize(row: Row, format: str, shape) -> None:
    q = ops.quantize(values(*shape, special=True), format)
    compare_bits(row, {"values": ops.dequantize(q)}, {"values": dequantized(q)})


def _quantize(row: Row, format: str, shape) -> None:
    """A code is off by half a step: 2^-4 of an E4M3 value, a quarter of an E2M1 one, or half of the smallest step."""
    info, x = info_of(format), values(*shape)
    # Rows of a format with two images are codes of the values only beside a master.
    q = ops.quantize(x, format, keep_master=info.columnwise is not None)
    scales = _of_matrix(ops.scale_inv(q), info.scale, q.shape)
    if info.outer_scale is not None:
        scales = scales * ops.tensor_scale_inv(q).float()
    of_value, of_scale = (2.0**-4, 2.0**-10) if info.code_bits == 8 else (2.0**-2, 2.0**-2)
    # Two roundings to float32 lie between a value and what its code stands for.
    bound = torch.maximum(x.abs() * of_value, scales * of_scale) * (1 + 2.0**-20)
    compare_within(row, ops.dequantize(q), x, bound)


def _adamw(row: Row, format: str, shape) -> None:
    """A weight that keeps its master is, after a step, what a plain one is."""
    start, made = short(*shape), []
    for tensor in (start.clone(), ops.quantize(start, format, keep_master=True)):
        parameter = torch.nn.Parameter(tensor)
        parameter.grad = short(*shape, seed=1)
        torch.optim.AdamW([parameter], lr=2**-6, betas=(0.5, 0.75), eps=2**-10, weight_decay=2**-3).step()
        made.append(parameter.detach() + 0)
    compare_bits(row, {"value": made[1]}, {"value": made[0]})


def _rotary(row: Row) -> None:
    x, angles = values(2, 17, 4, 64), 20 * uniform(17, 64)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    of = cos[:, None], sin[:, None]
    expected = x * of[0] + torch.cat([-second, first], -1) * of[1]
    compare_bits(row, {"output": ops.rotary_embedding(x, cos, sin, 1)}, {"output": expected})


# ---------------------------------------------------------------------------------------- linears


def _results(x, weight, grad, format: str) -> dict[str, torch.Tensor]:
    q = ops.quantize(weight, format)
    y, _ = ops.linear_forward(x, q, None, False)
    grad_input, grad_weight = ops.linear_backward(grad, q, x, False, True, True)
    return {"forward": y, "grad_input": grad_input, "grad_weight": grad_weight}


def _exact_linear(row: Row, format: str) -> None:
    """The operands are values that codes hold, and their sums are exact in float32."""
    x, weight, grad = (whole(*shape, format, seed) for seed, shape in enumerate(((M, K), (N, K), (M, N))))
    got = _results(x, weight, grad, emulated(format))
    expected = {"forward": x @ weight.t(), "grad_input": grad @ weight, "grad_weight": grad.t() @ x}
    if info_of(format).activations.hadamard_columns:
        # Values that the random Hadamard transform of 16 tokens makes those.
        inverse = torch.linalg.inv(ops._transposed_operand(torch.eye(16), hadamard=True)[:, :16].t().double())
        x, grad = ((inverse @ v.double().unflatten(0, (-1, 16))).flatten(0, 1).float() for v in (x, grad))
        got["grad_weight"] = _results(x, weight, grad, emulated(format))["grad_weight"]
        expected["grad_weight"] = (grad.double().t() @ x.double()).float()
    compare_bits(row, got, expected)


def _near_linear(row: Row, format: str) -> None:
    """Weights that codes do not hold, beside the product of what theirs stand for, in fp64: within the roundings of
    sums of K numbers, and of their scales."""
    info, weight = info_of(format), values(N, K, seed=9)
    x, grad = whole(M, K, format), whole(M, N, format, seed=2)
    got = _results(x, weight, grad, emulated(format))
    w = dequantized(ops.quantize(weight, format)).double()
    compare_within(row, got["forward"], x.double() @ w.t(), _bound(x, w.t()))
    # Otherwise dgrad's codes are of products with scales, or none are read.
    if info.gemm.transposes_weight and not info.gemm.folds_row_scales:
        compare_within(row, got["grad_input"], grad.double() @ w, _bound(grad, w))


def _bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 2 * a.shape[1] * 2.0**-24 * (a.double().abs() @ b.double().abs())
