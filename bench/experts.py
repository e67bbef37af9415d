"""The GEMMs of experts on Hopper, in TFLOP/s = 2 T N K / time, codes and scales given.

    python bench/experts.py [--only SECTION …] [--shapes N …] [--json FILE]

Forward, dgrad and wgrad of `_grouped_gemm`, scales in blocks, each next to bf16 torch._grouped_mm;
forward also next to torch's FP8 with a scale per row, and to one cuBLASLt call per expert with
scales in blocks. dgrad transposes matrices as it goes; what that costs is a row of its own: the difference to
transposed ones.
wgrad with an input's columns in squares and in 1x128. Uneven: groups of 0.7 to 1.3 of the mean, beside
even ones. Linear: forward and backward of `grouped_linear`, quantization of what it multiplies included,
next to those of bf16 F.grouped_mm; mlp: three of them with SiLU, and what is kept for backward; dense:
one matrix, next to cuBLASLt. Random
normal values. The functions take turns, in bursts of some ms, so that all run at
the power limit.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from measuring import Results, Row, Stopwatch, at_least, at_most, first_line

import qshard  # noqa: F401  (loads the library)

ops = torch.ops.qshard
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# experts, rows of each, N, K
SHAPES = [
    (4, 8192, 4096, 7168),
    (4, 8192, 7168, 2048),
    (8, 4096, 4096, 7168),
    (8, 4096, 7168, 2048),
    (8, 2048, 14336, 4096),
    (8, 2048, 4096, 14336),
    (32, 2048, 1536, 4096),
    (32, 2048, 4096, 1536),
    (128, 512, 1536, 2048),  # Qwen3-30B-A3B
    (128, 512, 2048, 768),
    (32, 2048, 5760, 2880),  # gpt-oss
    (32, 2048, 2880, 2880),
    (256, 64, 4096, 7168),
]
FORWARD_GOALS = {SHAPES[0]: 1150, SHAPES[1]: 1050}  # TFLOP/s
OF_BF16 = {2048: 0.60, 512: 0.65, 64: 0.75}  # goals: share of bf16's time, by rows of an expert


def burst_times(functions: dict[str, Callable], rounds=7, milliseconds=20.0) -> dict[str, float]:
    """µs per call of each that runs; medians over rounds in which they take turns, each time in
    another order: after a cool one the clock is higher."""
    counts, times, order = {}, {}, random.Random(0)
    for name, function in functions.items():
        try:
            function()
            watch = Stopwatch("cuda")
            watch.mark()
            function()
            watch.mark()
            counts[name] = max(2, int(milliseconds / watch.intervals()[0]))
        except (RuntimeError, ValueError) as error:
            print(f"no {name}: {first_line(error)}", flush=True)
    for _ in range(rounds):
        for name, count in order.sample(list(counts.items()), len(counts)):
            watch = Stopwatch("cuda")
            watch.mark()
            for _ in range(count):
                functions[name]()
            watch.mark()
            times.setdefault(name, []).append(watch.intervals()[0] * 1e3 / count)
    return {name: median(of_one) for name, of_one in times.items()}


def scales_of(amax):
    return torch.exp2((amax.float() / 448).log2().ceil())


def ceil_div(a, b):
    return -(-a // b)


def by_rows(x):
    """Codes of x (R, C) and scales (C / 128, R to 4)."""
    rows, columns = x.shape
    blocks = torch.nn.functional.pad(x, (0, -columns % 128)).view(rows, -1, 128)
    scales = scales_of(blocks.abs().amax(2))
    codes = (blocks / scales[:, :, None]).to(E4M3).view(rows, -1)[:, :columns].contiguous()
    return codes, torch.nn.functional.pad(scales.t(), (0, -rows % 4)).contiguous()


def by_squares(x):
    """Codes of one matrix (R, C) and scales (R / 128, C / 128)."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % 128, 0, -rows % 128))
    tiles = padded.view(ceil_div(rows, 128), 128, ceil_div(columns, 128), 128)
    scales = scales_of(tiles.abs().amax((1, 3)))
    codes = (tiles / scales[:, None, :, None]).to(E4M3).view(padded.shape)
    return codes[:rows, :columns].contiguous(), scales


def stack_by_squares(weight):
    parts = [by_squares(matrix) for matrix in weight]
    return tuple(torch.stack(plane) for plane in zip(*parts))


def even_ends(experts, rows):
    return torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * rows


def randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=BF16)


def cublaslt(a, b):
    """A call of torch._scaled_mm, which knows blocks by the shapes and strides of scales."""
    blocks = b[1].shape[1]
    scales = F.pad(b[1], (0, -blocks % 4))[:, :blocks].t()
    return lambda: torch._scaled_mm(a[0], b[0].t(), a[1].t(), scales, out_dtype=BF16)


def cublaslt_per_expert(x, weight, rows):
    def of_one(expert):
        own = slice(expert * rows, (expert + 1) * rows)
        return cublaslt((x[0][own], x[1][:, own].contiguous()), (weight[0][expert], weight[1][expert]))

    calls = [of_one(expert) for expert in range(weight[0].shape[0])]
    return lambda: [call() for call in calls]


def rows_of(direction, shape, times, others) -> Iterator[Row]:
    """Rates of ours next to the others' of the same product."""
    experts, rows, n, k = shape
    size = f"{experts} x {rows}: {n}, {k}"
    rate = {name: 2 * experts * rows * n * k / us / 1e6 for name, us in times.items()}
    wanted = FORWARD_GOALS.get(shape) if direction == "forward" else None
    if wanted:
        yield Row("forward", size, rate[direction], wanted, "TFLOP/s", at_least(1))
    for other in others:
        if other in times and direction in times:
            has_goal = other == "bf16" and not direction.startswith("wgrad")
            nearest = min(OF_BF16, key=lambda known: abs(known - rows))
            goal = at_least(1 / OF_BF16[nearest]) if has_goal else None
            yield Row(f"{direction} / {other}", size, rate[direction], rate[other], "TFLOP/s", goal)


def forward(shape) -> Iterator[Row]:
    experts, rows, n, k = shape
    x, weight, offs = randn(experts * rows, k), randn(experts, n, k), even_ends(experts, rows)
    of_x, of_weight = by_rows(x), stack_by_squares(weight)
    ones = torch.ones(experts * rows, device="cuda"), torch.ones(experts, n, device="cuda")
    times = burst_times({
        "forward": lambda: ops._grouped_gemm(*of_x, *of_weight, offs),
        "bf16": lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs),
        "rowwise": lambda: torch._scaled_grouped_mm(
            of_x[0], of_weight[0].transpose(1, 2), *ones, offs, out_dtype=BF16, use_fast_accum=True
        ),
        "cuBLASLt per expert": cublaslt_per_expert(of_x, of_weight, rows),
    })  # fmt: skip
    yield from rows_of("forward", shape, times, ("bf16", "rowwise", "cuBLASLt per expert"))


def dgrad(shape) -> Iterator[Row]:
    experts, rows, n, k = shape
    gradient, weight = randn(experts * rows, n), randn(experts, n, k)
    offs = even_ends(experts, rows)
    of_gradient, (codes, scales) = by_rows(gradient), stack_by_squares(weight)
    transposed = codes.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3)
    times = burst_times({
        "dgrad": lambda: ops._grouped_gemm(
            *of_gradient, codes, scales, offs, contract_rows=True
        ),
        "transposed": lambda: ops._grouped_gemm(
            *of_gradient, transposed, scales.transpose(1, 2), offs
        ),
        "bf16": lambda: torch._grouped_mm(gradient, weight, offs),
    })  # fmt: skip
    yield from rows_of("dgrad", shape, times, ("bf16",))
    yield Row("transpose / dgrad", f"{experts} x {rows}: {n}, {k}",
              times["dgrad"] - times["transposed"], times["dgrad"], "µs", at_most(0.08))


def wgrad(shape) -> Iterator[Row]:
    experts, rows, n, k = shape
    tokens = experts * rows
    gradient, x, offs = randn(tokens, n), randn(tokens, k), even_ends(experts, rows)
    if rows % 128:
        return  # the columns of the groups would need padding
    of_gradient = by_rows(gradient.t().contiguous())
    columns = x.t().contiguous()
    squares, of_rows = by_squares(columns), by_rows(columns)
    times = burst_times({
        "wgrad, squares": lambda: ops._grouped_gemm(*of_gradient, *squares, offs, tokens=tokens),
        "wgrad, 1x128": lambda: ops._grouped_gemm(
            *of_gradient, *of_rows, offs, tokens=tokens, square_scales=False
        ),
        "bf16": lambda: torch._grouped_mm(gradient.t(), x, offs),
    })  # fmt: skip
    for direction in ("wgrad, squares", "wgrad, 1x128"):
        yield from rows_of(direction, shape, times, ("bf16",))


def uneven(shape) -> Iterator[Row]:
    experts, rows, n, k = shape
    of_x = by_rows(randn(experts * rows, k))
    of_weight = stack_by_squares(randn(experts, n, k))
    even = even_ends(experts, rows)
    shares = torch.linspace(0.7, 1.3, experts, dtype=torch.float64)[torch.randperm(experts)]
    ends = (shares.cumsum(0) / shares.sum() * experts * rows).round().to(torch.int32).cuda()
    times = burst_times({
        "uneven": lambda: ops._grouped_gemm(*of_x, *of_weight, ends),
        "even": lambda: ops._grouped_gemm(*of_x, *of_weight, even),
    })  # fmt: skip
    size = f"{experts} x {rows}: {n}, {k}"
    yield Row("uneven / even", size, times["uneven"], times["even"], "µs", at_most(1.10))


def backward_of(product, x, weights, gradient):
    """Forward and backward; `product(x, *weights)`."""
    return lambda: torch.autograd.grad(product(x, *weights), (x, *weights), gradient)


def stacks(*shapes):
    """Plain weights, and the same quantized."""
    plain = [randn(*shape).requires_grad_() for shape in shapes]
    return plain, [ops.quantize(w.detach(), "float8_blockwise").requires_grad_() for w in plain]


def linear(shape) -> Iterator[Row]:
    experts, rows, n, k = shape
    x, gradient = randn(experts * rows, k).requires_grad_(), randn(experts * rows, n)
    offs = even_ends(experts, rows)
    plain, quantized = stacks((experts, n, k))

    def of_bf16(x, w):
        return F.grouped_mm(x, w.transpose(1, 2), offs=offs)

    def of_codes(x, w):
        return ops.grouped_linear(x, w, offs)

    with torch.no_grad():
        forward_times = burst_times({
            "codes": lambda: of_codes(x, quantized[0]), "bf16": lambda: of_bf16(x, plain[0])
        })  # fmt: skip
    times = burst_times({
        "codes": backward_of(of_codes, x, quantized, gradient),
        "bf16": backward_of(of_bf16, x, plain, gradient),
    })  # fmt: skip
    size = f"{experts} x {rows}: {n}, {k}"
    yield Row("grouped_linear, forward", size, forward_times["codes"], forward_times["bf16"], "µs", at_most(0.75))
    yield Row("grouped_linear, both ways", size, times["codes"], times["bf16"], "µs", at_most(0.75))


def mlp(shape) -> Iterator[Row]:
    experts, rows, hidden, width = shape
    x, gradient = randn(experts * rows, hidden).requires_grad_(), randn(experts * rows, hidden)
    offs = even_ends(experts, rows)
    plain, quantized = stacks(*[(experts, width, hidden)] * 2, (experts, hidden, width))

    def mlp_of(product):
        def run(x, gate, up, down):
            return product(F.silu(product(x, gate)) * product(x, up), down)

        return run

    mlps = {
        "codes": (mlp_of(lambda x, w: ops.grouped_linear(x, w, offs)), quantized),
        "fused": (lambda *operands: ops.swiglu_experts(*operands, offs), quantized),
        "bf16": (mlp_of(lambda x, w: F.grouped_mm(x, w.transpose(1, 2), offs=offs)), plain),
    }
    times = burst_times({
        name: backward_of(run, x, weights, gradient) for name, (run, weights) in mlps.items()
    })  # fmt: skip
    kept = {}  # with the rows that are picked from tokens, which nothing else keeps
    order = torch.randperm(len(x), device="cuda")
    for name, (run, weights) in mlps.items():
        before = torch.cuda.memory_allocated()
        y = run(x.index_select(0, order), *weights)
        kept[name] = (torch.cuda.memory_allocated() - before - y.nbytes) / 2**20
        del y
    size = f"{experts} x {rows}: {hidden}, {width}"
    yield Row("swiglu_experts, both ways", size, times["fused"], times["bf16"], "µs", at_most(0.70))
    yield Row("kept for its backward", size, kept["fused"], kept["bf16"], "MiB", at_most(0.55))
    yield Row("MLP of three, both ways", size, times["codes"], times["bf16"], "µs", at_most(0.75))
    yield Row("kept for its backward, of three", size, kept["codes"], kept["bf16"], "MiB")


def dense(shape) -> Iterator[Row]:
    tokens, n, k = shape
    x, gradient, weight = randn(tokens, k), randn(tokens, n), randn(n, k)
    offs = even_ends(1, tokens)
    of_x, of_gradient = by_rows(x), by_rows(gradient)
    codes, scales = by_squares(weight)
    stack = codes[None], scales[None]
    columns, squares = by_rows(gradient.t().contiguous()), by_squares(x.t().contiguous())
    transposed = codes.view(torch.uint8).t().contiguous().view(E4M3), scales.t().contiguous()

    times = burst_times({
        "forward": lambda: ops._grouped_gemm(*of_x, *stack, offs),
        "forward, cuBLASLt": cublaslt(of_x, (codes, scales)),
        "dgrad": lambda: ops._grouped_gemm(
            *of_gradient, transposed[0][None], transposed[1][None], offs
        ),
        "dgrad, cuBLASLt": cublaslt(of_gradient, transposed),
        "wgrad": lambda: ops._grouped_gemm(*columns, *squares, offs, tokens=tokens),
        "wgrad, cuBLASLt": cublaslt(columns, squares),
    })  # fmt: skip
    for direction in ("forward", "dgrad", "wgrad"):
        yield Row(f"dense {direction} / cuBLASLt", f"{tokens}: {n}, {k}", times[direction],
                  times[f"{direction}, cuBLASLt"], "µs", at_most(0.97))


MEASURE = {
    "forward": forward, "dgrad": dgrad, "wgrad": wgrad, "uneven": uneven, "linear": linear, "mlp": mlp,
    "dense": dense,
}  # fmt: skip
# tokens, N, K of one matrix
DENSE = [
    (tokens, n, k)
    for tokens in (2048, 8192, 16384)
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096))
]
# experts, rows of each, hidden, width of the MLP
MLPS = [(32, 2048, 4096, 1536), (128, 512, 2048, 768), (8, 4096, 4096, 7168)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MEASURE, default=MEASURE)
    every = range(len(SHAPES))
    parser.add_argument("--shapes", nargs="+", type=int, default=every, help="by index")
    parser.add_argument("--seconds", type=float, default=240, help="begin nothing new after this")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()

    torch.manual_seed(0)
    results = Results("qshard experts", args.seconds)
    for section in args.only:
        shapes = {"mlp": MLPS, "dense": DENSE}.get(section, [SHAPES[i] for i in args.shapes])
        for shape in shapes:
            results.add(f"{section} {shape}", lambda: MEASURE[section](shape))
            torch.cuda.empty_cache()
    results.save(args.json)
    results.print()


if __name__ == "__main__":
    main()
