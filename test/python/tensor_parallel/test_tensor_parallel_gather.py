"""The gather of sequence parallelism: what arrives is what quantizing the gathered values gives, and it
travels as bytes."""

import pytest
import torch
import torch.distributed as dist
from collective_calls import Sent
from dist_helpers import device, on_ranks
from models.formats import DELAYED
from reference import activations, row_scales
from reference import formats as reference

import qshard
from qshard.formats import info_of
from qshard.tensor_parallel import collectives

ops = torch.ops.qshard
FORMATS = (
    "float8_tensorwise",
    "float8_tensorwise_fp32_scale",
    DELAYED,
    "float8_rowwise",
    "float8_blockwise",
    "float8_blockwise_fp32_scale",
    "mxfp8",
    "mxfp8_1x32[phase]",
    "nvfp4",
)
assert qshard


def activation(tokens, features, dtype, special=False):
    """Rows and ranks' parts differ in size, so that another's scale shows."""
    generator = torch.Generator().manual_seed(tokens + features)
    x = torch.randn(tokens, features, generator=generator)
    x *= 2.0 ** torch.randint(-6, 7, (tokens, 1), generator=generator)
    x[tokens // 2 :] *= 16
    x[0] = 0
    if special:
        x[tokens // 3, features // 2] = float("nan")
        x[-1, 0] = float("inf")
    return x.to(dtype)


def quantized(x, format):
    """Values that an activation (M, K) has after it was quantized for a weight of `format`."""
    k, codes_of = x.shape[1], info_of(format).activations
    pow2, rows = codes_of.power_of_two_scales, codes_of.packed_rows
    if info_of(format).gemm.kind == "row_images":
        rows = codes_of.row_format
    if rows == "tensor":
        found, scale_inv = activations.quantize_tensorwise(x, power_of_two=pow2)
    elif rows == "row":
        found, scale_inv = activations.quantize_rowwise(x, power_of_two=pow2)
        scale_inv = scale_inv[:, None]
    elif rows == "1x128":
        found, scale_inv = activations.quantize_1x128(x, power_of_two=pow2)
        scale_inv = activations.expand_1x128(scale_inv, k)
    elif rows == "mxfp8_1x32[rowwise]":
        blocks = torch.nn.functional.pad(x.float(), (0, -k % 32)).view(len(x), -1, 32)
        amax = torch.stack([reference.amax_of(block) for block in blocks.flatten(0, 1)])
        amax = amax.view(len(x), -1)
        bytes, scale = row_scales.mxfp8_scales(amax)
        found = reference.encode(x, scale.repeat_interleave(32, 1)[:, :k], torch.float8_e4m3fn)
        scale_inv = row_scales.e8m0_to_float(bytes).repeat_interleave(32, 1)[:, :k]
    else:
        return ops.dequantize(ops.quantize(x, "nvfp4_1x16"))
    return (reference.decode(found) * scale_inv).to(x.dtype)


@pytest.mark.parametrize("format", FORMATS)
@on_ranks(2)
def test_gathered_activation_is_the_quantized_whole(format):
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
    for dtype, special, tokens, features in (
        (torch.float32, False, 6, 256),
        (torch.bfloat16, False, 34, 200),
        (torch.bfloat16, True, 17, 100),
        (torch.float16, False, 1, 24),
    ):
        x = activation(ranks * tokens, features, dtype, special)
        part = x.chunk(ranks)[rank].to(device())
        got = ops._gather_tokens(part, 0, format, False, group).cpu()
        want = quantized(x, format)
        assert got.dtype == dtype
        same = (got == want) | (got.isnan() & want.isnan())
        assert same.all(), (dtype, special, tokens, features, int((~same).sum()))
    empty = x[:0].to(device())
    assert ops._gather_tokens(empty, 0, format, False, group).shape == (0, features)
    # Along any dimension, of inputs with any strides.
    x = activation(6 * 4, 200, torch.bfloat16).view(3, 2, 4, 200)
    whole = quantized(x.view(-1, 200), format).view(x.shape)
    for dim, length in ((0, 3), (1, 2), (2, 4)):
        if length % ranks:
            continue
        part = x.chunk(ranks, dim)[rank].to(device())
        got = ops._gather_tokens(part, dim, format, False, group).cpu()
        assert got.shape == x.shape and torch.equal(got, whole), dim


@on_ranks(2)
def test_gathered_gradient_is_the_quantized_whole():
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
    for format, power_of_two in (
        ("float8_tensorwise", True),
        ("float8_tensorwise_fp32_scale", False),
        (DELAYED, False),
    ):
        for special in (False, True):
            x = activation(ranks * 34, 100, torch.bfloat16, special)
            part = x.chunk(ranks)[rank].to(device())
            got = ops._gather_tokens(part, 0, format, True, group).cpu()
            found, scale_inv = activations.quantize_tensorwise(x, torch.float8_e5m2, power_of_two)
            want = (found.view(torch.float8_e5m2).float() * scale_inv).bfloat16()
            same = (got == want) | (got.isnan() & want.isnan())
            assert same.all(), (format, special, int((~same).sum()))
    x = activation(ranks * 34, 100, torch.bfloat16)
    part = x.chunk(ranks)[rank].to(device())
    for format in ("float8_delayed[e4m3]", "float8_blockwise", "mxfp8"):
        got = ops._gather_tokens(part, 0, format, True, group).cpu()
        assert torch.equal(got, quantized(x, format)), format
    for format in ("nvfp4", "float8_rowwise"):  # rounded at random, or times the weight's scales first
        assert torch.equal(ops._gather_tokens(part, 0, format, True, group).cpu(), x), format


@on_ranks(2)
def test_bytes_of_gathers():
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    tokens, features = 48, 1024
    x = activation(tokens, features, torch.bfloat16).to(device())
    # Codes, and the scales of blocks within one token, of tokens, or one scale, which takes 16 bytes.
    per_element = {
        "float8_rowwise": 1 + 4 / features,
        "float8_blockwise": 1 + 4 / 128,
        "float8_blockwise_fp32_scale": 1 + 4 / 128,
        "mxfp8": 1 + 1 / 32,
        "mxfp8_1x32[phase]": 1 + 1 / 32,
        "nvfp4": 1 / 2 + 1 / 16,
    }
    for format in FORMATS:
        with Sent() as sent:
            ops._gather_tokens(x.view(6, 8, features), 1, format, False, group)
        numel = tokens * features
        expected = int(numel * per_element[format]) if format in per_element else numel + 16
        assert sent.gathered == [(torch.uint8, expected)], (format, sent.gathered)
        info = info_of(format)
        if info.gemm.kind == "packed":
            amax = ["c10d::allreduce_"] if info.activations.packed_rows == "tensor" else []
            assert sent.reduced == amax, (format, sent.reduced)
    for format in ("float8_tensorwise", "float8_blockwise", "mxfp8"):
        with Sent() as sent:
            ops._gather_tokens(x, 0, format, True, group)
        assert [dtype for dtype, _ in sent.gathered] == [torch.uint8]
        assert sent.gathered[0][1] <= tokens * features * 33 / 32
    with Sent() as sent:
        whole = ops._gather_tokens(x.view(6, 8, features), 1, "", False, group)
    assert sent.gathered == [(torch.bfloat16, x.numel())]
    assert torch.equal(whole, x.view(6, 8, features).repeat(1, ranks, 1))


# ------------------------------------------------------------------------------ the way back


@on_ranks(2)
def test_scattered_sums_are_the_parts_of_a_sum():
    """Each rank's part of a sum, cut along any dimension of few or many pieces."""
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
    shapes = (((6, 5), 0), ((2, 4, 5), 1), ((20, 4, 5), 1), ((2, 3, 6, 5), 2), ((1, 4, 7), 1),
              ((0, 4, 5), 1), ((3, 4, 0), 1))
    for shape, dim in shapes:
        terms = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(ranks)]
        want = sum(terms).chunk(ranks, dim)[rank]
        mine = terms[rank].to(device())
        for x in (mine, mine.transpose(0, -1).contiguous().transpose(0, -1)):
            got = collectives.scattered_sum(x, dim, group)
            assert got.is_contiguous() and torch.equal(got.cpu(), want), (shape, dim)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: collectives.scattered_sum(x, dim, group),  # noqa: B023
            backend="aot_eager", fullgraph=True,
        )
        assert torch.equal(compiled(mine).cpu(), want), (shape, dim)
