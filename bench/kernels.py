"""Each kernel's share of the device's copy bandwidth, measured in the same run.

    python bench/kernels.py [--only SECTION …] [--formats NAME …] [--compiled] [--json FILE]

Device times are the profiler's, of our kernels alone, so the host does not count. GB/s are logical
bytes over time: what a perfect kernel must read and write once, each row's formula at its function.
With v bytes per value and c per element of the image (codes and their row-local scales):

    copy                       v read + v written
    amax                       v
    cast (amax is known)       v + c
    quantize                   v + c in blocks, amax included; 2 v + c if one scale spans the tensor
    dequantize to bf16         c + 2
    activation, bf16           2 + 1 for one orientation, 2 + 1 + 1 for both
    rows that arrived          1 + 1 for one orientation, 1 + 1 + 1 for both, 1 + 1 for columns of rows
                               with one scale each
    rows to send               2 + 1
    message, bf16              2 + 1 of a rank's tokens; 1 + 2 of those of all ranks
    SwiGLU or GeGLU, bf16      2 + 2 + 1; its amax 2 + 2, where no earlier call lets guess the scale
    SwiGLU's gradients, bf16   2 + 2 + 2 + 4 x 1 + 1: both in both orientations, and the product's
                               columns; their amaxes 2, with what forward's maxima leave of gate and up
    GELU or relu squared, bf16 2 + 1, its amax 2; its gradients 2 + 2 + 2 x 1 + 1, their amax 2
    norm, bf16                 2 + 2; its gradients 2 + 2 + 2
    norm's codes, bf16         2 + 1 for one orientation, 2 + 1 + 1 for both; its statistics 2
    transpose                  1 + 1
    flush                      v + c in one pass over the master, 2 v + c in two
    AdamW and flush            28 + c in one pass, 28 + 4 + c where an all-reduce parts it in two:
                               master and moments (fp32) read and written 24, fp32 gradient 4
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import Results, Row, at_least, at_most, count_of, interleaved, time_of
from measuring import is_amax, is_dequantize, is_quantize, is_transpose, ours

import qshard  # noqa: F401  (loads the library)
from qshard.formats import info_of

ops = torch.ops.qshard
IMAGE_BYTES = {  # c; a scale per tensor or per 128x128 block, in the grid, does not count
    "float8_tensorwise": 1,
    "float8_blockwise": 1,
    "mxfp8": 1 + 1 / 32,
    "mxfp8_1x32": 2 * (1 + 1 / 32),  # once more for the transposed weight
    "nvfp4": 1 / 2 + 1 / 16,
    "nvfp4_1x16[4over6]": 1 / 2 + 1 / 16,  # measured where it is asked for
}
ONE_SCALE = ("float8_tensorwise", "nvfp4", "nvfp4_1x16[4over6]")  # with a scale that spans the tensor
SECTIONS = ("weight", "activation", "arrived", "message", "swiglu", "rotary", "norm", "norm_codes",
            "transpose", "flush", "adamw", "compiled")
FP8_GEMM = ("float8_tensorwise", "float8_blockwise")  # activations are quantized on Hopper
# The linears of one of Llama-8B's 32 layers, sharded over 8 ranks.
SHARDS = [(512, 4096), (128, 4096), (128, 4096), (512, 4096)]  # q, k, v, o
SHARDS += [(1792, 4096), (1792, 4096), (512, 14336)]  # gate, up, down


@dataclass
class Bench:
    """What to measure on, and the bandwidth that everything is compared with."""

    device: str
    calls: int
    shapes: list[tuple[int, int]]  # of weights
    activations: list[tuple[int, int]]  # tokens, features
    swiglus: list[tuple[int, int]]  # tokens, features of gate
    heads: list[tuple[int, int, int, int]]  # batch, positions, heads, channels
    norms: list[tuple[int, int]]  # rows, columns
    shards: list[tuple[int, int]]
    copied: int  # elements
    copy: float = 0.0  # GB/s

    def randn(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def run(self, *functions, calls=None):
        return interleaved(list(functions), self.device, calls or self.calls)

    def measure_copy(self) -> Iterator[Row]:
        source = self.randn(self.copied)
        target = torch.empty_like(source)
        (calls,) = self.run(lambda: target.copy_(source))
        self.copy = 2 * source.nbytes / time_of(calls) / 1e3
        yield Row("copy", f"{self.copied}", self.copy, None, "GB/s")

    def share(self, name, shape, bytes, us, goal=None) -> Row:
        """`bytes` in `us`, next to the copy bandwidth."""
        shape = shape if isinstance(shape, str) else "x".join(map(str, shape))
        if not self.copy:  # it was not measured
            return Row(name, shape, bytes / us / 1e3, None, "GB/s")
        return Row(name, shape, bytes / us / 1e3, self.copy, "GB/s", goal)


def dtype_name(dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def weight(bench: Bench, format: str, dtype, shape) -> Iterator[Row]:
    """amax, cast, both, dequantize of one weight: written by copy_, then flushed."""
    rows, cols = shape
    rows = -(-rows // 32) * 32 if format == "mxfp8_1x32" else rows
    source = bench.randn(rows, cols, dtype=dtype)
    quantized = ops.quantize(source, format, keep_master=True)

    def write_and_flush():
        quantized.copy_(source)
        ops.flush([quantized])

    def read():
        ops.dequantize(quantized, dtype=torch.bfloat16)

    flushes, reads = bench.run(write_and_flush, read)
    n, v, c = source.numel(), source.element_size(), IMAGE_BYTES[format]
    size = f"{rows}x{cols} {dtype_name(dtype)}"
    cast = time_of(flushes, is_quantize)
    in_blocks = at_least(0.85 if format == "mxfp8_1x32" else 0.90)
    if count_of(flushes, is_amax):
        amax = time_of(flushes, is_amax)
        yield bench.share(f"amax {format}", size, n * v, amax, at_least(0.92))
        known = in_blocks if format.startswith("nvfp4") else at_least(0.92)
        yield bench.share(f"cast {format}", size, n * (v + c), cast, known)
        bytes, goal = (2 * v + c, None) if format in ONE_SCALE else (v + c, in_blocks)
        yield bench.share(f"quantize {format}", size, n * bytes, amax + cast, goal)
    else:
        yield bench.share(f"quantize {format}", size, n * (v + c), cast, in_blocks)
    if dtype == torch.bfloat16 and format != "mxfp8_1x32":
        us = time_of(reads, is_dequantize)
        yield bench.share(f"dequantize {format}", size, n * (c + 2), us, at_least(0.92))


def activation(bench: Bench, format: str, shape) -> Iterator[Row]:
    """Quantization of a linear's input and gradient; few out (in) features keep the GEMMs small."""
    tokens, features = shape
    bf16 = {"dtype": torch.bfloat16}
    x, small = bench.randn(tokens, features, **bf16), bench.randn(tokens, 128, **bf16)
    to_few = ops.quantize(bench.randn(128, features, **bf16), format)
    saves = bench.device == "cuda"  # on CPU an input is saved as it is
    rows, both, columns = bench.run(
        lambda: ops.linear_forward(x, to_few, None, False),
        lambda: ops.linear_forward(x, to_few, None, saves),
        lambda: ops.linear_backward(small, to_few, x, False, False, True),
    )
    # The backward quantizes the small gradient as well: what takes longest is the input's.
    longest = [[max(filter(is_quantize, call), key=lambda kernel: kernel.us)] for call in columns]
    one, two, apart = time_of(rows, is_quantize), time_of(both, is_quantize), time_of(longest)
    n = x.numel()
    block = "1x128" if format == "float8_blockwise" else "per-tensor"
    if count_of(rows, is_amax):
        yield bench.share(f"activation amax {block}", shape, 2 * n, time_of(rows, is_amax),
                          at_least(0.92))
    yield bench.share(f"activation rows {block}", shape, 3 * n, one, at_least(0.90))
    yield bench.share(f"activation columns {block}", shape, 3 * n, apart, at_least(0.90))
    yield bench.share(f"activation rows + columns {block}", shape, 4 * n, two, at_least(0.85))
    yield Row(f"activation: two launches / one {block}", f"{tokens}x{features}", one + apart, two,
              "µs", at_least(1.35))
    if features % 16:
        return
    from_few = ops.quantize(bench.randn(features, 128, **bf16), format)
    (backward,) = bench.run(lambda: ops.linear_backward(x, from_few, small, False, True, True))
    longest = [[max(filter(is_quantize, call), key=lambda kernel: kernel.us)] for call in backward]
    yield bench.share(f"gradient rows + columns {block}", shape, 4 * n, time_of(longest),
                      at_least(0.85))


def arrived(bench: Bench, shape) -> Iterator[Row]:
    """Tokens as ranks send them in codes, and as GEMMs read those that arrive."""
    tokens, features = shape
    x = bench.randn(tokens, features, dtype=torch.bfloat16)
    for format, which in (("float8_blockwise", ""), ("float8_tensorwise", ", one scale each")):
        sent = info_of(format).activations.row_format
        q = ops.quantize(x, sent)
        to_few = ops.quantize(bench.randn(128, features, dtype=torch.bfloat16), format)
        saves = bench.device == "cuda"  # on CPU an input is saved as it is
        made, rows, both = bench.run(
            lambda: ops.quantize(x, sent),
            lambda: ops.linear_forward(q, to_few, None, False),
            lambda: ops.linear_forward(q, to_few, None, saves),
        )
        is_repack, n = ours("repack"), q.numel()
        yield bench.share(f"rows to send{which}", shape, 3 * n, time_of(made, is_quantize), at_least(0.85))
        of_rows = 0 if which else 2 * n  # those with one scale each are read where they lie
        if of_rows:
            yield bench.share("rows that arrived", shape, of_rows, time_of(rows, is_repack), at_least(0.85))
        yield bench.share(f"rows that arrived and their columns{which}", shape, of_rows + (2 * n if which else n),
                          time_of(both, is_repack), at_least(0.85))


def message(bench: Bench, format: str, shape) -> Iterator[Row]:
    """Tokens as two tensor-parallel ranks gather them, and their gradients."""
    tokens, features = shape
    x = bench.randn(tokens, features, dtype=torch.bfloat16)
    amax = ops._message_amax(x, format)
    for name, is_gradient in (("activation", False), ("gradient", True)):
        part = ops._encode_activation(x, format, is_gradient, amax)
        parts = torch.cat([part, part])
        encode, decode = bench.run(
            lambda: ops._encode_activation(x, format, is_gradient, amax),
            lambda: ops._decode_activations(parts, format, is_gradient, x.shape, 0, x.dtype),
        )
        yield bench.share(f"message of {name} {format}", shape, 3 * x.numel(), time_of(encode),
                          at_least(0.85))
        yield bench.share(f"values of {name}'s messages {format}", (2 * tokens, features),
                          6 * x.numel(), time_of(decode), at_least(0.85))


MLPS = {"swiglu": "SwiGLU", "geglu": "GeGLU", "sreglu": "squared ReLU, gated", "gelu": "GELU", "srelu": "squared ReLU"}


def swiglu(bench: Bench, format: str, shape, activation: str) -> Iterator[Row]:
    """Codes of silu(gate) * up, or of another activation, and of gradients; few out features keep the GEMMs small."""
    tokens, features = shape
    bf16 = {"dtype": torch.bfloat16}
    both = bench.randn(tokens, 2 * features, **bf16)  # as one linear gives them
    gate, up = both.chunk(2, -1)
    joined = features % 128 == 0  # else two linears: codes of halves would begin inside a block
    if activation in ("gelu", "srelu"):
        gate, up, joined = gate.contiguous(), None, False
    elif not joined:
        gate, up = gate.contiguous(), up.contiguous()
    grad = bench.randn(tokens, 128, **bf16)
    down = ops.quantize(bench.randn(128, features, **bf16), format)
    of = {"activation": activation}
    maxima = ops.swiglu_linear_forward(gate, up, down, None, bench.device == "cuda", **of)[1]
    asked = (True, True, True, joined, *([format] if bench.device == "cuda" else []))
    forward, backward = bench.run(
        lambda: ops.swiglu_linear_forward(gate, up, down, None, False, **of),
        lambda: ops.swiglu_linear_backward(grad, gate, up, down, maxima, *asked, **of),
    )
    n = gate.numel()
    block = "1x128" if format == "float8_blockwise" else "per-tensor"
    of_swiglu = ours("swiglu")

    def of_amax(kernel):
        return of_swiglu(kernel) and is_amax(kernel)

    def of_codes(kernel):
        return of_swiglu(kernel) and not is_amax(kernel)

    label = MLPS[activation]
    read, written = (4, 5) if up is not None else (2, 3)  # gate and up; codes of gradients and of the product
    for name, calls, amax_bytes, bytes, goal in (
        (label, forward, read, read + 1, 0.85), (f"{label}'s gradients", backward, 2, 2 + read + written, 0.80)
    ):
        if count_of(calls, of_amax):
            us = time_of(calls, of_amax)
            yield bench.share(f"{name} amax {block}", shape, amax_bytes * n, us, at_least(goal))
        us = time_of(calls, of_codes)
        yield bench.share(f"{name} {block}", shape, bytes * n, us, at_least(goal))


def rotary(bench: Bench, shape) -> Iterator[Row]:
    """Rotary embedding of what linears give, as attention reads it: (batch, heads, positions, channels); and of one
    projection's output and gradient, whose keys and values have a quarter of the heads."""
    batch, positions, heads, channels = shape
    x = bench.randn(*shape, dtype=torch.bfloat16).transpose(1, 2)
    angles = bench.randn(positions, channels)
    cos, sin = angles.cos(), angles.sin()
    (calls,) = bench.run(lambda: ops.rotary_embedding(x, cos, sin, 2))
    size = "x".join(map(str, shape))
    yield bench.share("rotary embedding", size, 4 * x.numel(), time_of(calls, ours("rotary")),
                      at_least(0.85))
    heads = [heads, max(1, heads // 4), max(1, heads // 4)]
    projected = bench.randn(batch, positions, sum(heads), channels, dtype=torch.bfloat16)
    grads = ops.split_rotary_embedding(projected, cos, sin, heads)
    split, join = bench.run(
        lambda: ops.split_rotary_embedding(projected, cos, sin, heads),
        lambda: ops.join_rotary_embedding(*grads, cos, sin, heads, inverse=True),
    )
    for name, calls in (("parted", split), ("joined", join)):
        yield bench.share(f"rotary embedding, {name}", size, 4 * projected.numel(),
                          time_of(calls, ours("rotary")), at_least(0.85))


def norm(bench: Bench, kind: str, shape) -> Iterator[Row]:
    """Beside torch's fused kernels: forward, and what backward takes in all."""
    bf16 = {"dtype": torch.bfloat16}
    x, grad, weight = bench.randn(*shape, **bf16), bench.randn(*shape, **bf16), bench.randn(shape[1], **bf16)
    is_rms, bias = kind == "RMSNorm", None if kind == "RMSNorm" else weight
    if not ops._can_normalize(x, weight, bias):
        return
    statistics = ops._normalize(x, weight, bias, 1e-5, is_rms, False)[1]
    leaves = [t.detach().requires_grad_() for t in (x, weight)]

    def torchs():
        if is_rms:
            return torch.nn.functional.rms_norm(leaves[0], shape[1:], leaves[1], 1e-5)
        return torch.nn.functional.layer_norm(leaves[0], shape[1:], leaves[1], leaves[1], 1e-5)

    y = torchs()
    forward, backward, with_residual, torch_forward, torch_backward = bench.run(
        lambda: ops._normalize(x, weight, bias, 1e-5, is_rms, False),
        lambda: ops._normalize_backward(grad, x, weight, statistics, False, True),
        lambda: ops._normalize_backward(grad, x, weight, statistics, False, True, grad),
        torchs,
        lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True),
    )
    n = x.numel()
    yield bench.share(kind, shape, 4 * n, time_of(forward), at_least(0.85))
    yield bench.share(f"{kind}'s gradients", shape, 6 * n, time_of(backward), at_least(0.85))
    yield bench.share(f"{kind}'s gradients + residual's", shape, 8 * n, time_of(with_residual),
                      at_least(0.85))
    yield bench.share(f"torch's {kind}", shape, 4 * n, time_of(torch_forward))
    yield bench.share(f"torch's {kind}'s gradients", shape, 6 * n, time_of(torch_backward))


def norm_codes(bench: Bench, kind: str, format: str, shape) -> Iterator[Row]:
    """Codes of normalized rows as forward asks for them, and as backward makes its columns."""
    bf16 = {"dtype": torch.bfloat16}
    x, weight = bench.randn(*shape, **bf16), bench.randn(shape[1], **bf16)
    is_rms, bias = kind == "RMSNorm", None if kind == "RMSNorm" else weight
    if not ops._can_normalize(x, weight, bias):
        return
    norm = (x, weight, bias, 1e-5, is_rms, False, format)
    forward, both, columns = bench.run(
        lambda: ops._quantize_normalized(*norm, True, False),
        lambda: ops._quantize_normalized(*norm, True, True),
        lambda: ops._quantize_normalized(*norm, False, True),
    )
    n, goal = x.numel(), at_least(0.85)
    name = f"{kind}'s {{}} " + ("1x128" if format == "float8_blockwise" else "per-tensor")
    of_codes, of_statistics = ours("norm_quantize"), ours("norm_statistics")
    yield bench.share(name.format("statistics"), shape, 2 * n, time_of(both, of_statistics), goal)
    yield bench.share(name.format("rows"), shape, 3 * n, time_of(forward, of_codes), goal)
    yield bench.share(name.format("columns"), shape, 3 * n, time_of(columns, of_codes), goal)
    yield bench.share(name.format("rows + columns"), shape, 4 * n, time_of(both, of_codes), goal)


def transpose(bench: Bench, shape) -> Iterator[Row]:
    """The bytes of a gathered weight, for dgrad; few tokens keep the GEMM small."""
    rows, cols = -(-shape[0] // 16) * 16, shape[1]
    quantized = ops.quantize(bench.randn(rows, cols, dtype=torch.bfloat16), "float8_blockwise")
    gradient = bench.randn(128, rows, dtype=torch.bfloat16)
    x = bench.randn(128, cols, dtype=torch.bfloat16)
    (calls,) = bench.run(lambda: ops.linear_backward(gradient, quantized, x, False, True, False))
    yield bench.share("transpose of FP8 weight", (rows, cols), 2 * rows * cols,
                      time_of(calls, is_transpose), at_least(0.85))


def shards(bench: Bench, format: str) -> list[torch.Tensor]:
    values = (bench.randn(*shape) / 64 for shape in bench.shards)
    return [ops.quantize(value, format, keep_master=True) for value in values]


def flush(bench: Bench, format: str) -> Iterator[Row]:
    """All weights of one rank of eight of Llama-8B at once, from fp32 masters."""
    weights = shards(bench, format)

    def write_and_flush():
        torch._foreach_mul_(weights, 1.0)
        ops.flush(weights)

    (calls,) = bench.run(write_and_flush, calls=max(2, bench.calls // 2))
    flushes = [[k for k in call if "multi_tensor" not in k.name] for call in calls]  # not the write
    passes = 2 if count_of(flushes, is_amax) else 1
    n = sum(weight.numel() for weight in weights)
    us = time_of(flushes, lambda kernel: kernel.is_ours)
    shape = f"{len(weights)} weights, {passes} passes"
    if passes == 2:
        yield bench.share(f"amax, multi-tensor {format}", shape, n * 4, time_of(flushes, is_amax),
                          at_least(0.92))
    yield bench.share(f"flush {format}", shape, n * (4 * passes + IMAGE_BYTES[format]), us,
                      at_least(0.85))
    yield Row(f"flush launches {format}", shape, count_of(flushes), 1, "", at_most(4))


def adamw(bench: Bench, format: str) -> Iterator[Row]:
    """Stock AdamW(fused=True) on the same weights with fp32 gradients, the flush it ends with
    included, next to the same step of plain fp32 parameters."""

    def step_of(weights):
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        for parameter in parameters:
            parameter.grad = bench.randn(*parameter.shape) / 64
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True).step

    plain = step_of([bench.randn(*shape) / 64 for shape in bench.shards])
    quantized = step_of(shards(bench, format))
    plain_calls, calls = bench.run(plain, quantized, calls=max(2, bench.calls // 2))
    n = sum(rows * cols for rows, cols in bench.shards)
    us, plain_us = time_of(calls), time_of(plain_calls)
    bytes = 28 + IMAGE_BYTES[format] + (4 if format in ONE_SCALE else 0)
    shape = f"{len(bench.shards)} weights, {bytes:.4g} B"
    yield bench.share(f"AdamW + flush {format}", shape, n * bytes, us, at_least(0.85))
    yield bench.share("AdamW, plain fp32", f"{len(bench.shards)} weights, 28 B", n * 28, plain_us)
    yield Row(f"AdamW + flush / plain {format}", shape, us, plain_us, "µs")


def compiled(bench: Bench, dtype, shape) -> Iterator[Row]:
    """torch.compile'd plain code for the same work, as a reference."""
    rows, cols = shape
    fp8, n = torch.float8_e4m3fn, rows * cols

    def quantize(x, *dims):
        scale = 448 / x.abs().amax(dims, keepdim=True).float().clamp(min=1e-12)
        return (x * scale).clamp(-448, 448).to(fp8), scale.reciprocal()

    def cast(x, scale):
        return (x * scale).clamp(-448, 448).to(fp8)

    def cast_transpose(x, scale):
        codes = cast(x, scale)
        return codes, codes.t().contiguous()

    v = dtype.itemsize
    functions = {
        "amax": (v, lambda x, scale: x.abs().amax()),
        "cast": (v + 1, cast),
        "cast + transpose": (v + 2, cast_transpose),
        "128x128": (v + 1, lambda x, scale: quantize(x.view(-1, 128, cols // 128, 128), 1, 3)),
        "1x128": (v + 1, lambda x, scale: quantize(x.view(rows, -1, 128), 2)),
    }
    x, scale = bench.randn(rows, cols, dtype=dtype), bench.randn(()).abs()
    for name, (bytes, function) in functions.items():
        function = torch.compile(function)
        (calls,) = bench.run(lambda: function(x, scale))
        size = f"{rows}x{cols} {dtype_name(dtype)}"
        yield bench.share(f"torch.compile {name}", size, n * bytes, time_of(calls))


def sections(bench: Bench, args) -> Iterator[tuple[str, str, object]]:
    """(section, label, what to measure)."""
    dtypes = (torch.float32, torch.bfloat16)
    for format in args.formats:
        for dtype in dtypes:
            for shape in bench.shapes:
                yield ("weight", f"{format} {dtype_name(dtype)} {shape}",
                       lambda: weight(bench, format, dtype, shape))
    for format in [format for format in args.formats if format in FP8_GEMM]:
        for shape in bench.activations:
            yield "activation", f"{format} {shape}", lambda: activation(bench, format, shape)
            yield "message", f"{format} {shape}", lambda: message(bench, format, shape)
            if format == "float8_blockwise":
                yield "arrived", f"{shape}", lambda: arrived(bench, shape)
        for kind, shape in itertools.product(("RMSNorm", "LayerNorm"), bench.norms):
            yield ("norm_codes", f"{kind} {format} {shape}",
                   lambda: norm_codes(bench, kind, format, shape))
        for shape in bench.swiglus:
            for name in MLPS:
                yield "swiglu", f"{name} {format} {shape}", lambda: swiglu(bench, format, shape, name)
    for shape in bench.heads:
        yield "rotary", f"{shape}", lambda: rotary(bench, shape)
    for kind in ("RMSNorm", "LayerNorm"):
        for shape in bench.norms:
            yield "norm", f"{kind} {shape}", lambda: norm(bench, kind, shape)
    for shape in bench.shapes:
        yield "transpose", f"{shape}", lambda: transpose(bench, shape)
    for format in args.formats:
        yield "flush", format, lambda: flush(bench, format)
        yield "adamw", format, lambda: adamw(bench, format)
    if args.compiled:
        for dtype in dtypes:
            yield "compiled", dtype_name(dtype), lambda: compiled(bench, dtype, bench.shapes[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    unasked = [format for format in IMAGE_BYTES if "[" not in format]
    parser.add_argument("--formats", nargs="+", choices=IMAGE_BYTES, default=unasked)
    parser.add_argument("--only", nargs="+", choices=SECTIONS)
    parser.add_argument("--compiled", action="store_true", help="torch.compile'd code as well")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=240, help="begin nothing new after this")
    parser.add_argument("--tiny", action="store_true", help="small tensors, to try the script")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.tiny:
        bench = Bench(args.device, 2, [(256, 128), (63, 65)], [(64, 128)], [(64, 128)],
                      [(2, 16, 2, 32)], [(64, 128)], [(32, 32), (64, 48)], 1024)
    else:
        bench = Bench(args.device, args.calls, [(8192, 8192), (14336, 4096), (8191, 4097)],
                      [(16384, 4096), (16384, 14336), (8191, 4097)],
                      [(16384, 14336), (8192, 14336), (4097, 4104)],
                      [(4, 4096, 32, 128), (4, 4096, 8, 128), (3, 4001, 17, 72)],
                      [(16384, 4096), (16384, 5120), (8192, 8192), (524288, 128), (8191, 4104)],
                      SHARDS * 32, 1 << 28)
    results = Results("qshard kernels", args.seconds)
    results.add("copy", bench.measure_copy)
    for section, label, measure in sections(bench, args):
        if args.only is None or section in args.only:
            results.add(f"{section} {label}", measure)
    results.save(args.json)
    results.print()


if __name__ == "__main__":
    main()
