"""What tensor-parallel ranks send of their tokens: codes and scales as the plain-torch reference makes them,
put together where they belong, with the same bits on every device."""

import itertools

import pytest
import torch
from reference import activations
from reference import formats as reference

import qshard
from qshard.formats import info_of

ops = torch.ops.qshard
assert qshard
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (format, is a gradient)
MESSAGES = [
    *itertools.product(
        (
            "float8_tensorwise",
            "float8_tensorwise_fp32_scale",
            "float8_rowwise",
            "float8_rowwise_fp32_scale",
            "float8_blockwise",
            "float8_blockwise_fp32_scale",
            "float8_delayed",
            "float8_delayed[e4m3]",
        ),
        (False, True),
    )
]
# (ranks, tokens of one of them in two dimensions, K)
SIZES = [(2, (3, 5), 256), (3, (1, 130), 200), (4, (2, 33), 100), (1, (4, 1), 7), (2, (2, 16), 4096)]


def values(ranks, tokens, features, dtype):
    """Values for each rank: rows and blocks of sizes of their own, with special values among them."""
    generator = torch.Generator().manual_seed(ranks + features)
    x = torch.randn(ranks, *tokens, features, generator=generator)
    x *= 2.0 ** torch.randint(-9, 10, (ranks, *tokens, (features + 127) // 128), generator=generator)[
        ..., None
    ].expand(-1, -1, -1, -1, 128).flatten(3)[..., :features]
    x[0, 0, 0] = 0
    flat = x.view(-1)
    flat[features // 3 :: 1013] = float("inf")
    flat[features // 2 :: 1511] = float("nan")
    flat[features // 2 + 1 :: 1511] = -float("nan")
    flat[1::997] = -0.0
    flat[5::991] = 1e-40
    return x.to(dtype)


def oracle(x, format, is_gradient, amax):
    """For tokens (M, K): codes, scale_inv, the same for each value, and the codes' dtype."""
    dtype = torch.float8_e4m3fn
    meets = info_of(format).activations
    is_power_of_two = meets.power_of_two_scales
    if meets.packed_rows == "1x128":
        codes, scale_inv = activations.quantize_1x128(x, power_of_two=is_power_of_two)
        return codes, scale_inv, activations.expand_1x128(scale_inv, x.shape[1]), dtype
    if meets.packed_rows == "row":
        codes, scale_inv = activations.quantize_rowwise(x, power_of_two=is_power_of_two)
        return codes, scale_inv[:, None], scale_inv[:, None], dtype
    if is_gradient:
        dtype = meets.packed_gradient_dtype
    scale = reference.scale_from_amax(amax.cpu(), torch.finfo(dtype).max, is_power_of_two)
    scale_inv = 1 / scale
    return reference.encode(x, scale, dtype), scale_inv.reshape(1), scale_inv, dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format, is_gradient", MESSAGES)
def test_messages_hold_the_values_of_the_oracle(format, is_gradient, device):
    for dtype, (ranks, tokens, features) in itertools.product(DTYPES, SIZES):
        x = values(ranks, tokens, features, dtype)
        amax = ops._message_amax(x.to(device), format)
        scale_mode = info_of(format).activations.packed_rows
        assert amax.shape == ((1,) if scale_mode == "tensor" else (0,))
        if amax.numel():
            amax.fill_(200.0)  # of fewer values than there are, so that some saturate
        messages, wanted = [], []
        for part in x:
            message = ops._encode_activation(part.to(device), format, is_gradient, amax)
            rows = part.reshape(-1, features)
            codes, scale_inv, of_each, code_dtype = oracle(rows, format, is_gradient, amax)
            pitch = -(-features // 16) * 16
            got = message[: len(rows) * pitch].cpu().view(len(rows), pitch)
            assert torch.equal(got[:, :features], codes)
            assert not got[:, features:].any()
            scales = message[len(rows) * pitch :].cpu().view(torch.float32)[: scale_inv.numel()]
            if scale_mode == "1x128":
                scales = scales.view(-1, len(rows)).t()
            assert torch.equal(scales, scale_inv.view(scales.shape))
            messages.append(message)
            decoded = codes.view(code_dtype).float() * of_each
            wanted.append(decoded.to(dtype).view(part.shape))
        for dim in (0, 1):
            got = ops._decode_activations(
                torch.cat(messages), format, is_gradient, (*tokens, features), dim, dtype
            ).cpu()
            want = torch.cat(wanted, dim)
            assert got.dtype == dtype and got.shape == want.shape
            same = (got == want) | (got.isnan() & want.isnan())
            assert same.all() and torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_1x32[phase]"])
def test_messages_of_mxfp8_have_blocks_of_one_token(format, device):
    """Each token as a matrix of its own, whose blocks are one row high."""
    for dtype, (ranks, tokens, features) in itertools.product(DTYPES, SIZES):
        x = values(ranks, tokens, features, dtype).to(device)
        assert ops._message_amax(x, format).shape == (0,)
        for is_gradient in (False, True):
            no_amax = torch.empty(0, device=device)
            messages = [ops._encode_activation(p, format, is_gradient, no_amax) for p in x]
            wanted = ops.dequantize(ops.quantize(x.unsqueeze(-2), "mxfp8")).squeeze(-2)
            for dim in (0, 1):
                got = ops._decode_activations(
                    torch.cat(messages), format, is_gradient, (*tokens, features), dim, dtype
                )
                want = torch.cat(list(wanted), dim)
                assert got.dtype == dtype and got.shape == want.shape
                assert ((got == want) | (got.isnan() & want.isnan())).all()


@pytest.mark.skipif(len(DEVICES) == 1, reason="needs a GPU, to compare with a CPU")
@pytest.mark.parametrize("format, is_gradient", [*MESSAGES, ("mxfp8", False)])
def test_values_have_the_same_bits_on_cuda(format, is_gradient):
    for dtype, (ranks, tokens, features) in itertools.product(DTYPES, SIZES):
        x = values(ranks, tokens, features, dtype)
        made = []
        for device in DEVICES:
            amax = ops._message_amax(x.to(device), format)
            parts = [ops._encode_activation(p.to(device), format, is_gradient, amax) for p in x]
            size = (*tokens, features)
            made.append(ops._decode_activations(torch.cat(parts), format, is_gradient, size, 0, dtype).cpu())
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(made[0].view(bits), made[1].view(bits)), (dtype, ranks, tokens, features)


def test_what_is_no_message():
    x, none = torch.randn(4, 256), torch.empty(0)
    with pytest.raises(RuntimeError, match="one-byte codes"):
        ops._message_amax(x, "nvfp4")
    with pytest.raises(RuntimeError, match="amax of all ranks"):
        ops._encode_activation(x, "float8_tensorwise", False, none)
    message = ops._encode_activation(x, "float8_blockwise", False, none)
    with pytest.raises(RuntimeError, match="messages of 1056 bytes"):
        ops._decode_activations(message[:-1], "float8_blockwise", False, (4, 256), 0, x.dtype)
    with pytest.raises(RuntimeError, match="along one of their first 1"):
        ops._decode_activations(message, "float8_blockwise", False, (4, 256), 1, x.dtype)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        ops._encode_activation(x.double(), "float8_blockwise", False, none)
