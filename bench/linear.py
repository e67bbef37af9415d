"""The quantized linear: its GEMMs, the whole of forward and backward, and what it saves.

    python bench/linear.py [--only SECTION …] [--tokens N …] [--shapes OUTxIN …] [--torchao] [--json FILE]

GEMM: device time of what is not our kernel inside our operators, in TFLOP/s = 2 M N K / time, next
to torch._scaled_mm (cuBLASLt with its first heuristic) and bf16 mm of the same sizes, in turn.
Whole: nn.Linear forward + backward with a weight as FSDP2 gathers it (bf16, no master): the sum of
all kernels, and time from event to event over back-to-back calls. 1/1.55 = 0.645, 1/1.35 = 0.741.
Accumulate: the backward of a second microbatch, which adds to .grad in the GEMM, next to the same
with a hook on the weight, for which autograd adds: device time, and memory beyond what lives before.
Narrow, where it is named: steps of a Llama of eight layers in bf16, AdamW among them, from event to event:
plain, with all linears of its blocks quantized, and with those that `qshard.large_enough` takes.
With --torchao: ours per tensor next to its Float8Linear, eager and compiled, of which FSDP2 gathers
the same codes; last, because torchao changes inductor.
Saved: memory that forward leaves allocated, less its output, per element of an input that nothing
else keeps. A code is 1 byte, a 1x128 scale 4/128 more.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from measuring import (
    Results,
    Row,
    Stopwatch,
    at_least,
    at_most,
    count_of,
    first_line,
    interleaved,
    is_foreign,
    is_quantize,
    is_transpose,
    time_of,
)
from peers import torchao_linear
from torch import nn

import qshard

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Llama, LlamaConfig  # noqa: E402

ops = torch.ops.qshard
RECIPES = {r.format: r for r in (qshard.Float8CurrentScaling(), qshard.Float8BlockScaling())}
# (out features, in features)
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672), (1024, 4096)]
SECTIONS = ("whole", "accumulate", "transpose", "reuse", "saved", "gemm", "torchao", "narrow")
ASKED_FOR = ("torchao", "narrow")  # sections that are measured where they are named
WIDTHS = (512, 1024)
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


@dataclass
class Bench:
    device: str
    calls: int
    shapes: list[tuple[int, int]]
    tokens: list[int]
    qkv: tuple[int, int]  # out features of k and v, of q; q has as many in features
    widths: tuple[int, ...] = WIDTHS

    def randn(self, *shape, dtype=BF16):
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def activation(self, x):
        """x as the recorded result of an operator: linears share the codes of such inputs alone."""
        return x + torch.zeros((), device=self.device, dtype=x.dtype, requires_grad=True)

    def run(self, *functions):
        return interleaved(list(functions), self.device, self.calls)

    @property
    def saves_codes(self):
        return self.device == "cuda"


# ------------------------------------------------------------------------------------- GEMMs


def scaled_mm(bench: Bench, format, direction, m, n, k):
    """out (m, n) = a (m, k) @ b (n, k)^T of codes by torch._scaled_mm, as a call to repeat.

    Scales of 1x128 blocks lie column by column, those of 128x128 blocks row by row with k / 128 a
    multiple of 4: `_scaled_mm` knows them by shape and strides.
    """
    a_type = E5M2 if format == "float8_tensorwise" and direction != "forward" else E4M3
    a, b = (bench.randn(rows, k).to(dtype) for rows, dtype in ((m, a_type), (n, E4M3)))
    ones = {"dtype": torch.float32, "device": bench.device}
    if format == "float8_tensorwise":
        scale_a = scale_b = torch.ones((), **ones)
    else:
        scale_a = torch.ones(k // 128, m, **ones).t()
        if direction == "wgrad":
            scale_b = torch.ones(k // 128, n, **ones)
        else:
            scale_b = torch.ones(n // 128, k // 128, **ones).t()
    fast = format == "float8_tensorwise" and direction == "forward"  # as our linear does
    if bench.device == "cpu":
        return lambda: a.to(BF16) @ b.to(BF16).t()
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a, scale_b, out_dtype=BF16, use_fast_accum=fast
    )


def gemms(bench: Bench, format, tokens, shape) -> Iterator[Row]:
    """The GEMM of each direction against the same one by _scaled_mm and by bf16 mm."""
    n, k = shape
    x, w, gradient = bench.randn(tokens, k), bench.randn(n, k), bench.randn(tokens, n)
    weight = ops.quantize(w, format)
    saved = ops.linear_forward(x, weight, None, bench.saves_codes)[1] if bench.saves_codes else x

    def backward(needs_input, needs_weight):
        return ops.linear_backward(
            gradient, weight, saved, bench.saves_codes, needs_input, needs_weight
        )

    directions = {
        "forward": ((tokens, n, k), lambda: ops.linear_forward(x, weight, None, False),
                    lambda: x @ w.t()),
        "dgrad": ((tokens, k, n), lambda: backward(True, False), lambda: gradient @ w),
        "wgrad": ((n, k, tokens), lambda: backward(False, True), lambda: gradient.t() @ x),
    }
    for direction, (mnk, mine, plain) in directions.items():
        try:
            raw = scaled_mm(bench, format, direction, *mnk)
            raw()
        except (RuntimeError, ValueError) as error:
            print(f"no _scaled_mm for {format} {direction}: {first_line(error)}", flush=True)
            raw = None
        calls = bench.run(mine, plain, *([raw] if raw else []))
        us = [time_of(calls[0], is_foreign), *map(time_of, calls[1:])]
        mine_rate, plain_rate, *raw_rate = (2 * mnk[0] * mnk[1] * mnk[2] / t / 1e6 for t in us)
        size = "x".join(map(str, mnk))
        yield Row(f"{format} {direction} / bf16 mm", size, mine_rate, plain_rate, "TFLOP/s")
        if raw_rate:
            yield Row(f"{format} {direction} / _scaled_mm", size, mine_rate, raw_rate[0], "TFLOP/s",
                      at_least(0.98))
        if (format, direction, *mnk) == ("float8_blockwise", "forward", 8192, 14336, 4096):
            yield Row("float8_blockwise forward", size, mine_rate, 1150, "TFLOP/s", at_least(1))


# ------------------------------------------------------------------------------ whole linears


def linear(bench: Bench, shape, recipe=None) -> nn.Linear:
    n, k = shape
    layer = nn.Linear(k, n, bias=False, device=bench.device, dtype=BF16)
    return qshard.quantize_(layer, recipe, keep_master=False) if recipe else layer


def elapsed(bench: Bench, functions, rounds=5, calls=10) -> list[float]:
    """µs per call, back to back, the functions in turn; median of the rounds."""
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, clock in zip(functions, times):
            watch = Stopwatch(bench.device)
            watch.mark()
            for _ in range(calls):
                function()
            watch.mark()
            clock.append(watch.intervals()[0] * 1e3 / calls)
    return list(map(median, times))


def times_of(bench: Bench, tokens, layers) -> tuple[list[float], list[float]]:
    """µs of each layer's forward + backward: of all kernels, and elapsed."""
    x = bench.randn(tokens, layers[0].in_features)
    gradient = bench.randn(tokens, layers[0].out_features)

    def step_of(layer):
        def step():
            layer.weight.grad = None
            # Another tensor each time: one with a gradient would add to it.
            layer(x.detach().requires_grad_()).backward(gradient)

        return step

    steps = list(map(step_of, layers))
    device = list(map(time_of, bench.run(*steps)))
    return device, elapsed(bench, steps, calls=min(10, bench.calls))


def whole(bench: Bench, tokens, shape) -> Iterator[Row]:
    """Forward + backward, quantization included, against bf16 nn.Linear."""
    n, k = shape
    layers = [linear(bench, shape, recipe) for recipe in (None, *RECIPES.values())]
    device, wall = times_of(bench, tokens, layers)
    size = f"{tokens} tokens, {n}x{k}"
    bounds = {"float8_tensorwise": 1 / 1.55, "float8_blockwise": 1 / 1.35}
    for i, format in enumerate(RECIPES, start=1):
        goal = at_most(bounds[format]) if tokens >= 16384 else None
        yield Row(f"{format} linear / bf16, kernels", size, device[i], device[0], "µs", goal)
        yield Row(f"{format} linear / bf16, elapsed", size, wall[i], wall[0], "µs", goal)


def beside_torchao(bench: Bench, tokens, shape) -> Iterator[Row]:
    """The same against torchao's linear, and that against bf16's."""
    n, k = shape
    torch.compiler.reset()
    plain, mine = linear(bench, shape), linear(bench, shape, RECIPES["float8_tensorwise"])
    eager, compiled = (torchao_linear(linear(bench, shape)) for _ in range(2))
    compiled.compile(dynamic=False, backend="inductor" if bench.device == "cuda" else "aot_eager")
    device, wall = times_of(bench, tokens, [plain, mine, eager, compiled])
    size = f"{tokens} tokens, {n}x{k}"
    for i, name in ((2, "torchao"), (3, "compiled torchao")):
        for what, us in (("kernels", device), ("elapsed", wall)):
            yield Row(f"{name} linear / bf16, {what}", size, us[i], us[0], "µs")
            yield Row(f"float8_tensorwise linear / {name}, {what}", size, us[1], us[i], "µs")


def backward_share(bench: Bench, format, tokens, shape) -> Iterator[Row]:
    """What the transpose of the weight takes of a backward."""
    n, k = shape
    x, gradient = bench.randn(tokens, k), bench.randn(tokens, n)
    weight = ops.quantize(bench.randn(n, k), format)
    saves = bench.saves_codes
    saved = ops.linear_forward(x, weight, None, True)[1] if saves else x
    (calls,) = bench.run(lambda: ops.linear_backward(gradient, weight, saved, saves, True, True))
    yield Row(f"{format} transpose / backward", f"{tokens} tokens, {n}x{k}",
              time_of(calls, is_transpose), time_of(calls), "µs", at_most(0.04))


def accumulate(bench: Bench, format, tokens, shape) -> Iterator[Row]:
    """A backward that finds a .grad, against one whose gradient autograd adds to it."""
    n, k = shape
    gradient = bench.randn(tokens, n)

    def backward_of(layer):
        layer.weight.grad = gradient.new_zeros(n, k)
        y = layer(bench.randn(tokens, k))
        return lambda: y.backward(gradient, retain_graph=True)

    layers = [linear(bench, shape, RECIPES[format]) for _ in range(2)]
    layers[1].weight.register_post_accumulate_grad_hook(lambda _: None)
    mine, stock = backwards = list(map(backward_of, layers))
    times = list(map(time_of, bench.run(*backwards)))
    size = f"{tokens} tokens, {n}x{k}"
    yield Row(f"{format} wgrad added by the GEMM / by autograd", size, *times, "µs", at_most(1))
    if bench.device == "cuda":
        yield Row(f"{format} the same, peak memory", size, peak_of(mine), peak_of(stock), "MB",
                  at_most(1))


def narrow(bench: Bench, tokens, width) -> Iterator[Row]:
    """Steps of a small model on one device."""
    config = LlamaConfig(vocab=8192, dim=width, layers=8, heads=width // 64, kv_heads=width // 64, hidden=4 * width,
                         max_seq_len=1024)
    ids = torch.randint(config.vocab, (max(tokens // 1024, 1), 1024), device=bench.device)

    def step_of(recipe=None, chosen=None):
        model = Llama(config).to(bench.device, BF16)
        linears = [(module, name) for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)]
        if recipe and (chosen is None or any(chosen(*linear) for linear in linears)):  # else all stay plain
            qshard.quantize_(model.layers, recipe, filter_fn=chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step():
            F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    names = ["bf16"]
    steps = [step_of()]
    for format, recipe in RECIPES.items():
        names += [format, f"{format}, large_enough"]
        steps += [step_of(recipe), step_of(recipe, qshard.large_enough(tokens=tokens, recipe=recipe))]
    plain, *quantized = elapsed(bench, steps, calls=min(10, bench.calls))
    for name, us in zip(names[1:], quantized):
        yield Row(f"{name}: step / bf16", f"{tokens} tokens, width {width}", us, plain, "µs")


# ------------------------------------------------------------------------------- saved memory


def peak_of(function) -> float:
    """MB that function() allocates at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def saved_per_element(bench: Bench, layers, tokens, features) -> float:
    """Bytes that the layers keep of one common input until backward, per element of it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = bench.activation(bench.randn(tokens, features))  # like a norm's result, it is not kept
    outputs = [layer(x) for layer in layers]
    elements = x.numel()
    del x
    kept = torch.cuda.memory_allocated() - before - sum(output.nbytes for output in outputs)
    return kept / elements


def saved(bench: Bench, tokens, shape) -> Iterator[Row]:
    if bench.device == "cpu":
        return
    for format, recipe in {"bf16": None, **RECIPES}.items():
        layer = linear(bench, shape, recipe)
        layer(bench.randn(tokens, shape[1]))  # the library's workspace is no part of it
        bytes = saved_per_element(bench, [layer], tokens, shape[1])
        size = f"{tokens} tokens, {shape[0]}x{shape[1]}"
        yield Row(f"{format} saved per element", size, bytes, 1, "B",
                  at_most(1.05) if recipe else None)


def reuse(bench: Bench, format, tokens) -> Iterator[Row]:
    """q, k and v of one input: one quantization, one saved copy."""
    few, many = bench.qkv
    layers = [linear(bench, (rows, many), RECIPES[format]) for rows in (many, few, few)]
    x = bench.randn(tokens, many)

    def forward():
        mine = bench.activation(x)  # another tensor for each call
        return [layer(mine) for layer in layers]

    (calls,) = bench.run(forward)
    size = f"{tokens} tokens, {many} + {few} + {few}"
    yield Row(f"{format} q, k, v: quantizations", size, count_of(calls, is_quantize), 1, "",
              at_most(1))
    yield Row(f"{format} q, k, v: all our kernels", size,
              count_of(calls, lambda kernel: kernel.is_ours), None, "")
    if bench.device == "cuda":
        bytes = saved_per_element(bench, layers, tokens, many)
        yield Row(f"{format} q, k, v: saved per element", size, bytes, 1, "B", at_most(1.05))


def sections(bench: Bench) -> Iterator[tuple[str, str, object]]:
    """(section, label, what to measure), the longest tokens first: the goals are theirs."""
    longest = max(bench.tokens)
    for tokens in sorted(bench.tokens, reverse=True):
        for shape in bench.shapes:
            yield "whole", f"{tokens} {shape}", lambda: whole(bench, tokens, shape)
    for format in RECIPES:
        for shape in bench.shapes:
            yield ("accumulate", f"{format} {shape}",
                   lambda: accumulate(bench, format, longest, shape))
    for format in RECIPES:
        for shape in bench.shapes:
            yield ("transpose", f"{format} {shape}",
                   lambda: backward_share(bench, format, longest, shape))
        yield "reuse", format, lambda: reuse(bench, format, longest)
    yield "saved", "", lambda: saved(bench, longest, bench.shapes[0])
    yield "gemm", "blockwise", lambda: gemms(bench, "float8_blockwise", 8192, (14336, 4096))
    for tokens in sorted(bench.tokens, reverse=True):
        for format in RECIPES:
            for shape in bench.shapes:
                yield ("gemm", f"{format} {tokens} {shape}",
                       lambda: gemms(bench, format, tokens, shape))
    for tokens in sorted(bench.tokens, reverse=True):
        for width in bench.widths:
            yield "narrow", f"{tokens} {width}", lambda: narrow(bench, tokens, width)
    for tokens in sorted(bench.tokens, reverse=True):
        for shape in bench.shapes:
            yield "torchao", f"{tokens} {shape}", lambda: beside_torchao(bench, tokens, shape)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="also: 32768")
    parser.add_argument("--shapes", type=lambda text: tuple(map(int, text.split("x"))), nargs="+", default=SHAPES,
                        metavar="OUTxIN", help="features, in place of a Llama's")
    parser.add_argument("--only", nargs="+", choices=SECTIONS)
    parser.add_argument("--torchao", action="store_true", help="also beside torchao's linear")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=240, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()

    torch.manual_seed(0)
    bench = Bench(args.device, args.calls, args.shapes, args.tokens, (1024, 4096))
    if args.tiny:
        bench = Bench(args.device, 2, [(256, 512), (512, 256)], [256, 512], (128, 256), (128,))
    results = Results("qshard linear", args.seconds)
    for section, label, measure in sections(bench):
        if args.tiny and label == "blockwise":
            continue
        wanted = section in args.only if args.only else section not in ASKED_FOR
        if wanted or (args.torchao and section == "torchao"):
            results.add(f"{section} {label}", measure)
    results.save(args.json)
    results.print()
    print(f"\n{qshard.backend_report()}")


if __name__ == "__main__":
    main()
