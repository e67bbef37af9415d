"""One OpInfo with quantized inputs against the same op on dequantize(q). Run by test_op_sweep.py.

    python op_sweep.py LOG FIRST STEP     ops op_db[FIRST::STEP], one JSON line each

A line "begin" is written before each op, so that a reader of LOG knows after a crash which one it
was.
"""

import itertools
import json
import re
import sys
import warnings
from pathlib import Path

import helpers
import torch
from helpers import is_quantized
from torch.testing._internal.opinfo.core import SampleInput, UnaryUfuncInfo
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from qshard._runtime.classes import Process, TensorState

ops = torch.ops.qshard
SAMPLES_PER_OP = 12
SAMPLES_SCANNED = 400  # for some with a tensor of two or more dimensions

# Everything must be equal bit for bit, but for linear algebra: LAPACK's sums depend on the alignment of
# memory and differ between two calls of the plain op (seen for linalg.lstsq and solve_triangular).
LAPACK = re.compile(r"linalg\.|cholesky|lu$|lu_|ormqr|geqrf|pinverse|qr$|svd|pca_|triangular_solve")
LAPACK_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

# Only shapes and dtypes are compared: the values are what the memory held.
UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided"}


def can_be_quantized(value):
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and value.dim() >= 2
        and value.layout == torch.strided
    )


def quantize(value, fmt, **options):
    """A quantized tensor of these values. If the format takes whole blocks of rows only, it is the first rows
    of a larger matrix; with more dimensions these would not be contiguous, as the plain tensor is."""
    if helpers.fit(fmt, value.size(-2)) == value.size(-2):
        return ops.quantize(value, fmt, **options)
    if value.dim() > 2:
        return ops.quantize(value, "mxfp8", **options)
    missing = helpers.fit(fmt, value.size(0)) - value.size(0)
    padded = torch.cat([value, value.new_zeros(missing, value.size(1))])
    return ops.quantize(padded, fmt, **options)[: value.size(0)]


def plain(value):
    """The value of a tensor, pending updates included, and only read through the dispatcher."""
    return TensorState(value.detach()).export_view().clone() if is_quantized(value) else value


def is_differentiable(value):
    return (
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.layout == torch.strided
        and (value.is_floating_point() or value.is_complex())
    )


def image_bytes(q):
    """What must not change when a call fails."""
    q = q.detach()
    return (
        tuple(q.shape),
        q.stride(),
        ops.codes(q).clone().view(torch.uint8),
        ops.scale_inv(q).clone().view(torch.uint8),
    )


def same_bytes(before, after):
    return before[:2] == after[:2] and all(map(torch.equal, before[2:], after[2:]))


def values_equal(actual, expected, tolerance):
    if tolerance:
        return torch.allclose(actual, expected, **tolerance, equal_nan=True)
    actual, expected = (
        torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (actual, expected)
    )
    return torch.equal(actual, expected) or bool(
        ((actual == expected) | (actual.isnan() & expected.isnan())).all()
    )


def difference(actual, expected, tolerance=None):
    """None if equal, else what differs."""
    (actual, _), (expected, _) = tree_flatten(actual), tree_flatten(expected)
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    for a, e in zip(actual, expected):
        if not isinstance(e, torch.Tensor):
            if type(a) is not type(e) or (a != e and a == a):
                return f"{a!r} instead of {e!r}"
            continue
        a = plain(a)
        for what in ("shape", "dtype", "layout", "device"):
            if getattr(a, what) != getattr(e, what):
                return f"{what} {getattr(a, what)} instead of {getattr(e, what)}"
        a, e = (t if t.layout == torch.strided else t.to_dense() for t in (a, e))
        a, e = (t.dequantize() if t.is_quantized else t for t in (a, e))
        if not values_equal(a, e, tolerance):
            a, e = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, e))
            return f"values differ by up to {(a - e).abs().max().item():.3g}"
    return None


class Sweep:
    """All variants of one op."""

    def __init__(self, op, number):
        self.op, self.number = op, number
        self.failures, self.refusals = [], []
        self.calls = {"native": 0, "fallback": 0, "refused": 0, "raises as plain": 0}
        self.tolerance = LAPACK_TOLERANCE if LAPACK.match(op.name) else None
        self.names = {op.name, op.name.split(".")[-1], op.aten_name, *(a.name for a in op.aliases)}

    def fail(self, what, sample, detail):
        self.failures.append(f"{self.op.formatted_name} {what}, sample {sample}: {detail}")

    def run(self):
        for i, (sample, fmt) in enumerate(self.samples()):
            self.function(i, sample, fmt)
            if self.op.inplace_variant is not None:
                self.inplace(i, sample, fmt)
            if self.op.supports_out:
                self.out(i, sample, fmt)
            if self.op.supports_autograd and self.op.name not in UNINITIALISED:
                self.gradient(i, sample, fmt)

    def samples(self):
        torch.manual_seed(0)
        scanned = itertools.islice(self.op.sample_inputs("cpu", torch.float32), SAMPLES_SCANNED)
        usable = (
            s
            for s in scanned
            if any(map(can_be_quantized, tree_flatten((s.input, s.args, s.kwargs))[0]))
            # Embeddings with it write their weight, and look up what quantizing leaves of that.
            and s.kwargs.get("max_norm") is None
        )
        usable = list(itertools.islice(usable, SAMPLES_PER_OP))
        if not usable and isinstance(self.op, UnaryUfuncInfo):
            usable = [SampleInput(torch.rand(5, 7))]
        for i, sample in enumerate(usable):
            yield sample, helpers.FORMATS[(self.number + i) % len(helpers.FORMATS)]

    def quantized(self, sample, fmt, keep_master=False):
        """The sample with quantized tensors, and with their values instead. With `keep_master` the
        first argument keeps one (a product would multiply by codes all the same)."""

        def convert(value, keep_master=False):
            if not can_be_quantized(value):
                return copied(value)
            return quantize(value.detach(), fmt, keep_master=keep_master)

        def copied(value):
            return value.detach().clone() if isinstance(value, torch.Tensor) else value

        rest = tree_map(convert, (tuple(sample.args), dict(sample.kwargs)))
        first = tree_map(lambda v: convert(v, keep_master), sample.input)
        arguments = (first, *rest)
        return arguments, tree_map(lambda v: plain(v) if is_quantized(v) else copied(v), arguments)

    @staticmethod
    def call(function, arguments, **extra):
        first, args, kwargs = arguments
        torch.manual_seed(7)
        try:
            return function(first, *args, **kwargs, **extra), None
        except Exception as error:  # noqa: BLE001: any error that names the op is an answer
            return None, error

    def is_named(self, error):
        """By its own name, or as the operator it decomposes into: aten::… or qshard::…"""
        text = str(error)
        return any(name in text for name in self.names) or re.search(r"\b(aten|qshard)::\w+", text)

    def count_call(self, what, sample, error, expected_error):
        fallbacks = Process.traced_fallbacks(False)
        if error is None:
            self.calls["fallback" if fallbacks else "native"] += 1
        elif expected_error is not None:
            self.calls["raises as plain"] += 1
        else:
            self.calls["refused"] += 1
            self.refusals.append(f"{self.op.formatted_name} {what}: {first_line(error)}")
            if not self.is_named(error):
                self.fail(what, sample, f"error does not name the op: {first_line(error)}")

    def compare_call(self, what, sample, function, arguments, values, **extra):
        """Calls with quantized arguments and with values; returns both results, or None."""
        expected, expected_error = self.call(function, values)
        Process.set_fallback_tracing(True)
        result, error = self.call(function, arguments, **extra)
        self.count_call(what, sample, error, expected_error)
        if error is None and expected_error is not None:
            self.fail(what, sample, f"must raise: {first_line(expected_error)}")
        if error is not None or expected_error is not None:
            return None
        return result, expected

    def function(self, i, sample, fmt):
        arguments, values = self.quantized(sample, fmt)
        results = self.compare_call("function", i, self.op.op, arguments, values)
        if results and self.op.name not in UNINITIALISED:
            detail = difference(*results, self.tolerance)
            if detail:
                self.fail("function", i, detail)
        # Both ways: most ops leave their arguments alone, some write them (embedding's max_norm).
        detail = difference(arguments, values, self.tolerance)
        if detail:
            self.fail("function", i, f"arguments after the call: {detail}")

    def gradient(self, i, sample, fmt):
        """Gradients of the sum of the results, for all quantized arguments."""

        def gradients(arguments, leaves):
            for leaf in leaves:
                leaf.requires_grad_()
            results, error = self.call(self.op.op, arguments)
            results = tree_flatten(results)[0]
            sums = [r.abs().sum() for r in results if is_differentiable(r)]
            if error or not sums:
                return None, error
            return torch.autograd.grad(sum(sums), leaves, allow_unused=True), None

        arguments, values = self.quantized(sample, fmt)
        flat, flat_values = tree_flatten(arguments)[0], tree_flatten(values)[0]
        leaves = [v for q, v in zip(flat, flat_values) if is_quantized(q)]
        with torch.enable_grad():
            expected, expected_error = self.try_call(gradients, values, leaves)
            result, error = self.try_call(gradients, arguments, list(filter(is_quantized, flat)))
        if expected_error is not None or expected is None:
            return
        if error is not None:
            if not self.is_named(error):
                self.fail("gradient", i, f"error does not name the op: {first_line(error)}")
            return
        detail = "no result requires a gradient" if result is None else None
        detail = detail or difference(result, expected, self.tolerance)
        if detail:
            self.fail("gradient", i, detail)

    @staticmethod
    def try_call(function, *args):
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001: see call()
            return None, error

    def inplace(self, i, sample, fmt):
        arguments, values = self.quantized(sample, fmt, keep_master=i % 2 == 1)
        q = arguments[0]
        if not is_quantized(q):
            return
        before = image_bytes(q)
        results = self.compare_call("in place", i, self.op.inplace_variant, arguments, values)
        if results is None:
            if not same_bytes(before, image_bytes(q)):
                self.fail("in place", i, "self was changed by a call that raised")
            return
        result, expected = results
        if result is not q:
            self.fail("in place", i, "the result is not self")
        detail = difference(q, expected, self.tolerance)
        if detail:
            self.fail("in place", i, detail)
        if (tuple(q.shape), q.stride()) != before[:2]:
            return  # squeezed, transposed: nothing was written, and blocks lie as they did
        requantized = ops.dequantize(quantize(expected.contiguous(), fmt))
        detail = difference(ops.dequantize(q), requantized, self.tolerance)
        if detail:
            self.fail("in place", i, f"after requantizing: {detail}")

    def out(self, i, sample, fmt):
        arguments, values = self.quantized(sample, fmt)
        expected, error = self.call(self.op.op, values)
        leaves, structure = tree_flatten(expected)
        if error or not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return
        # What plain tensors get decides: some ops promise out= and refuse it for some arguments, and
        # fft.ihfft2 fills it with garbage for some.
        plain_out = tree_map(torch.zeros_like, expected)
        _, plain_error = self.call(self.op.op, values, out=plain_out)
        if plain_error is None and difference(plain_out, expected, self.tolerance):
            return

        def like(leaf):
            ones = torch.ones_like(leaf)
            return quantize(ones, fmt) if can_be_quantized(leaf) else ones

        kinds = {"plain out=": torch.zeros_like}
        if any(map(can_be_quantized, leaves)):
            kinds["quantized out="] = like
            self.wrong_out(i, arguments, values, fmt, expected)
        for what, make in kinds.items():
            out = tree_unflatten([make(leaf) for leaf in leaves], structure)
            Process.set_fallback_tracing(True)
            result, error = self.call(self.op.op, arguments, out=out)
            self.count_call(what, i, error, plain_error)
            if error is not None or self.op.name in UNINITIALISED:
                continue
            detail = difference(out, expected, self.tolerance)
            if detail:
                self.fail(what, i, detail)
            if isinstance(out, torch.Tensor) and result is not out:
                self.fail(what, i, "the result is not out")

    def wrong_out(self, i, arguments, values, fmt, expected):
        """A quantized out= of another shape must raise and stay as it is."""

        def too_large(leaf):
            shape = [n + 1 for n in leaf.shape] if can_be_quantized(leaf) else leaf.shape
            return torch.ones(shape, dtype=leaf.dtype)

        def quantized(leaf):
            return quantize(leaf, fmt) if can_be_quantized(leaf) else leaf

        what = "quantized out= of a wrong shape"
        plain_out = tree_map(too_large, expected)
        out = tree_map(quantized, plain_out)
        before = [(q, image_bytes(q)) for q in filter(is_quantized, tree_flatten(out)[0])]
        _, error = self.call(self.op.op, arguments, out=out)
        _, plain_error = self.call(self.op.op, values, out=plain_out)
        if error is None:
            self.fail(what, i, "did not raise")
        elif plain_error is None and not self.is_named(error):
            self.fail(what, i, f"not named: {first_line(error)}")
        for q, bytes_before in before:
            if not same_bytes(bytes_before, image_bytes(q)):
                self.fail(what, i, "was changed")


def first_line(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def main(log_path, first, step):
    import library_under_test  # noqa: F401
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with Path(log_path).open("a") as log, torch.no_grad():

        def write(**line):
            print(json.dumps(line), file=log, flush=True)

        for number in range(first, len(op_db), step):
            op = op_db[number]
            write(begin=number, op=op.formatted_name)
            sweep = Sweep(op, number)
            if torch.float32 in op.dtypes:
                sweep.run()
            write(
                end=number,
                op=op.formatted_name,
                calls=sweep.calls,
                failures=sweep.failures,
                refusals=sweep.refusals,
            )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
