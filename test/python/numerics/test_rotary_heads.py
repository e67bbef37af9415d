"""split_rotary_embedding and join_rotary_embedding: the bits of rotary_embedding and of parts' copies, on every
device and for every layout, their gradients, and the attention that uses them."""

import copy
import itertools

import pytest
import torch
from nn_helpers import assert_bits, randomize
from test_rotary import DEVICES, DTYPES, layouts, tables

import qshard
from qshard.nn.rotary import rotate, split_and_rotate, split_heads

ops = torch.ops.qshard
# ((., .), groups, heads of each, channels, rotated channels): of one group and of more; vectors of both halves, of
# one value, a part of the channels, none; nothing.
CASES = [
    ((2, 17), 1, [4, 2, 2], 128, 128),
    ((2, 17), 2, [2, 1, 1], 64, 64),
    ((3, 5), 3, [1, 2, 3], 96, 48),
    ((2, 7), 2, [3, 1, 1], 18, 10),
    ((2, 3), 1, [2, 1, 1], 8, 0),
    ((1, 1), 1, [1, 1, 1], 2, 2),
    ((2, 0), 2, [2, 1, 1], 16, 16),
]


def apart(x, cos, sin, heads, dim, interleaved):
    """By rotary_embedding, which takes a part."""
    query, key, value = split_heads(x, heads)
    query, key = (ops.rotary_embedding(t, cos, sin, dim, interleaved=interleaved) for t in (query, key))
    return query, key, value.contiguous()


def cases(device):
    torch.manual_seed(0)
    for (sizes, groups, heads, channels, rotated), dtype, dim in itertools.product(CASES, DTYPES, (0, 1)):
        x = torch.randn(*sizes, groups * sum(heads), channels).to(device, dtype)
        yield x, tables(sizes[dim], rotated, device), heads, dim


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_those_of_the_parts(device, interleaved):
    for x, of, heads, dim in cases(device):
        expected = apart(x.cpu(), *(t.cpu() for t in of), heads, dim, interleaved)
        for i, given in enumerate(layouts(x)):
            parts = ops.split_rotary_embedding(given, *of, heads, dim, interleaved=interleaved)
            for got, part in zip(parts, expected, strict=True):
                assert torch.equal(got.cpu(), part), (x.shape, heads, x.dtype, dim, i)
                assert got.is_contiguous() and got.dtype == x.dtype


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_the_parts(device, interleaved):
    for start, of, heads, dim in cases(device):
        x = start.requires_grad_()
        expected = apart(x, *of, heads, dim, interleaved)
        grads = [torch.randn_like(part) for part in expected]
        (wanted,) = torch.autograd.grad(expected, x, grads)
        for laid_out in zip(*map(layouts, grads)):
            parts = ops.split_rotary_embedding(x, *of, heads, dim, interleaved=interleaved)
            (got,) = torch.autograd.grad(parts, x, laid_out)
            assert torch.equal(got, wanted), (x.shape, heads, x.dtype, dim)
            assert got.is_contiguous()
        if x.numel():  # a part that nothing came from has a gradient of zeros
            parts = ops.split_rotary_embedding(x, *of, heads, dim, interleaved=interleaved)
            (got,) = torch.autograd.grad(parts[2], x, grads[2])
            query, key, value = split_heads(got, heads)
            assert not query.any() and not key.any() and torch.equal(value, grads[2])


def test_join_is_the_inverse_and_both_are_differentiable_twice():
    x = torch.randn(2, 5, 8, 16, dtype=torch.float32, requires_grad=True)
    angles = torch.rand(5, 8).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    parts = ops.split_rotary_embedding(x, cos, sin, [2, 1, 1])
    back = ops.join_rotary_embedding(*parts, cos, sin, [2, 1, 1], inverse=True)
    torch.testing.assert_close(back, x)
    (through,) = torch.autograd.grad(back.square().sum() / 2, x, retain_graph=True)
    torch.testing.assert_close(through, x)
    grads = [torch.randn_like(part, requires_grad=True) for part in parts]
    (first,) = torch.autograd.grad(parts, x, grads, create_graph=True)
    second = torch.autograd.grad(first.square().sum() / 2, grads)
    torch.testing.assert_close(second, tuple(grads))


def test_what_does_not_fit_is_named():
    x, (cos, sin) = torch.randn(2, 5, 8, 16), tables(5, 16)
    heads = [2, 1, 1]
    for name, arguments in {
        "dtype": (x.double(), cos, sin, heads),
        "positions": (x, cos[:4].contiguous(), sin[:4].contiguous(), heads),
        "no groups": (x, cos, sin, [3, 1, 1]),
        "two of them": (x, cos, sin, [3, 1]),
        "none of one": (x, cos, sin, [2, 2, 0]),
        "positions are heads": (x, cos, sin, heads, 2),
        "quantized": (ops.quantize(x, "float8_blockwise"), cos, sin, heads),
    }.items():
        with pytest.raises((RuntimeError, NotImplementedError), match="split_rotary_embedding: "):
            ops.split_rotary_embedding(*arguments)
            pytest.fail(name)
    query, key, value = ops.split_rotary_embedding(x, cos, sin, heads)
    for name, parts in {
        "heads": (query, query, value),
        "dtype": (query, key, value.half()),
        "positions": (query, key, value[:, :4]),
        "dimensions": (query, key, value[0]),
        "no group": (query[:, :, :3], key, value),
    }.items():
        with pytest.raises(RuntimeError, match="join_rotary_embedding: "):
            ops.join_rotary_embedding(*parts, cos, sin, heads)
            pytest.fail(name)
    with pytest.raises(RuntimeError, match="cos and sin have no gradients"):
        ops.split_rotary_embedding(x, cos.requires_grad_(), sin, heads)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_transformed_code(device):
    x = torch.randn(2, 5, 8, 16, device=device, requires_grad=True)
    cos, sin = (t[:5].contiguous() for t in tables(5, 16, device))
    expected = split_and_rotate(x, cos, sin, [2, 1, 1], 1)
    compiled = torch.compile(split_and_rotate, backend="aot_eager", fullgraph=True)
    got = compiled(x, cos, sin, [2, 1, 1], 1)
    torch.testing.assert_close(got, expected)
    assert device == "cpu" or all(map(torch.equal, got, expected))
    grads = [torch.randn_like(part) for part in expected]
    torch.testing.assert_close(torch.autograd.grad(got, x, grads), torch.autograd.grad(expected, x, grads))

    def mapped(part):
        return torch.cat(split_and_rotate(part, cos, sin, [2, 1, 1], 1), 2)

    both = torch.stack([x, 2 * x]).detach()
    torch.testing.assert_close(torch.func.vmap(mapped)(both)[0], torch.cat(expected, 2))
    meta = split_and_rotate(x.to("meta"), cos.to("meta"), sin.to("meta"), [2, 1, 1], 1)
    assert [part.shape for part in meta] == [part.shape for part in expected]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["sbhd", "bshd"])
@pytest.mark.parametrize("norm", [None, "before", "after"])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_attention_of_one_weight_and_of_three(device, format, norm, is_interleaved, monkeypatch):
    """Bits of outputs and gradients are those of queries, keys and values that are rotated apart, and where
    nothing stands between, one operator rotates them."""
    layer = qshard.nn.MultiheadAttention(
        64, 4, num_gqa_groups=2, attention_dropout=0.0, fuse_qkv_params=True, qkv_format=format,
        qkv_weight_interleaved=is_interleaved, qk_norm_type=norm and "RMSNorm",
        qk_norm_before_rope=norm == "before", attn_mask_type="causal", device=device,
    )  # fmt: skip
    randomize(layer)
    other = copy.deepcopy(layer)
    angles = qshard.nn.RotaryPositionEmbedding(16, device=device)(7)
    calls = []

    def run(model):
        x = torch.randn(7, 7, 64, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        y = model(x, rotary_pos_emb=angles)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        return y, x.grad, {n: p.grad for n, p in model.named_parameters()}

    def noted(*args, **kwargs):
        calls.append(args)
        return qshard.ops.split_rotary_embedding(*args, **kwargs)

    class Noted:
        split_rotary_embedding = staticmethod(noted)
        rotary_embedding = staticmethod(qshard.ops.rotary_embedding)

    monkeypatch.setattr("qshard.nn.rotary.ops", Noted)
    got = run(layer)
    assert len(calls) == (0 if norm == "before" else 1)

    def rotated_apart(x, cos, sin, heads, dim, interleaved=False):
        query, key, value = split_heads(x, heads)
        return *(rotate(t, cos, sin, dim, interleaved) for t in (query, key)), value.contiguous()

    monkeypatch.setattr("qshard.nn.multihead_attention.split_and_rotate", rotated_apart)
    assert_bits(got, run(other))
