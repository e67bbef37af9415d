"""Meta and fake quantized tensors answer as real ones do, or say that they cannot."""

import re

import pytest
import torch
from functorch.compile import aot_function, nop
from helpers import FORMATS, bits, fit, ops, weight
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import qshard
from qshard._runtime.classes import TensorState

ACCESSORS = (
    "codes",
    "scale_inv",
    "tensor_scale_inv",
    "columnwise_codes",
    "columnwise_scale_inv",
    "master",
    "format",
    "is_quantized",
    "dequantize",
)
SHAPES = ((128, 256), (67, 36), (1, 7), (3, 40, 52), (2, 2, 5, 16), (0, 16), (6, 0), (2, 0, 16))
WINDOWS = {
    "whole": lambda t: t,
    "rows": lambda t: t.narrow(t.dim() - 2, 1, t.size(-2) - 1),
    "blocks": lambda t: t[:, 32:] if t.dim() > 2 else t[32:],
    "columns": lambda t: t[..., 4:8],
    "transposed": lambda t: t.mT,
    "detached": lambda t: t.detach(),
    "flat": lambda t: t.reshape(-1),
    "every other": lambda t: t[::2],
}
on_formats = pytest.mark.parametrize("fmt", FORMATS)


def quantized(fmt, shape=(64, 32), keep_master=False):
    shape = (*shape[:-2], fit(fmt, shape[-2]), shape[-1])
    return ops.quantize(weight(*shape), fmt, keep_master=keep_master)


def answer(name, tensor):
    """What an accessor says, without bytes and device."""
    try:
        result = getattr(ops, name)(tensor)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error), re.sub(r"on (cpu|meta)", "on", str(error).splitlines()[0])
    if not isinstance(result, torch.Tensor):
        return result
    offset = result.storage_offset() if result.numel() else None
    return result.shape, result.stride(), result.dtype, offset


def assert_answers_alike(real, fake, window):
    for name in ACCESSORS:
        with unset_fake_temporarily():
            expected = answer(name, window(real))
        assert answer(name, window(fake)) == expected, name


def windows_of(q):
    for name, window in WINDOWS.items():
        try:
            window(q)
        except (IndexError, RuntimeError):
            continue
        yield name, window


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_master", [False, True], ids=["no-master", "master"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_formats
def test_fakes_have_the_geometry_of_quantized_tensors(fmt, shape, keep_master):
    q = quantized(fmt, shape, keep_master)
    values = torch.empty(q.shape, device="meta")
    metas = (ops.quantize(values, fmt, keep_master=keep_master), TensorState(q).meta_replica())
    for _, window in windows_of(q):
        for meta in metas[:1] if q.dim() > 2 else metas:
            assert_answers_alike(q, meta, window)
        with FakeTensorMode() as mode:
            assert_answers_alike(q, mode.from_tensor(q), window)
            assert_answers_alike(q, mode.from_tensor(metas[0]), window)
            # Made while tracing, too.
            fake = ops.quantize(mode.from_tensor(weight(*q.shape)), fmt, keep_master=keep_master)
            assert_answers_alike(q, fake, window)


@on_formats
def test_real_views_and_parameters_as_fakes(fmt):
    q = quantized(fmt, (128, 48), keep_master=True)
    reals = torch.nn.Parameter(q), q[32:64], q.detach()
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        for real in reals:
            assert_answers_alike(real, mode.from_tensor(real), lambda t: t)


@on_formats
def test_fakes_of_shards_answer_alike(fmt):
    """A rank's rows of a larger tensor that await a flush: fakes answer all the same."""
    q = ops.quantize(weight(64, 48), fmt, logical_rows=256, row_offset=32)
    flushed = TensorState(q).meta_replica()
    assert TensorState(q).pack()[2][:6] == TensorState(flushed).pack()[2][:6]
    written = TensorState(q).has_pending_update()
    with FakeTensorMode() as mode:
        assert_answers_alike(flushed, mode.from_tensor(q), lambda t: t[32:])
    assert TensorState(q).has_pending_update() == written


# ------------------------------------------------------------------------------ what is unknown


@pytest.mark.parametrize("name", ACCESSORS[:-1])
def test_results_of_traced_operators_say_that_they_do_not_know(name):
    q = quantized("nvfp4")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        for result in (fake.clone(), fake + 1, torch.empty_like(fake)):
            for op in (getattr(ops, name), ops.is_quantized):
                with pytest.raises(RuntimeError, match=f"{op.default.name()}: a fake tensor"):
                    op(result)
            with pytest.raises(RuntimeError, match="qshard::_plane_copy: a fake tensor"):
                ops._plane_copy(result, "codes")


def test_plain_fakes_are_plain():
    plain, sparse = weight(4, 16), torch.eye(3).to_sparse()
    with FakeTensorMode() as mode:
        assert not ops.is_quantized(mode.from_tensor(sparse))
        fake = mode.from_tensor(plain)
        assert not ops.is_quantized(fake) and not ops.is_quantized(fake[1:])
        assert not qshard.is_quantized(fake)
        for name in ACCESSORS[:-2]:
            with pytest.raises(TypeError, match=f"{name}: expected a quantized tensor"):
                getattr(ops, name)(fake)
    for name in ACCESSORS[:-2]:
        with pytest.raises(TypeError, match=f"{name}: expected a quantized tensor"):
            getattr(ops, name)(torch.empty(4, 16, device="meta"))
    assert not ops.is_quantized(torch.empty(4, 16, device="meta"))


def test_a_fake_outlives_its_tensor():
    q = quantized("mxfp8")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert qshard.is_quantized(fake)
        del q
        with pytest.raises(RuntimeError, match="qshard::codes: a fake tensor"):
            ops.codes(fake)


def test_wrong_arguments_are_errors_while_tracing():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(weight(8, 16))
        with pytest.raises(ValueError, match="qshard::quantize: .*float9"):
            ops.quantize(fake, "float9")
        with pytest.raises(ValueError, match="do not lie within"):
            ops.quantize(fake, "mxfp8", logical_rows=8, row_offset=4)
        with pytest.raises(RuntimeError, match="does not fit a weight"):
            ops.linear(fake, mode.from_tensor(quantized("mxfp8", (8, 32))))


# ----------------------------------------------------------------------------------- compilers


def look_inside(q):
    return ops.codes(q).view(torch.uint8).float().sum() + ops.scale_inv(q).float().sum()


def describe(q):
    kind = ops.format(q) if ops.is_quantized(q) else "plain"
    return kind, ops.codes(q).shape, ops.codes(q).dtype


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_compiled_function_serves_every_format(backend):
    """Compiled code is not guarded on formats: what depends on them runs outside the graph."""
    torch._dynamo.reset()
    compiled = [torch.compile(f, backend=backend) for f in (look_inside, describe)]
    for fmt in FORMATS:
        q = quantized(fmt)
        assert torch.equal(compiled[0](q), look_inside(q))
        assert compiled[1](q) == describe(q)


def test_fullgraph_names_the_operator():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="qshard.codes.default"):
        torch.compile(look_inside, backend="eager", fullgraph=True)(quantized("mxfp8"))


def test_is_quantized_in_compiled_code():
    torch._dynamo.reset()
    for ask in (qshard.is_quantized, ops.is_quantized):
        compiled = torch.compile(lambda t: t * (2 if ask(t) else 3), backend="eager")
        for tensor, factor in ((quantized("mxfp8"), 2), (weight(64, 32), 3)):
            assert torch.equal(compiled(tensor), tensor * factor)


@on_formats
def test_graphs_have_the_same_bytes(fmt):
    q = quantized(fmt, (64, 36), keep_master=True)

    def function(q):
        return ops.codes(q), ops.scale_inv(q), ops.master(q), len(ops.format(q))

    expected = function(q)
    for traced in (make_fx(function)(q), aot_function(function, nop)):
        for actual, real in zip(traced(q), expected):
            if isinstance(real, torch.Tensor):
                assert actual.dtype == real.dtype and actual.stride() == real.stride()
                assert torch.equal(bits(actual), bits(real))
            else:
                assert actual == real


def test_a_write_into_codes_is_refused_while_tracing():
    def function(q):
        ops.scale_inv(q).mul_(2)
        return ops.dequantize(q)

    with pytest.raises(RuntimeError, match="cannot mutate tensors with frozen storage"):
        aot_function(function, nop)(quantized("float8_blockwise"))


# --------------------------------------------------------------------------------- empty sizes


@pytest.mark.pairwise
@pytest.mark.parametrize("m, n, k", [(4, 32, 0), (0, 32, 16), (4, 0, 16), (0, 0, 0)])
@pytest.mark.parametrize("leading", [(), (3,)], ids=["2-D", "3-D"])
@on_formats
def test_linear_of_empty_sizes(fmt, leading, m, n, k):
    def run(x, w, bias, grad, sum):
        inputs = ops.quantize_input(x, fmt.replace("delayed", "tensorwise"), False, False)
        forward = ops.linear_forward(x, w, bias, False)
        backward = ops.linear_backward(grad, w, x, False, True, True)
        added = ops.linear_backward_accumulate(grad, w, x, False, True, sum)
        leaves = [t.requires_grad_() for t in (x, w, bias)]
        y = ops.linear(*leaves)
        y.backward(grad)
        return y, *(t.grad for t in leaves), *inputs, *forward, *backward, added

    def geometry(results):
        return [(tuple(t.shape), t.dtype) for t in results]

    shapes = (*leading, m, k), (n, k), (n,), (*leading, m, n), (n, k)

    def arguments(device="cpu"):
        x, w, *others = (torch.ones(shape, device=device) for shape in shapes)
        return x, ops.quantize(w, fmt), *others

    real = run(*arguments())
    x, w, bias, grad, _ = (torch.ones(shape) for shape in shapes)
    assert torch.equal(real[0], torch.nn.functional.linear(x, w, bias))
    assert torch.equal(real[3], grad.sum(dim=tuple(range(grad.dim() - 1))))
    assert geometry(run(*arguments("meta"))) == geometry(real)
    reals = arguments()
    with FakeTensorMode() as mode:
        assert geometry(run(*map(mode.from_tensor, reals))) == geometry(real)


def test_linear_on_meta_without_features_saves_nothing():
    x, w = torch.empty(4, 0, device="meta"), torch.empty(8, 0, device="meta")
    output, saved = ops.linear_forward(x, w, None, True)
    assert output.shape == (4, 8) and saved.dim() == 1
    for op, args in (
        (ops.linear, (torch.empty((), device="meta"), w)),
        (ops.linear_backward, (torch.empty((), device="meta"), w, x, False, True, True)),
        (ops.quantize_input, (torch.empty((), device="meta"), "mxfp8", True, True)),
    ):
        with pytest.raises(RuntimeError, match="1 or more dimensions"):
            op(*args)
