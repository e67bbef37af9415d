"""Views: every view of a quantized tensor is the same view of its value, to read and to write."""

import random

import pytest
import torch
from helpers import (
    FORMATS,
    assert_same,
    assert_unchanged,
    code_cols,
    fit,
    is_quantized,
    ops,
    quantized_alike,
    rounded,
    scale_shape,
    state,
    value,
    weight,
)


def random_view(rng, tensor):
    """A view op with arguments that suit `tensor`, as (name, function)."""
    dims = tensor.dim()
    dim = rng.randrange(dims)
    size = tensor.size(dim)
    start = rng.randrange(size)
    length = rng.randint(1, size - start)
    other = rng.randrange(dims)
    order = rng.sample(range(dims), dims)
    step = rng.randint(1, 3)
    parts = rng.randint(1, size)
    choices = [
        ("narrow", lambda t: t.narrow(dim, start, length)),
        ("slice", lambda t: t[(slice(None),) * dim + (slice(start, start + length, step),)]),
        ("transpose", lambda t: t.transpose(dim, other)),
        ("permute", lambda t: t.permute(order)),
        ("unsqueeze", lambda t: t.unsqueeze(dim)),
        ("squeeze", lambda t: t.squeeze()),
        ("chunk", lambda t: t.chunk(parts, dim)[-1]),
        ("split", lambda t: t.split(length, dim)[0]),
        ("tensor_split", lambda t: t.tensor_split(parts, dim)[parts // 2]),
        ("unbind", lambda t: t.unbind(dim)[start]),
        ("select", lambda t: t.select(dim, start - size)),
        ("movedim", lambda t: t.movedim(dim, other)),
        ("detach", lambda t: t.detach()),
        ("view_as", lambda t: t.view_as(t)),
        ("flatten", lambda t: t.view(-1)),
        ("unflatten", lambda t: t.unflatten(dim, (1, size))),
        ("T", lambda t: t.mT if dims >= 2 else t),
        ("as_strided", lambda t: t.as_strided(t.shape, t.stride(), t.storage_offset())),
        ("diagonal", lambda t: t.diagonal() if dims >= 2 else t),
        ("unfold", lambda t: t.unfold(dim, length, step)),
        ("expand", lambda t: t.unsqueeze(0).expand(2, *t.shape)),
    ]
    return rng.choice(choices)


WRITES = {
    "mul_": lambda t: t.mul_(1.5),
    "add_": lambda t: t.add_(torch.arange(t.numel(), dtype=t.dtype).view(t.shape)),
    "fill_": lambda t: t.fill_(3.25),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.linspace(-9, 9, t.numel()).view(t.shape)),
    "normal_": lambda t: t.normal_(generator=torch.Generator().manual_seed(1)),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, -7.0),
    "setitem": lambda t: t.__setitem__(..., 2.0),
    "clamp_": lambda t: t.clamp_(-0.5, 0.5),
    "out=": lambda t: torch.neg(t.clone(), out=t),
    "_foreach_add_": lambda t: torch._foreach_add_([t], 0.125),
}


def attempt(function, tensor):
    try:
        return function(tensor), None
    except (RuntimeError, IndexError) as error:
        return None, error


@pytest.mark.parametrize("shape", [(33, 20), (3, 17, 24), (2, 2, 5, 16), (300, 130)], ids=str)
@pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_random_view_chains(fmt, keep_master, shape):
    rng = random.Random(f"{fmt} {keep_master} {shape}")
    shape = (*shape[:-2], fit(fmt, shape[-2]), shape[-1])
    for _ in range(60):
        q = ops.quantize(weight(*shape, seed=rng.randrange(99)), fmt, keep_master=keep_master)
        twin = value(q)
        view, twin_view, names = q, twin, []
        for _ in range(rng.randint(1, 5)):
            if twin_view.dim() == 0:
                break
            name, function = random_view(rng, twin_view)
            plain_result, plain_error = attempt(function, twin_view)
            result, error = attempt(function, view)
            names.append(name)
            assert (error is None) == (plain_error is None), (names, error, plain_error)
            if error is not None:
                continue
            view, twin_view = result, plain_result
            assert is_quantized(view), names
            for geometry in ("shape", "stride", "storage_offset"):
                actual, expected = (getattr(t, geometry) for t in (view, twin_view))
                assert actual == expected if geometry == "shape" else actual() == expected(), names
            assert_same(view, twin_view)

        if "unfold" in names:
            continue  # windows that overlap: what a write leaves depends on the order of the threads
        name, write = rng.choice(list(WRITES.items()))
        names.append(name)
        _, plain_error = attempt(write, twin_view)
        before = state(q)
        _, error = attempt(write, view)
        # A plain tensor refuses to write through an expanded view; so must we, and leave it alone.
        assert (error is None) == (plain_error is None), (names, error, plain_error)
        if error is not None:
            assert_unchanged(q, before)
            continue
        assert_same(q, twin)
        assert_same(ops.dequantize(q), ops.dequantize(quantized_alike(twin, q)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_writes_through_two_views_of_one_tensor(fmt):
    q = ops.quantize(weight(fit(fmt, 200), 150), fmt)
    twin = value(q)
    for t in (q, twin):
        torch._foreach_mul_([t[:77], t[77:].t()], [3.0, 0.25])
        t[5].copy_(t[6])
        t[:, 3] = 1.0
    assert_same(q, twin)
    assert_same(ops.dequantize(q), rounded(twin, fmt))


@pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
def test_strided_copies_count_elements(keep_master):
    """as_strided_copy and as_strided_scatter with a storage_offset of their own."""
    base = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=keep_master)
    twin = value(base)
    for rows in (slice(0, 20), slice(7, 15)):
        q, t = base[rows], twin[rows]
        for size, stride, offset in [
            ((3, 4), (32, 1), 0),
            ((5,), (33,), 70),
            ((2, 2), (1, 32), 128),
        ]:
            assert_same(
                torch.as_strided_copy(q, size, stride, offset),
                torch.as_strided_copy(t, size, stride, offset),
            )
            if rows.stop == 20:  # the stock op refuses what lies outside of a window
                source = torch.full(size, 9.0)
                assert_same(
                    torch.as_strided_scatter(q, source, size, stride, offset),
                    torch.as_strided_scatter(t, source, size, stride, offset),
                )
    assert_same(torch.slice_copy(base, 1, 3, 30, 2), torch.slice_copy(twin, 1, 3, 30, 2))
    assert_same(
        torch.select_scatter(base, torch.ones(32), 0, 4), twin.select_scatter(torch.ones(32), 0, 4)
    )
    assert_same(value(base), twin)


INPLACE_VIEWS = {
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "swapdims_": lambda t: t.swapdims_(0, 1),
    "squeeze_": lambda t: t.squeeze_(),
    "squeeze_.dim": lambda t: t.squeeze_(0),
    "squeeze_.dims": lambda t: torch.ops.aten.squeeze_.dims(t, [0]),
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "as_strided_": lambda t: t.as_strided_((3, 5), (30, 2), 31),
    "detach_": lambda t: t.detach_(),
}


@pytest.mark.parametrize("name", INPLACE_VIEWS)
@pytest.mark.parametrize("rows", [1, 12])
def test_inplace_views_write_the_tensor(name, rows):
    q = ops.quantize(weight(rows + 1, 30), "float8_blockwise")
    q, twin = q[:rows], value(q)[:rows]
    function = INPLACE_VIEWS[name]
    _, plain_error = attempt(function, twin)
    result, error = attempt(function, q)
    if plain_error is not None:
        assert error is not None
        return
    assert error is None and result is q
    assert q.shape == twin.shape and q.stride() == twin.stride()
    assert_same(q, twin)
    q.mul_(2)
    assert_same(q, twin * 2)


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_have_scales_of_their_own(fmt):
    """(E, N, K): one matrix and one set of scales per expert."""
    rows = fit(fmt, 140)
    values = weight(3, rows, 130)
    q = ops.quantize(values, fmt)
    blocks = scale_shape(fmt, rows, 130)
    assert q.shape == (3, rows, 130)
    assert ops.codes(q).shape == (3, rows, code_cols(fmt, 130)) and ops.scale_inv(q).shape == (3, *blocks)
    for e in range(3):
        one = ops.quantize(values[e], fmt)
        assert_same(q[e], ops.dequantize(one))
        assert torch.equal(ops.codes(q)[e].float(), ops.codes(one).float())
        assert torch.equal(ops.codes(q[e]).float(), ops.codes(one).float())
        assert torch.equal(ops.scale_inv(q)[e].float(), ops.scale_inv(one).float())
        assert torch.equal(ops.scale_inv(q[e]).float(), ops.scale_inv(one).float())
        x = weight(4, 130, seed=e)
        assert_same(torch.nn.functional.linear(x, q[e]), torch.nn.functional.linear(x, one))
    x = weight(3, 4, 130)
    assert_same(torch.bmm(x, q.mT), torch.bmm(x, ops.dequantize(q).mT))
    assert ops.scale_inv(q[1:]).shape == (2, *blocks)

    q[1].mul_(64.0)  # one expert's scales move, the others stay
    expected = torch.stack([rounded(v, fmt) for v in values])
    expected[1] *= 64
    assert_same(ops.dequantize(q), expected)


def test_codes_of_windows():
    q = ops.quantize(weight(260, 200), "float8_blockwise")
    codes = ops.codes(q).view(torch.uint8)
    assert codes.stride() == (208, 1)
    for window in (
        lambda t: t[3:77],
        lambda t: t[:, 5:9],
        lambda t: t[130],
        lambda t: t.t(),
        lambda t: t[::2],
        lambda t: t.view(2, 130, 200),
    ):
        assert torch.equal(ops.codes(window(q)).view(torch.uint8), window(codes))
    assert torch.equal(ops.scale_inv(q[100:130]), ops.scale_inv(q)[:2])
    assert torch.equal(ops.scale_inv(q[128:200]), ops.scale_inv(q)[1:2])
