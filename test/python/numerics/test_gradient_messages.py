"""Messages that carry gradients: bytes and sums against the oracle, on CPU, and CUDA against CPU."""

import pytest
import torch
from helpers import ops
from reference import gradient_message, stochastic
from qshard.gradients import message_bytes

FORMATS = tuple(gradient_message.FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 15, 127, 128, 4095, 4097, 9000)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]


def gradients(n, dtype=torch.float32, seed=0):
    """Magnitudes over many binades, runs of zeros, and of zeros with a sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    x *= torch.exp2(torch.randint(-20, 4, (-(-n // 16),), generator=generator)).repeat_interleave(16)[:n]
    x[n // 2 : n // 2 + 300] = 0
    x[-3:] = -0.0
    return x.to(dtype)


def with_specials(x):
    x = x.clone()
    x[len(x) // 3] = float("inf")
    x[len(x) // 5] = -float("nan")
    x[-1] = -float("inf")
    return x


def assert_bits(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    different = (got.cpu().view(as_int) != want.cpu().view(as_int)).nonzero().flatten()
    assert len(different) == 0, (
        f"{len(different)} differ, the first at {different[0]}: "
        f"{got.flatten()[different[0]]} for {want.flatten()[different[0]]}"
    )


def chunks_of(x, chunks, n):
    return torch.nn.functional.pad(x, (0, chunks * n - len(x))).view(chunks, n)


@pytest.mark.parametrize("specials", [False, True], ids=["finite", "specials"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_messages_are_the_oracles(device, fmt, n, dtype, specials):
    chunks = 3
    x = gradients(chunks * n - n // 3, dtype)  # the last chunk is not whole
    if specials and n > 100:
        x = with_specials(x)
    got = ops.quantize_gradients(x.to(device), fmt, chunks, n)
    want = [gradient_message.encode(chunk, fmt) for chunk in chunks_of(x, chunks, n)]
    assert_bits(got, torch.stack(want))
    assert got.shape[1] == gradient_message.message_bytes(fmt, n)


@pytest.mark.parametrize("power", (0, -10, 40, -60))  # kernels have ranges of fast arithmetic
@pytest.mark.parametrize("n", (15, 4097))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_messages_are_the_oracles(device, fmt, dtype, n, power):
    x, first, count = (gradients(2 * n) * 2.0**power).to(dtype), 400, 7
    if n > 100:
        x = with_specials(x)
    rounding = torch.tensor([123456, 654321, count], dtype=torch.int32, device=device)
    got = ops.quantize_gradients(x.to(device), fmt, 2, n, rounding=rounding, first_noise=first)
    key, stride = stochastic.key_of(123456, 654321), -(-n // 16) * 16
    for i, chunk in enumerate(x.view(2, n)):
        noise = gradient_message.noise(key, count, first + i * stride, n)
        assert_bits(got[i], gradient_message.encode(chunk, fmt, noise))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("peers", (1, 2, 5))
@pytest.mark.parametrize("n", (1, 127, 4097, 9000))
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_the_oracles(device, fmt, n, peers, dtype):
    chunks, factor = 2, 1 / 3
    x = [with_specials(gradients(n + 30, seed=i))[:n] for i in range(chunks * peers)]
    messages = torch.stack([gradient_message.encode(v, fmt) for v in x]).view(chunks, peers, -1)
    out = torch.full((chunks * n - n // 2,), 7.0, dtype=dtype, device=device)
    ops.sum_gradients(messages.to(device), fmt, n, out, factor=factor)
    want = [gradient_message.total(list(m), fmt, n, factor, dtype) for m in messages]
    assert_bits(out, torch.cat(want)[: len(out)])


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_stay_zeros_and_nothing_is_saturated(fmt):
    x = torch.zeros(256)
    x[128] = 3e38
    message = ops.quantize_gradients(x, fmt, 1, 256)
    scales = message[0, gradient_message.parts(fmt, 256)[0] :]
    assert scales[0] == (0x38 if fmt == "nvfp4" else 127)
    out = torch.empty(256)
    ops.sum_gradients(message[None], fmt, 256, out)
    assert (out != 0).sum() == 1 and 2.7e38 < out[128] < 3.4e38
    for special in (float("inf"), -float("inf"), float("nan")):
        x[128] = special
        ops.sum_gradients(ops.quantize_gradients(x, fmt, 1, 256)[None], fmt, 256, out)
        block = gradient_message.FORMATS[fmt].block
        assert out[128 : 128 + block].isnan().all() and (out[:128] == 0).all()


@pytest.mark.parametrize("offset", (1, 3, 6))
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_values_at_any_address(device, fmt, offset):
    for dtype in DTYPES:
        x = gradients(3 * 5001 + offset, dtype)
        there = x.to(device)[offset:]
        got = ops.quantize_gradients(there, fmt, 3, 5001)
        assert_bits(got, torch.stack([gradient_message.encode(c, fmt) for c in x[offset:].view(3, -1)]))
        out = torch.zeros_like(there.new_empty(3 * 5001 + offset))
        ops.sum_gradients(got[:, None], fmt, 5001, out[offset:])
        want = [gradient_message.total([m.cpu()], fmt, 5001, 1.0, dtype) for m in got]
        assert_bits(out[offset:], torch.cat(want))


def test_wire_bytes_per_value():
    n = 1 << 20
    assert message_bytes("float8", n) == n + n // 128
    assert message_bytes("mxfp8", n) == n + n // 32
    assert message_bytes("nvfp4", n) == n // 2 + n // 16 + n // 1024


def test_bad_arguments_are_named():
    x = torch.ones(10)
    with pytest.raises(ValueError, match="gradients do not travel as 'fp8'; known are float8, mxfp8"):
        ops.quantize_gradients(x, "fp8", 1, 10)
    with pytest.raises(RuntimeError, match="10 values do not fit 2 messages of 4"):
        ops.quantize_gradients(x, "float8", 2, 4)
    with pytest.raises(RuntimeError, match="float32, bfloat16 or float16"):
        ops.quantize_gradients(x.double(), "float8", 1, 10)
    with pytest.raises(RuntimeError, match="rounding must be 3 contiguous int32"):
        ops.quantize_gradients(x, "float8", 1, 10, rounding=torch.zeros(3))
    message = ops.quantize_gradients(x, "float8", 1, 10)
    for wrong in (message, message[None, :, :-1], message[None].float()):
        with pytest.raises(RuntimeError, match=r"uint8 messages of shape \(chunks, peers, 32\)"):
            ops.sum_gradients(wrong, "float8", 10, x)
    with pytest.raises(RuntimeError, match="of at most 10 values"):
        ops.sum_gradients(message[None], "float8", 10, torch.ones(11))
    with pytest.raises(RuntimeError, match="out must be contiguous"):
        ops.sum_gradients(message[None], "float8", 10, torch.ones(10, 2)[:, 0])
