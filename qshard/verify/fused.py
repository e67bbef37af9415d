"""CUDA kernels that a CPU does not have: norms, SwiGLU, and the codes that they make without storing values."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from qshard._runtime.classes import Process
from qshard.formats import info_of
from qshard.verify.inputs import emulated, uniform
from qshard.verify.kernels import used_bytes
from qshard.verify.rows import WITHIN, WRONG, Row, checked, compare_bits, compare_within
from qshard.verify.timing import Clock

ops = torch.ops.qshard
NORMS = ((37, 104), (129, 1024), (8192, 4096))
SWIGLUS = ((127, 384), (8192, 4096))
FORMATS = ("float8_tensorwise", "float8_blockwise")
EPS = 1e-5


def rows(device: torch.device, clock: Clock | None) -> Iterator[Row]:
    for shape in NORMS:
        for kind in ("RMSNorm", "LayerNorm"):
            yield checked(_row(kind, "", shape), lambda row: _norm(row, kind, shape, device, clock))
            yield checked(_row(f"{kind}'s gradients", "", shape), lambda row: _norm_gradients(row, kind, shape, device))
            for format in FORMATS:
                yield checked(_row(f"{kind}'s codes", format, shape),
                              lambda row: _norm_codes(row, kind, format, shape, device, clock))
    for shape in SWIGLUS:
        for format in FORMATS:
            yield checked(_row("SwiGLU's codes", format, shape),
                          lambda row: _swiglu(row, format, shape, device, clock))
            yield checked(_row("codes of SwiGLU's gradients", format, shape),
                          lambda row: _swiglu_gradients(row, format, shape, device))


def _row(what: str, format: str, shape) -> Row:
    return Row(what, "kernel", format, "x".join(map(str, shape)), "")


# ------------------------------------------------------------------------------------------ norms


def _inputs(kind: str, shape, device):
    x = 4 * uniform(*shape, seed=1) + 0.5
    weight, bias = uniform(shape[1], seed=2) / 2 + 1, uniform(shape[1], seed=3)
    grad = uniform(*shape, seed=4)
    tensors = [t.bfloat16().to(device) for t in (x, weight, bias, grad)]
    return tensors[0], tensors[1], tensors[2] if kind == "LayerNorm" else None, tensors[3]


def _formula(x, weight, bias):
    """In float64: an RMSNorm where there is no bias."""
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    return y if bias is None else y + bias


def _of_rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One rounding to `dtype`, and what sums in fp32 are off by."""
    epsilon = torch.finfo(dtype).eps
    return epsilon * exact.abs() + float(exact.abs().max()) * max(2e-6, epsilon / 64)


def _norm(row: Row, kind: str, shape, device, clock: Clock | None) -> None:
    x, weight, bias, _ = _inputs(kind, shape, device)
    y, _ = ops._normalize(x, weight, bias, EPS, bias is None, False)
    exact = _formula(*(None if t is None else t.double() for t in (x, weight, bias)))
    compare_within(row, y, exact, _of_rounding(exact, y.dtype))
    if clock is not None and shape == NORMS[-1]:
        row.us = clock.us(lambda: ops._normalize(x, weight, bias, EPS, bias is None, False))
        row.of_copy = clock.us_of_copy(2 * x.nbytes) / row.us


def _norm_gradients(row: Row, kind: str, shape, device) -> None:
    x, weight, bias, grad = _inputs(kind, shape, device)
    statistics = ops._normalize(x, weight, bias, EPS, bias is None, False)[1]
    got = ops._normalize_backward(grad, x, weight, statistics, False, True)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = _formula(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    for made, exact in zip(got, torch.autograd.grad(y, leaves, grad.double())):
        compare_within(row, made, exact, _of_rounding(exact, made.dtype))


def _norm_codes(row: Row, kind: str, format: str, shape, device, clock: Clock | None) -> None:
    """Their products beside those of codes of the values: the same bits."""
    x, weight, bias, _ = _inputs(kind, shape, device)
    arguments = x, weight, bias, EPS, bias is None, False
    y, _ = ops._normalize(*arguments)
    q = ops.quantize(uniform(128, shape[1], seed=5).to(device), emulated(format))
    grad = uniform(shape[0], 128, seed=6).bfloat16().to(device)

    def products(rows, columns, *_):
        forward, _ = ops.linear_forward(y, q, None, False, input_rows=rows)
        return {"rows": forward, "columns": ops.linear_backward(grad, q, columns, True, False, True)[1]}

    made = ops._quantize_normalized(*arguments, emulated(format), True, True)
    compare_bits(row, products(*made), products(*ops.quantize_input(y, emulated(format), True, True)))
    if clock is not None and shape == NORMS[-1]:
        row.us = clock.us(lambda: ops._quantize_normalized(*arguments, emulated(format), True, True))
        row.of_copy = clock.us_of_copy(x.nbytes + sum(used_bytes(format, *shape))) / row.us


# ----------------------------------------------------------------------------------------- SwiGLU


def _swiglu(row: Row, format: str, shape, device, clock: Clock | None) -> None:
    """By the linear that reads them, beside one of plain values. The exponential is not torch's: some codes are
    their neighbours, which is far less than codes are off."""
    gate, up = (4 * uniform(*shape, seed=seed).to(device).bfloat16() for seed in (1, 2))
    down = ops.quantize(uniform(128, shape[1], seed=3).to(device), emulated(format))
    got = ops.swiglu_linear_forward(gate, up, down, None, False)[0].double()
    wanted = ops.linear_forward(F.silu(gate) * up, down, None, False)[0].double()
    row.error = float((got - wanted).norm() / wanted.norm()) / 4e-3
    row.result = WITHIN if row.error <= 1 else WRONG
    if clock is not None and shape == SWIGLUS[-1] and not Process.why_dequantized(device)[format]:
        few = ops.quantize(uniform(16, shape[1], seed=3).to(device), format)  # features, which keep the GEMM small
        row.us = clock.us(lambda: ops.swiglu_linear_forward(gate, up, few, None, False))
        row.of_copy = clock.us_of_copy(2 * gate.nbytes + gate.numel()) / row.us


def _swiglu_gradients(row: Row, format: str, shape, device) -> None:
    """Codes beside those of the values that the same operator makes: all but 1e-5 of them are the same."""
    gate, up = (4 * uniform(*shape, seed=seed).to(device).bfloat16() for seed in (1, 2))
    grad = uniform(shape[0], 128, seed=4).to(device).bfloat16()
    down = ops.quantize(uniform(128, shape[1], seed=3).to(device), format)
    arguments = grad, gate, up, down, torch.empty(0, device=device), False, True, True, False
    values, made = ops.swiglu_linear_backward(*arguments), ops.swiglu_linear_backward(*arguments, format)
    info, different = info_of(format), 0
    for value, codes in ((values[1], made[1]), (values[3], made[3])):
        wanted = _row_codes(value, info.activations.packed_rows, info.activations.gradient_dtype)
        different += int((codes[: value.numel()].view(*shape) != wanted.view(torch.uint8)).sum())
    row.error = different / (2 * (1e-5 * gate.numel() + 1))
    row.result = WITHIN if row.error <= 1 else WRONG
    row.note = "" if row.error <= 1 else f"{different} codes differ"


def _row_codes(x: torch.Tensor, scaled: str, dtype: torch.dtype) -> torch.Tensor:
    """Codes by power-of-two scales, of one scale or in blocks of 1x128, in plain torch."""
    blocks = x.float().unflatten(-1, (-1, 128)) if scaled == "1x128" else x.float()
    amax = blocks.abs().amax(-1, keepdim=True) if scaled == "1x128" else blocks.abs().max()
    largest = torch.finfo(dtype).max
    exponent = torch.frexp(largest / amax.double()).exponent - 1  # exact, as CUDA's log2 of a power of two is not
    scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax, dtype=torch.float64), exponent), 1.0).float()
    return (blocks * scale).clamp(-largest, largest).to(dtype).view(x.shape)
