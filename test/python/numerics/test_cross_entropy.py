"""cross_entropy_and_gradient: losses and gradients within the rounding of float64's, codes that are those of the
gradient, and the same bits on every device."""

import pytest
import torch
import torch.nn.functional as F
from helpers import ops, round_up
from nn_helpers import assert_bits, no_gpu, on_devices
from reference import losses as reference

forward = ops.cross_entropy_and_gradient
IN_CODES = ("float8_tensorwise", "float8_blockwise")
SHAPES = [(5, 7), (3, 256), (130, 272), (9, 1000), (2, 50_257), (3, 32_000), (2, 128_256)]
on_shapes = pytest.mark.parametrize("m, v", SHAPES)


def draw(m, v, dtype=torch.float32, seed=0, spread=4.0):
    """Logits, and targets of which every third is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(m, v, generator=generator) * spread).to(dtype)
    target = torch.randint(v, (m,), generator=generator)
    target[2::3] = -100
    return logits, target


def unpacked(bytes, rows, columns, in_blocks, padding):
    """Codes (rows, columns) and their scales of the rows' orientation."""
    ld, rows_there = round_up(columns, padding[1]), round_up(rows, padding[0])
    codes = bytes[: rows_there * ld].view(rows_there, ld)
    scales = bytes[rows_there * ld :].view(torch.float32)
    assert not codes[rows:].any() and not codes[:, columns:].any()
    if not in_blocks:
        return codes[:rows, :columns], scales[0]
    blocks = -(-columns // 128)
    return codes[:rows, :columns], scales[: blocks * rows_there].view(blocks, rows_there).t()[:rows]


@on_shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_is_float64s_but_for_rounding(m, v, dtype, smoothing):
    logits, target = draw(m, v, dtype)
    losses, totals, gradient, none = forward(logits, target, label_smoothing=smoothing, rows=True)
    expected, expected_gradient = reference.cross_entropy(logits, target, label_smoothing=smoothing)
    assert losses.dtype == torch.float32 and gradient.dtype == dtype and none.numel() == 0
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(totals, torch.stack([losses.sum(), (target >= 0).sum()]), rtol=1e-6, atol=1e-6)
    # A probability is off by the rounding of log-sum-exp, at most half an ulp of 32, and then rounded.
    step = torch.finfo(dtype).eps / 2
    bound = expected_gradient.abs() * (step + 4e-6) + 1e-7 + torch.finfo(dtype).smallest_normal * step
    assert ((gradient.double() - expected_gradient).abs() <= bound).all()


@on_shapes
@pytest.mark.parametrize("fmt", IN_CODES)
def test_codes_are_those_of_the_gradient(m, v, fmt):
    logits, target = draw(m, v, torch.bfloat16)
    options = {"label_smoothing": 0.1}
    values = forward(logits, target, rows=True, **options)[2].float()
    in_blocks = fmt == "float8_blockwise"
    *_, rows, columns = forward(
        logits, target, grad_format=f"{fmt}[emulate]", rows=True, columns=True, **options
    )
    padding = (16 if in_blocks else 1, 16), (16, 128)
    for bytes, of, pads in ((rows, values, padding[0]), (columns, values.t(), padding[1])):
        got, scales = unpacked(bytes, *of.shape, in_blocks, pads)
        codes, scale_inv = reference.gradient_codes(of, in_blocks)
        assert_bits(got, codes)
        assert_bits(scales.reshape(scale_inv.shape), scale_inv)


def test_one_scale_is_known_before_the_pass():
    logits, target = draw(4, 32)
    for fmt, scale in (("float8_tensorwise", 2.0**-15), ("float8_tensorwise_fp32_scale", 1 / 57344)):
        rows = forward(logits, target, grad_format=f"{fmt}[emulate]", rows=True)[2]
        assert unpacked(rows, 4, 32, False, (1, 16))[1] == torch.tensor(scale)


@on_devices
def test_special_values_make_the_loss_of_their_token_alone_nan(device):
    logits, _ = draw(6, 64)
    logits[0, 3], logits[1, 3], logits[2, 3], logits[3] = float("nan"), float("inf"), float("-inf"), float("-inf")
    logits[4, 5] = 3e38
    target = torch.tensor([0, 3, 0, 1, 5, 63])
    losses, totals, gradient, _ = forward(logits.to(device), target.to(device), rows=True)
    expected = F.cross_entropy(logits, target, reduction="none")
    assert losses.isnan().tolist() == [True, True, False, True, False, False]
    torch.testing.assert_close(losses.cpu(), expected, equal_nan=True, rtol=1e-6, atol=1e-6)
    assert gradient.isnan().all(1).tolist() == losses.isnan().tolist()
    assert gradient.isnan().any(1).tolist() == losses.isnan().tolist()
    assert totals[0].isnan() and totals[1] == 6
    ignored = torch.full((6,), -100, device=device)
    losses, totals, gradient, _ = forward(logits.to(device), ignored, rows=True)
    assert not losses.any() and not totals.any() and not gradient.any()


@pytest.mark.parametrize("fmt", [None, "float8_tensorwise[emulate]", "float8_blockwise[emulate]"])
def test_no_tokens(fmt):
    losses, totals, *_ = forward(
        torch.empty(0, 32), torch.empty(0, dtype=torch.int64), grad_format=fmt, rows=True
    )
    assert losses.shape == (0,) and totals.tolist() == [0, 0]


def test_strided_and_batched_logits_are_the_same():
    logits, target = draw(6, 40)
    expected = forward(logits, target, rows=True)
    strided = torch.empty(6, 80)[:, ::2].copy_(logits)
    assert_bits(forward(strided, target, rows=True), expected)
    batched = forward(logits.view(2, 3, 40), target.view(2, 3), rows=True)
    assert batched[0].shape == (2, 3) and batched[2].shape == (2, 3, 40)
    assert_bits([part.reshape(other.shape) for part, other in zip(batched, expected)], expected)


def test_bits_do_not_depend_on_threads():
    logits, target = draw(40, 5000, torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(forward(logits, target, label_smoothing=0.2, rows=True))
        assert_bits(*results)
    finally:
        torch.set_num_threads(threads)


@no_gpu
@on_shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", [None, *IN_CODES])
def test_cuda_gives_the_bits_of_the_cpu(m, v, dtype, fmt):
    for smoothing in (0.0, 0.1):
        logits, target = draw(m, v, dtype)
        logits[0, 0], logits[1, 5] = float("nan"), float("-inf")
        results = []
        for device in ("cpu", "cuda", "cuda"):
            options = {"grad_format": fmt and f"{fmt}[emulate]", "rows": True, "columns": fmt is not None}
            made = forward(logits.to(device), target.to(device), label_smoothing=smoothing, **options)
            made = [tensor.cpu() for tensor in made]
            if fmt is not None:  # behind scales nothing is written
                in_blocks = fmt == "float8_blockwise"
                padding = (16 if in_blocks else 1, 16), (16, 128)
                made[2] = unpacked(made[2], m, v, in_blocks, padding[0])
                made[3] = unpacked(made[3], v, m, in_blocks, padding[1])
            results.append(made)
        for got in results[1:]:
            for a, b in zip(got, results[0]):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@no_gpu
def test_a_target_that_is_no_word_gives_nan_on_cuda():
    logits, _ = draw(3, 32)
    losses, totals, gradient, _ = forward(logits.cuda(), torch.tensor([0, 32, -1]).cuda(), rows=True)
    assert losses.isnan().tolist() == [False, True, True] == gradient.isnan().all(1).tolist()


def test_errors_name_the_operator():
    logits, target = draw(4, 32)
    name = "qshard::cross_entropy_and_gradient"
    with pytest.raises(IndexError, match=r"target 32 of token 1 is none of 32 words"):
        forward(logits, torch.tensor([0, 32, 1, 1]))
    with pytest.raises(TypeError, match=f"{name}: target must be int64"):
        forward(logits, torch.rand(4, 32))
    with pytest.raises(TypeError, match=f"{name}: logits are"):
        forward(logits.double(), target)
    with pytest.raises(RuntimeError, match=f"{name}: target of shape"):
        forward(logits, target[:3])
    with pytest.raises(ValueError, match=f"{name}: label_smoothing"):
        forward(logits, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match=f"{name}: columns are codes"):
        forward(logits, target, columns=True)
    for fmt in ("float8_rowwise", "float8_delayed", "mxfp8"):
        with pytest.raises(ValueError, match=f"{name}: a {fmt} linear reads no codes"):
            forward(logits, target, grad_format=fmt, rows=True)
