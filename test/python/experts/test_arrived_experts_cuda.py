"""Experts on Hopper whose tokens, or gradients, arrived in codes: the same GEMM reads them where they are."""

import pytest
import torch
from arrived_rows import ROWS, WHOLE_ROWS, odd_values, values
from expert_cases import parts, stack_of
from helpers import assert_same, ceil_div, ops, round_up
from reference import activations
from test_arrived_experts import assert_is_composed, step
from test_grouped_linear_cuda import on_hopper

pytestmark = on_hopper
FORMATS = ("float8_blockwise", "float8_blockwise[x_block_scaling_dim=1]")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENDS = ([3, 3, 140, 300], [128, 256, 300, 511], [0, 0, 0, 0], [700, 700, 700, 700])


@pytest.mark.parametrize("columns", [384, 400, 72])
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_dgrad_have_the_bits_of_the_values(dtype, ends, columns):
    ends = torch.tensor(ends, dtype=torch.int32)
    total = int(ends[-1]) + 10
    stack = stack_of(4, 208, columns, "float8_blockwise", "cuda", dtype, base=2.0)[0]
    x, grad = values(total, columns).to("cuda", dtype), values(total, 208, seed=1).to("cuda", dtype)
    y, x_grad, _ = step(x, stack, ends.cuda(), grad)
    q = ops.quantize(x, ROWS)
    for given in (grad, ops.quantize(grad, ROWS)):
        found = step(q, stack, ends.cuda(), given)
        assert_same(found[0], y)
        assert_same(found[1], x_grad)
        for e, rows in enumerate(parts(ends)):
            assert found[2][e].any() == (rows.stop > rows.start)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("columns", [384, 400])
def test_columns_of_each_expert_are_those_of_its_codes(columns, ends, format):
    ends = torch.tensor(ends, dtype=torch.int32)
    total = int(ends[-1]) + 10
    x = odd_values(total, columns)
    stack = stack_of(4, 208, columns, format, "cuda")[0].detach()
    q = ops.quantize(x.cuda(), ROWS)
    saved = ops.linear_forward(q, stack, None, True, offs=ends.cuda())[1].cpu()
    tiles, rows = ceil_div(total, 128) + 4, round_up(columns, 16)
    codes, scales = saved[: rows * tiles * 128].view(rows, -1), saved[rows * tiles * 128 :].view(torch.float32)
    square = "=1" not in format
    pitch = round_up(tiles, 4)
    if square:
        scales = scales[: ceil_div(columns, 128) * pitch].view(-1, pitch)
    else:
        scales = scales[: tiles * rows].view(tiles, -1)
    tile = 0
    for own in parts(ends):
        count = own.stop - own.start
        wanted, largest = activations.columns_of_1x128(*activations.quantize_1x128(x[own]))
        begin, used = 128 * tile, ceil_div(count, 128)
        assert_same(codes[:columns, begin : begin + count], wanted.t())
        assert not codes[:columns, begin + count : begin + 128 * used].any()
        if square:
            assert_same(scales[:, tile : tile + used], largest.t())
        else:
            assert_same(scales[tile : tile + used, :columns], largest.repeat_interleave(128, 1)[:, :columns])
        tile += used


@pytest.mark.parametrize("format", FORMATS)
def test_wgrad_reads_these_columns(format):
    """Powers of two whose sums 14 bits hold: products of any order have the same bits."""
    ends = torch.tensor([3, 3, 140, 300], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    x, grad = (2.0 ** torch.randint(0, 2, (300, size), generator=generator) for size in (128, 208))
    x[::2] *= 4
    stack = stack_of(4, 208, 128, format, "cuda")[0]
    q, g = ops.quantize(x.cuda(), ROWS), ops.quantize(grad.cuda(), ROWS)
    assert_same(ops.dequantize(q).cpu(), x)
    weight_grad = step(q, stack, ends.cuda(), g)[2].cpu()
    for e, rows in enumerate(parts(ends)):
        assert_same(weight_grad[e], grad[rows].t() @ x[rows])


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("columns", [384, 400])
def test_columns_of_rows_with_one_scale(columns, ends):
    """All of an expert have one scale."""
    ends = torch.tensor(ends, dtype=torch.int32)
    total = int(ends[-1]) + 10
    x = values(total, columns)
    # The largest code, by which the scale of values that are quantized again is the same.
    x[:, 1] = torch.where(x.any(1), 448 * activations.quantize_rowwise(x)[1], 0)
    stack = stack_of(4, 208, columns, "float8_tensorwise", "cuda")[0].detach()
    saved = ops.linear_forward(ops.quantize(x.cuda(), WHOLE_ROWS), stack, None, True, offs=ends.cuda())[1].cpu()
    width, rows = 128 * (ceil_div(total, 128) + 4), round_up(columns, 16)
    codes, scales = saved[: rows * width].view(rows, width), saved[-16:].view(torch.float32)
    begin = 0
    for e, own in enumerate(parts(ends)):
        count = own.stop - own.start
        wanted, largest = activations.columns_of_rows(*activations.quantize_rowwise(x[own]))
        assert_same(codes[:columns, begin : begin + count], wanted.t())
        assert scales[e] == largest
        begin += round_up(count, 128)


@pytest.mark.parametrize("format", ["float8_tensorwise", "float8_rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_rows_with_one_scale_have_the_bits_of_the_cpu(ends, dtype, format):
    """Numbers of which tensor cores keep all bits in any order."""
    ends = torch.tensor(ends, dtype=torch.int32)
    total, generator = int(ends[-1]) + 10, torch.Generator().manual_seed(3)
    x, grad = (torch.randint(-1, 2, (total, size), generator=generator).float() for size in (384, 208))
    x *= 2.0 ** torch.randint(-1, 2, (total, 1), generator=generator)
    grad *= 2.0 ** torch.randint(0, 2, (total, 1), generator=generator)
    weight = torch.randint(-1, 2, (4, 208, 384), generator=generator).to(dtype)
    found = []
    for device, name in (("cpu", f"{format}[emulate]"), ("cuda", format)):
        stack = ops.quantize(weight.to(device), name).requires_grad_()
        q, g = (ops.quantize(t.to(device, dtype), WHOLE_ROWS) for t in (x, grad))
        found.append([t.cpu() for t in step(q, stack, ends.to(device), g)])
    for one, other in zip(*found):
        assert_same(one, other)


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_an_mlp_is_its_linears(joined):
    ends, inner = torch.tensor([3, 3, 140, 600], dtype=torch.int32, device="cuda"), 128
    shapes = ((2 * inner if joined else inner, 384), (inner, 384), (208, inner))
    pairs = [stack_of(4, *shape, "float8_blockwise", "cuda", torch.bfloat16, base=2.0) for shape in shapes]
    x, grad = (ops.quantize(values(609, size, torch.bfloat16).cuda(), ROWS) for size in (384, 208))
    assert_is_composed(zip(*pairs), joined, x, grad, ends)


def test_the_host_does_not_wait():
    ends = torch.tensor([3, 3, 140, 300], dtype=torch.int32, device="cuda")
    stack = stack_of(4, 208, 384, "float8_blockwise", "cuda", torch.bfloat16)[0]
    q, g = (ops.quantize(values(309, size, torch.bfloat16).cuda(), ROWS) for size in (384, 208))
    step(q, stack, ends, g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(q, stack, ends, g)
        ops.row_image(q[torch.arange(5, device="cuda")])
    finally:
        torch.cuda.set_sync_debug_mode("default")
