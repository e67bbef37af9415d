"""What lies between a model's linears, as models write it and in fewer passes: rotary embeddings of queries
and keys, and the loss, alone and with the head before it.

    python bench/model_edges.py                      # an H200 or H100
    python bench/model_edges.py --device cpu --tokens 64 --calls 1

Device time of forward and backward, µs, kernels alone, median of calls that take turns and find nothing in the
L2 cache. The reference is the time at which a copy of this run moves the bytes that have to be moved: queries,
keys, or logits, read and written once in each direction. That of a head is the time of its three GEMMs in bf16.
A peak counts from the memory in use before the call, and includes the gradients.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from llama_of_modules import turn_complex
from measuring import Results, Row, interleaved, time_of

import qshard

HEADS = (32, 8)  # Llama-8B has 32 heads of queries and 8 of keys
CHANNELS = 128
VOCABULARIES = (32_000, 128_256)
COLUMNS = 4096  # input features of a head


def turn_halves(xq, xk, cos, sin):
    """As transformers writes it; cos and sin (1 or batch, positions, channels)."""

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]

    return turned(xq), turned(xk)


def in_one_pass(xq, xk, cos, sin):
    cos, sin = ((t[0] if len(t) == 1 else t).float() for t in (cos, sin))
    return tuple(qshard.ops.rotary_embedding(x, cos, sin) for x in (xq, xk))


def forward_and_backward(function, leaves, *more):
    """A call of function(*leaves, *more), with gradients of the leaves."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    grads = [torch.ones_like(leaf) for leaf in leaves]

    def run():
        results = function(*leaves, *more)
        if torch.is_tensor(results):  # a loss
            return torch.autograd.grad(results, leaves)
        return torch.autograd.grad(results, leaves, grads)

    return run


def copy_of(x):
    target = torch.empty_like(x)
    return lambda: target.copy_(x)


def rows_of(kind, shape, functions, copied, passes, args):
    """The functions' times beside that of `passes` copies of the tensors."""
    calls = interleaved([*functions.values(), *map(copy_of, copied)], args.device, args.calls)
    floor = passes * sum(map(time_of, calls[len(functions) :]))
    for name, call in zip(functions, calls):
        yield Row(f"{kind}: {name}", shape, time_of(call), floor, "µs")


def rotary(args, of_sequences):
    batch, length = args.sequences, args.tokens // args.sequences
    options = {"device": args.device, "dtype": torch.bfloat16}
    leaves = [torch.randn(batch, length, heads, CHANNELS, **options) for heads in HEADS]
    angles = torch.outer(torch.arange(length), 1e4 ** -torch.arange(0, 1, 2 / CHANNELS))
    angles = angles.float().to(args.device)
    freqs_cis = torch.polar(torch.ones_like(angles), angles)
    both = angles.repeat(1, 2).expand(batch if of_sequences else 1, -1, -1).contiguous()
    tables = both.cos().bfloat16(), both.sin().bfloat16()
    functions = {
        "halves, as written": (turn_halves, *tables),
        "halves, compiled": (torch.compile(turn_halves), *tables),
        "halves, one pass": (in_one_pass, *tables),
    }
    if not of_sequences:
        functions |= {
            "complex, as written": (turn_complex, freqs_cis),
            "complex, compiled": (torch.compile(turn_complex), freqs_cis),
            "complex, one pass": (qshard.nn.apply_rotary_emb, freqs_cis),
            "complex, one pass, compiled": (torch.compile(qshard.nn.apply_rotary_emb), freqs_cis),
        }
    functions = {n: forward_and_backward(f[0], leaves, *f[1:]) for n, f in functions.items()}
    shape = f"{batch}x{length}, {HEADS[0]} + {HEADS[1]} heads of {CHANNELS}"
    kind = "rotary, positions of each sequence" if of_sequences else "rotary"
    return rows_of(kind, shape, functions, leaves, 2, args)


def losses(args, vocabulary):
    logits = torch.randn(args.tokens, vocabulary, device=args.device, dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (args.tokens,), device=args.device)

    def in_float(logits):
        return F.cross_entropy(logits.float(), labels)

    functions = {
        "F.cross_entropy of bf16": lambda logits: F.cross_entropy(logits, labels),
        "F.cross_entropy of .float()": in_float,
        "the same, compiled": torch.compile(in_float),
    }
    if importlib.util.find_spec("liger_kernel") and args.device == "cuda":
        from liger_kernel.transformers.functional import liger_cross_entropy

        # It overwrites the logits by their gradient, so that each call needs a copy: half of the reference.
        functions["Liger-Kernel"] = lambda logits: liger_cross_entropy(logits.clone(), labels)
    peaks = {name: peak_of(f, logits) for name, f in functions.items()}
    runs = {name: forward_and_backward(f, [logits]) for name, f in functions.items()}
    shape = f"{args.tokens} x {vocabulary}"
    yield from rows_of("loss", shape, runs, [logits], 2, args)
    for name, peak in peaks.items():
        yield Row(f"loss: {name}, peak above logits", shape, peak, logits.nbytes / 2**30, "GiB")


def heads(args, vocabulary):
    options = {"device": args.device, "dtype": torch.bfloat16}
    x = torch.randn(args.tokens, COLUMNS, **options)
    weight = torch.randn(vocabulary, COLUMNS, **options) / COLUMNS**0.5
    labels = torch.randint(0, vocabulary, (args.tokens,), device=args.device)

    def plain(x, weight):
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    def in_codes(precision, format=None):
        head = qshard.nn.linear_cross_entropy
        return lambda x, w: head(x, w, labels, format=format, forward_precision=precision)

    def in_fp8(format):
        return lambda x, w: F.cross_entropy(qshard.ops.linear(x, w, format=format).float(), labels)

    functions = {"plain": (plain, weight), "plain, compiled": (torch.compile(plain), weight)}
    for format in ("float8_tensorwise", "float8_blockwise"):
        quantized = qshard.ops.quantize(weight, format, keep_master=True)  # Inductor reads addresses
        functions |= {
            f"{format}, plain loss, compiled": (torch.compile(in_fp8(format)), quantized),
            f"{format}, gradient in codes": (in_codes(None), quantized),
            f"{format}, gradient in codes, plain weight": (in_codes(None, format), weight),
            f"{format}, gradient in codes, plain weight, forward in bf16": (in_codes("bf16", format), weight),
        }
    if importlib.util.find_spec("liger_kernel") and args.device == "cuda":
        from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy

        functions["Liger-Kernel, loss"] = lambda x, w: liger_cross_entropy(F.linear(x, w), labels), weight
        functions["Liger-Kernel, head in chunks"] = (
            lambda x, w: liger_fused_linear_cross_entropy(x, w, labels),
            weight,
        )
    peaks = {name: peak_of(f, x, w) for name, (f, w) in functions.items()}
    runs = {name: forward_and_backward(f, [x, w]) for name, (f, w) in functions.items()}
    gradient = torch.randn(args.tokens, vocabulary, **options)
    gemms = [lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x]
    calls = interleaved([*runs.values(), *gemms], args.device, args.calls)
    floor = sum(map(time_of, calls[len(runs) :]))
    shape = f"{args.tokens} x {COLUMNS} x {vocabulary}"
    for name, call in zip(runs, calls):
        yield Row(f"head: {name}", shape, time_of(call), floor, "µs")
    for name, peak in peaks.items():
        yield Row(f"head: {name}, peak", shape, peak, gradient.nbytes / 2**30, "GiB")


def peak_of(function, *leaves):
    run = forward_and_backward(function, leaves)
    run()
    if not leaves[0].is_cuda:
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=300.0, help="then nothing more is begun")
    parser.add_argument("--json", type=Path, help="writes the rows there")
    args = parser.parse_args()
    results = Results("Edges of a model", args.seconds)
    results.add("rotary", lambda: rotary(args, of_sequences=False))
    results.add("rotary of sequences", lambda: rotary(args, of_sequences=True))
    for vocabulary in VOCABULARIES:
        results.add(f"head of {vocabulary}", lambda v=vocabulary: heads(args, v))
    for vocabulary in VOCABULARIES:
        results.add(f"loss of {vocabulary}", lambda v=vocabulary: losses(args, v))
    results.print()
    results.save(args.json)


if __name__ == "__main__":
    main()
