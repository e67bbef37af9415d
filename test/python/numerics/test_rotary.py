"""qshard::rotary_embedding: the bits of its formula in torch's operators, on every device and for every
layout, its gradients, and the modules that use it."""

import itertools

import pytest
import torch

import qshard
from qshard.nn.rotary import rotate

ops = torch.ops.qshard
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (sizes, rotated channels): vectors of both halves, of one value, a part of the channels, none.
SIZES = [
    ((2, 17, 4, 128), 128),
    ((1, 300, 8, 64), 64),
    ((3, 5, 2, 96), 48),
    ((2, 7, 3, 36), 36),
    ((2, 7, 3, 18), 10),
    ((2, 3, 1, 8), 0),
    ((1, 1, 1, 2), 2),
    ((2, 0, 3, 16), 16),
    ((2, 9, 3, 1024), 1024),
]


def formula(x, cos, sin, dim, interleaved):
    """In float32, as qshard.nn computed it before."""
    others = [i for i in range(3) if i != dim]
    if cos.dim() == 3:  # each sequence has a table of its own
        cos, sin = (t.transpose(0, 1) if dim == 0 else t for t in (cos, sin))
        others.remove(1 if dim == 0 else 0)
    cos, sin = (t.narrow(-2 if dim else 0, 0, x.shape[dim]) for t in (cos, sin))
    for i in others:
        cos, sin = cos.unsqueeze(i), sin.unsqueeze(i)
    rotated, kept = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack([-rotated[..., 1::2], rotated[..., ::2]], -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    return torch.cat([(rotated * cos + turned * sin).to(x.dtype), kept], -1)


def tables(positions, rotated, device="cpu"):
    """Angles of their own for both channels of a pair."""
    generator = torch.Generator().manual_seed(positions + rotated)
    angles = torch.rand(positions + 2, rotated, generator=generator) * 40 - 20
    return angles.cos().to(device), angles.sin().to(device)


def tables_of(sizes, rotated, dim, of_sequences, device="cpu"):
    """One table, or one of each sequence."""
    if not of_sequences:
        return tables(sizes[dim], rotated, device)
    sequences = sizes[1 if dim == 0 else 0]
    cos, sin = tables(sequences * (sizes[dim] + 2), rotated, device)
    shape = (sequences, sizes[dim] + 2, rotated)
    return tuple(t[: shape[0] * shape[1]].view(shape) for t in (cos, sin))


def layouts(x):
    """x in several memory layouts."""
    yield x
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([x, x], -1)
    yield wide[..., x.shape[-1] :]
    yield torch.stack([x, x], -1)[..., 0]
    yield torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)  # begins at an odd address


of_sequences = pytest.mark.parametrize("of_sequences", [False, True], ids=["one table", "tables"])


@of_sequences
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_the_formulas(device, interleaved, of_sequences):
    torch.manual_seed(0)
    for (sizes, rotated), dtype, dim in itertools.product(SIZES, DTYPES, range(3)):
        x = torch.randn(sizes).to(dtype)
        cos, sin = tables_of(sizes, rotated, dim, of_sequences)
        expected = formula(x, cos, sin, dim, interleaved)
        for i, given in enumerate(layouts(x.to(device))):
            y = ops.rotary_embedding(given, cos.to(device), sin.to(device), dim, interleaved=interleaved)
            assert torch.equal(y.cpu(), expected), (sizes, dtype, dim, i)
            assert y.dtype == dtype and (i > 2 or y.stride() == given.stride() or y.numel() < 2)


@of_sequences
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_formulas(device, interleaved, of_sequences):
    torch.manual_seed(1)
    for (sizes, rotated), dtype, dim in itertools.product(SIZES, DTYPES, range(3)):
        cos, sin = tables_of(sizes, rotated, dim, of_sequences, device)
        for i, start in enumerate(layouts(torch.randn(sizes).to(device, dtype))):
            x = start.detach().requires_grad_()
            grad = torch.randn(sizes).to(device, dtype)
            (got,) = torch.autograd.grad(
                ops.rotary_embedding(x, cos, sin, dim, interleaved=interleaved), x, grad
            )
            wide = x.detach().float().requires_grad_()
            (expected,) = torch.autograd.grad(formula(wide, cos, sin, dim, interleaved), wide, grad.float())
            assert torch.equal(got, expected.to(dtype)), (sizes, dtype, dim, i)
            if i < 3 and got.numel() > 1:  # as the linear's output lies
                assert got.stride() == x.stride()


def test_double_backward_and_inverse():
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    angles = torch.rand(5, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    y = ops.rotary_embedding(x, cos, sin)
    torch.testing.assert_close(ops.rotary_embedding(y, cos, sin, inverse=True), x)
    grad = torch.randn_like(x, requires_grad=True)
    (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum() / 2, grad)
    torch.testing.assert_close(second, grad)


def test_special_values_stay_in_their_pairs():
    x = torch.randn(1, 4, 1, 8)
    x[0, 1, 0, 2], x[0, 2, 0, 0], x[0, 3] = float("nan"), float("inf"), 0.0
    cos, sin = tables(4, 8)
    for device in DEVICES:
        y = ops.rotary_embedding(x.to(device), cos.to(device), sin.to(device)).cpu()
        assert torch.equal(y.isnan(), formula(x, cos, sin, 1, False).isnan())
        assert y[0, 1, 0, [2, 6]].isnan().all() and not y[0, 3].any()


def test_what_does_not_fit_is_named():
    x, (cos, sin) = torch.randn(2, 5, 3, 8), tables(5, 8)
    wrong = {
        "dimensions": (x[0], cos, sin),
        "dtype": (x.double(), cos, sin),
        "position": (x, cos[:4].contiguous(), sin[:4].contiguous()),
        "channels": (x, *tables(5, 10)),
        "odd": (x, *tables(5, 7)),
        "tables in bf16": (x, cos.bfloat16(), sin),
        "tables of other sizes": (x, cos, sin[:5].contiguous()),
        "dim": (x, cos, sin, 3),
        "quantized": (ops.quantize(x, "float8_blockwise"), cos, sin),
    }
    for name, arguments in wrong.items():
        with pytest.raises((RuntimeError, NotImplementedError), match="rotary_embedding: needs a float32"):
            ops.rotary_embedding(*arguments)
            pytest.fail(name)
    with pytest.raises(RuntimeError, match="cos and sin have no gradients"):
        ops.rotary_embedding(x.requires_grad_(), cos.requires_grad_(), sin)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_transformed_code(device):
    """By torch's operators; code compiled for CUDA by ours, to the same bits."""
    x = torch.randn(2, 5, 3, 8, device=device)
    cos, sin = (t[:5].contiguous().to(device) for t in tables(5, 8))
    expected = rotate(x, cos, sin, 1)
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    got = compiled(x, cos, sin, 1)
    torch.testing.assert_close(got, expected)
    assert device == "cpu" or torch.equal(got, expected)
    mapped = torch.func.vmap(lambda part: rotate(part, cos, sin, 1))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(mapped, torch.stack([expected, 2 * expected]))
    assert rotate(x.to("meta"), cos.to("meta"), sin.to("meta"), 1).shape == x.shape


class Rope(torch.nn.Module):
    def forward(self, x, cos, sin):
        first, second = x.float().chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (x.float() * cos + turned * sin).to(x.dtype)


qshard.fuse.register(Rope, qshard.fuse.Rotary(keeps_dtype=True))


class Promotes(torch.nn.Module):
    """The same formula, whose result has the tables' dtype if that is wider."""

    def forward(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


qshard.fuse.register(Promotes, qshard.fuse.Rotary())


class Other(torch.nn.Module):
    def forward(self, x, cos, sin):
        return x * cos + sin


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rope, self.other = Rope(), Other()

    def forward(self, x, cos, sin):
        return self.other(self.rope(x, cos, sin), cos, sin)


def test_fused_rotary_modules_compute_the_same():
    torch.manual_seed(2)
    model = Attention()
    angles = torch.rand(5, 8).repeat(1, 2)
    x = torch.randn(2, 3, 5, 16, dtype=torch.bfloat16)
    odd = torch.randn(3, 5, 16)  # of three dimensions: the module's own forward
    expected = [model(t, angles.cos(), angles.sin()) for t in (x, odd)]
    assert [(row.name, row.pattern) for row in qshard.fuse_(model)] == [("rope", "rotary embedding")]
    assert qshard.fuse_(model) == []
    for t, y in zip((x, odd), expected):
        assert torch.equal(model(t, angles.cos(), angles.sin()), y)
    assert isinstance(model.rope, Rope) and not model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [Rope, Promotes])
def test_fused_modules_keep_their_dtypes(kind, dtype):
    plain, module = kind(), kind()
    assert len(qshard.fuse_(module)) == 1
    angles = torch.rand(5, 8).repeat(1, 2)
    x = torch.randn(2, 3, 5, 16).to(dtype)
    for tables in ((angles.cos(), angles.sin()), (angles.cos().double(), angles.sin().double()),
                   (angles.cos().bfloat16(), angles.sin().bfloat16())):
        y, expected = module(x, *tables), plain(x, *tables)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected)
        assert torch.equal(module(x=x, sin=tables[1], cos=tables[0]), y)
