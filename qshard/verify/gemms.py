"""GEMMs of codes beside those that emulate them."""

from collections.abc import Iterator

import torch

from qshard._runtime.classes import Process
from qshard.formats import FormatInfo, info_of
from qshard.verify.inputs import emulated, fit, uniform
from qshard.verify.plain import K, M, N
from qshard.verify.rows import SKIPPED, WRONG, Row, checked, compare_within
from qshard.verify.timing import Clock

ops = torch.ops.qshard
# Tokens, out and in features.
SHAPES = ((37, 48, 200), (1, 16, 16), (272, 512, 1024))
LARGE = (8192, 4096, 4096)
# Formats whose activations are quantized in another way than their base's.
VARIANTS = ("float8_delayed[e4m3]", "float8_blockwise[x_block_scaling_dim=1]",
            "float8_blockwise_fp32_scale[x_block_scaling_dim=1]")
DIRECTIONS = ("forward", "grad_input", "grad_weight")
# The largest error as a share of what is added up without signs. Hopper's tensor cores add 32 products to the sum at a
# time, each of the 33 cut to 13 bits below the largest (kernels/checks/small_products.cpp).
OF_SUMS = 33 * 2.0**-12


def rows(formats: list[str], device: torch.device, clock: Clock | None, large=LARGE) -> Iterator[Row]:
    """Each format on a GPU: what emulates its GEMMs, the GEMMs themselves, and those of experts."""
    for format in formats:
        row = Row("emulated linear, GPU", "kernel", emulated(format), f"{M}x{N}x{K}", "")
        yield checked(row, lambda row: _emulated(row, format, device))
    for format in (*formats, *VARIANTS):
        for sizes in (*SHAPES, large):
            yield from _linear(format, (sizes[0], fit(format, sizes[1]), sizes[2]), device,
                               clock if sizes is large else None)
        yield from _experts(format, device)


# ---------------------------------------------------------------------------------------- operands


def _inputs(m: int, n: int, k: int, device: torch.device) -> list[torch.Tensor]:
    """x, weight and gradient: rows, and blocks of 16 columns, are of sizes of their own, so that another order of
    scales shows."""
    made = []
    for seed, (rows, columns) in enumerate(((m, k), (n, k), (m, n))):
        of_rows = 2.0 ** (torch.arange(rows) * 7 % 5 - 2)
        of_columns = 2.0 ** (torch.arange(columns) // 16 % 3 - 1)
        made.append((uniform(rows, columns, seed=seed) * of_rows[:, None] * of_columns).to(device))
    return made


def _magnitude(direction: str, x, weight, grad, info: FormatInfo) -> torch.Tensor:
    """What is added up without signs, of the values before they were quantized, in float64."""
    x, weight, grad = (t.double().abs() for t in (x, weight, grad))
    if direction == "forward":
        return x @ weight.t()
    if direction == "grad_input":
        return grad @ weight
    if info.activations.hadamard_columns:
        # The transform mixes 16 tokens, and keeps their norm.
        x, grad = (_norms_of_16(t) for t in (x, grad))
    return grad.t() @ x


def _norms_of_16(x: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 16))
    return padded.unflatten(0, (-1, 16)).norm(dim=1)


def _run(direction: str, x, q, grad):
    """One GEMM. Gradients of NVFP4 are rounded by torch's generator."""
    torch.manual_seed(0)
    if direction == "forward":
        return ops.linear_forward(x, q, None, False)[0]
    is_input = direction == "grad_input"
    made = ops.linear_backward(grad, q, x, False, is_input, not is_input, grad_dtype=torch.float32)
    return made[0 if is_input else 1]


# ----------------------------------------------------------------------------------------- linears


def _emulated(row: Row, format: str, device: torch.device) -> None:
    """On the GPU beside the CPU, whose sums plain.py checks: within the roundings of sums of as many numbers."""
    n, info = fit(format, N), info_of(format)
    inputs = _inputs(M, n, K, torch.device("cpu"))
    for direction in DIRECTIONS:
        if direction != "forward" and info.activations.stochastic_gradients:
            continue  # random words of a GPU are other ones
        made = []
        for where in (device, torch.device("cpu")):
            x, weight, grad = (t.to(where) for t in inputs)
            made.append(_run(direction, x, ops.quantize(weight, emulated(format)), grad).cpu())
        contracted = {"forward": K, "grad_input": n, "grad_weight": M}[direction]
        compare_within(row, *made, 4 * contracted * 2.0**-24 * _magnitude(direction, *inputs, info))


def _linear(format: str, sizes, device, clock: Clock | None) -> Iterator[Row]:
    info, shape = info_of(format), "x".join(map(str, sizes))
    reason = Process.why_dequantized(device)[info.base]
    x, weight, grad = _inputs(*sizes, device) if not reason else (None,) * 3
    for direction in DIRECTIONS:
        row = Row(f"linear {direction}", "gemm", format, shape, SKIPPED)
        if reason:
            row.note = reason
            # That they were found wrong at their first use is no reason to say nothing of them.
            row.result = WRONG if Process.gemm_verdicts(device).get(info.base) == "wrong" else SKIPPED
        elif direction == "grad_input" and not info.gemm.transposes_weight:
            row.note = "scale blocks of one row have no transpose: dgrad multiplies values"
        else:
            checked(row, lambda row: _gemm(row, direction, x, weight, grad, sizes, clock))
        yield row


def _gemm(row: Row, direction: str, x, weight, grad, sizes, clock: Clock | None) -> None:
    """Activations and gradients are in fp32, then in bfloat16. The product to compare with is in fp32: forward and
    dgrad give the dtype that they are given, which has the same codes in both."""
    info = info_of(row.format)
    for dtype in (torch.float32, torch.bfloat16):
        given, of = x.to(dtype), grad.to(dtype)
        magnitude = _magnitude(direction, given, weight, of, info)
        before = _dequantized(direction, info)
        got = _run(direction, given, ops.quantize(weight, row.format), of)
        if reasons := _dequantized(direction, info) - before:
            row.result, row.note = SKIPPED, reasons.pop().rpartition(": ")[2]
            return
        same = (given, of) if direction == "grad_weight" else (given.float(), of.float())
        wanted = _run(direction, same[0], ops.quantize(weight, emulated(row.format)), same[1])
        rounding = torch.finfo(got.dtype).eps / 2 * wanted.abs()
        compare_within(row, got, wanted, OF_SUMS * magnitude + rounding)
    if clock is not None:
        q = ops.quantize(weight, row.format)
        row.us = clock.us(lambda: _run(direction, given, q, of))
        m, n, k = sizes
        row.tflops = 2e-6 * m * n * k / row.us
        # What a GEMM of the other directions multiplies: (M, N) by (N, K), (N, M) by (M, K).
        m, n, k = {"forward": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}[direction]
        row.of_bf16 = clock.us_of_bf16(m, n, k) / row.us


def _dequantized(direction: str, info: FormatInfo) -> set[str]:
    """Lines of the report on GEMMs of dequantized values, with their counts. Variants count with their base."""
    begin = f"{info.base} {direction}: dequantized GEMM"
    return {line for line in ops.backend_report().splitlines() if line.startswith(begin)}


# ----------------------------------------------------------------------------------------- experts


def _experts(format: str, device) -> Iterator[Row]:
    """The GEMM of many experts, where there is one of codes."""
    counts, n, k = (100, 0, 172), fit(format, 384), 512
    row = Row("experts", "gemm", format, f"{sum(counts)}x{n}x{k}, {len(counts)} experts", SKIPPED)
    reason = Process.why_dequantized(device)[info_of(format).base]
    if reason:
        row.note = reason
    else:
        checked(row, lambda row: _grouped(row, counts, n, k, device))
    yield row


def _grouped(row: Row, counts, n: int, k: int, device) -> None:
    info, total = info_of(row.format), sum(counts)
    x, stack, grad = _inputs(total, len(counts) * n, k, device)
    grad, stack = grad[:, :n].contiguous(), stack.view(len(counts), n, k)
    offs = torch.tensor(counts, device=device).cumsum(0).int()
    format, kind = row.format, "FP8"
    if info.gemm.kind == "row_images":
        kind, x, grad = "block-scaled", x.bfloat16(), grad.bfloat16()
    if info.activations.stochastic_gradients:  # by other words than those of a linear for each expert
        format = f"{format}[nearest_gradients]"
    line = f"{format} forward of experts: grouped {kind} GEMM"
    made = []
    for name in (format, emulated(format)):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(ops.quantize(stack, name))
        given = x.clone().requires_grad_()
        y = ops.grouped_linear(given, weight, offs)
        if name == format and line not in ops.backend_report():
            row.note = "there is no grouped GEMM of the format's codes"
            return
        y.backward(grad)
        made.append((y.detach(), given.grad, weight.grad))
    begin = 0
    for expert, count in enumerate(counts):
        of = slice(begin, begin + count)
        parts = x[of], stack[expert], grad[of]
        for direction, got, wanted in zip(DIRECTIONS, *made):
            one, other = (t[expert] if direction == "grad_weight" else t[of] for t in (got, wanted))
            bound = OF_SUMS * _magnitude(direction, *parts, info)
            compare_within(row, one, other, bound)
        begin += count
