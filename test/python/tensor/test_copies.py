"""copy_, clone, to, cat: the value arrives, and so does what the tensor is."""

import copy
import functools
import itertools
import pickle
import random

import pytest
import torch
import torch.multiprocessing
from helpers import (
    FORMATS,
    assert_same,
    bits,
    fit,
    has_row_scales,
    has_two_images,
    is_quantized,
    ops,
    quantized_alike,
    rounded,
    state,
    value,
    weight,
)
from qshard._runtime.classes import TensorState

ROWS, COLS = 150, 140
keep_or_not = pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
formats = pytest.mark.parametrize("fmt", FORMATS)


def assert_same_state(a, b):
    (geometry_a, *planes_a), (geometry_b, *planes_b) = state(a), state(b)
    assert geometry_a == geometry_b
    for plane_a, plane_b in zip(planes_a, planes_b):
        assert torch.equal(bits(plane_a), bits(plane_b))


def a_shard_with_a_pending_write(keep_master):
    """Rows of a bigger tensor: only a collective could flush it."""
    q = ops.quantize(
        weight(40, 32),
        "float8_blockwise",
        keep_master=keep_master,
        logical_rows=200,
        row_offset=100,
    )
    q.mul_(1.3)
    return q


# --------------------------------------------------------------------------------------- copy_

WINDOWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[5:77],
    "cut rows": lambda t: t[127:129],
    "columns": lambda t: t[:, 3:130],
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::3, ::2],
    "row": lambda t: t[9],
    "no rows": lambda t: t[4:4],
}
SOURCES = {
    "plain": lambda target: weight(*target.shape, seed=1),
    "plain bf16": lambda target: weight(*target.shape, seed=1).bfloat16(),
    "plain transposed": lambda target: weight(*reversed(target.shape), seed=1).permute(
        *reversed(range(target.dim()))
    ),
    "broadcast": lambda target: weight(1, target.shape[-1], seed=1)[0],
    "scalar": lambda target: torch.tensor(2.5),
    "integers": lambda target: torch.arange(target.numel()).view(target.shape),
    **{fmt: functools.partial(lambda fmt, t: quantized_like(t, fmt, False), fmt) for fmt in FORMATS},
    "blockwise with master": lambda target: quantized_like(target, "float8_blockwise", True),
    "window": lambda target: quantized_like(target, "float8_blockwise", False, extra_rows=3),
    "bf16 blockwise": lambda target: quantized_like(
        target, "float8_blockwise", False, dtype=torch.bfloat16
    ),
}


def quantized_like(target, fmt, keep_master, extra_rows=0, dtype=torch.float32):
    shape = target.shape if target.dim() > 1 else (2, *target.shape)
    full = weight(fit(fmt, shape[0] + extra_rows), *shape[1:], seed=2, dtype=dtype)
    q = ops.quantize(full, fmt, keep_master=keep_master)[extra_rows : extra_rows + shape[0]]
    return q if target.dim() > 1 else q[1]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("window", WINDOWS)
def test_copy_into_quantized(window, source):
    for fmt, keep_master in itertools.product(FORMATS, (False, True)):
        q = ops.quantize(weight(fit(fmt, ROWS), COLS), fmt, keep_master=keep_master)
        twin = value(q)
        target, twin_target = WINDOWS[window](q), WINDOWS[window](twin)
        src = SOURCES[source](twin_target)
        before = value(src)
        assert target.copy_(src) is target
        twin_target.copy_(before)
        assert_same(src, before)
        if keep_master:
            assert_same(q, twin)
        assert_same(ops.dequantize(q), rounded(twin, fmt))


@pytest.mark.parametrize("window", WINDOWS)
@keep_or_not
def test_copy_into_plain(keep_master, window):
    q = ops.quantize(weight(ROWS, COLS), "float8_blockwise", keep_master=keep_master)
    q.mul_(1.1)
    source = WINDOWS[window](q)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        target = torch.zeros(2, *source.shape, dtype=dtype)
        target.copy_(source)
        assert torch.equal(target, value(source).to(dtype).expand(target.shape))


@formats
def test_copy_between_row_windows_of_one_logical_tensor(fmt):
    """As FSDP2 does: chunk, new_zeros(padded), narrow, copy_. Codes move as bytes."""
    size = fit(fmt, 301)
    whole = ops.quantize(weight(size, 200), fmt)
    last = size // 76 * 76
    for first, rows in ((0, 76), (last, size - last), (size, 0)):
        chunk = whole[first : first + rows]
        shard = chunk.new_zeros(76, 200)
        shard.narrow(0, 0, rows).copy_(chunk)
        window = shard.narrow(0, 0, rows)
        assert_same(window, chunk)
        assert torch.equal(ops.codes(window).float(), ops.codes(chunk).float())
        layout = TensorState(shard).pack()[2]
        assert layout[4] == first  # the logical row of row 0
        assert_same(value(shard)[rows:], torch.zeros(76 - rows, 200))
        assert not TensorState(shard).has_pending_update()


# What a shard that is copied into new_zeros does with the scales that it shares with its template until
# then.
USES_OF_SHARED_SCALES = {
    "scale_inv": lambda q: double(ops.scale_inv(q)),
    "flush": lambda q: (q.copy_(weight(*q.shape, seed=1)), ops.flush([q])),
    "flush without a copy": lambda q: (q.add_(1), ops.flush([q])),
    "fused AdamW": lambda q: step(torch.optim.AdamW([q], lr=1.0, fused=True), q),
    "foreach SGD": lambda q: step(torch.optim.SGD([q], lr=1.0, foreach=True), q),
    "whole copy": lambda q: q.copy_(ops.quantize(weight(*q.shape, seed=1), ops.format(q))),
}


def double(scales):
    scales.copy_(scales.float() * 2)


def step(optimizer, parameter):
    parameter.requires_grad_().grad = weight(*parameter.shape, seed=2)
    optimizer.step()
    ops.codes(parameter.detach())


def copied_rows(template):
    new = template.new_zeros(template.shape).copy_(template)
    assert is_quantized(new)
    return new


@pytest.mark.parametrize("use", USES_OF_SHARED_SCALES)
@formats
@keep_or_not
def test_scales_of_a_new_shard_are_its_own_when_they_change(fmt, keep_master, use):
    size = fit(fmt, 130)
    template = ops.quantize(weight(size, 80), fmt, keep_master=keep_master)
    before = copy.deepcopy(template)
    shard, twin = copied_rows(template), copied_rows(template)
    assert_same_state(shard, copy.deepcopy(shard))
    USES_OF_SHARED_SCALES[use](shard)
    assert_same_state(template, before)
    assert_same_state(twin, copied_rows(template))
    assert_same_state(shard.detach(), copy.deepcopy(shard.detach()))
    if use != "scale_inv":
        whole = quantized_alike(value(shard.detach()), shard.detach(), keep_master)
        # Values of a row or block may be quantized by half of its scale, to the same.
        assert_same(ops.dequantize(whole), ops.dequantize(shard.detach()))


@formats
def test_a_template_written_later_leaves_its_new_shards_alone(fmt):
    size = fit(fmt, 130)
    template = ops.quantize(weight(size, 80), fmt)
    shard = copied_rows(template)
    shard[3:20].copy_(template[3:20])
    before = copy.deepcopy(shard)
    template.mul_(7)
    ops.flush([template])
    double(ops.scale_inv(template))
    assert_same_state(shard, before)
    assert_same(value(pickle.loads(pickle.dumps(shard))), value(before))


def test_rows_of_another_generation_never_leave_a_block_with_two_scales():
    old = ops.quantize(weight(130, 130), "float8_blockwise")
    new = old.clone()
    new.mul_(2.0**10)
    ops.flush([new])
    expected = value(old)
    expected[60:70] = value(new)[60:70]
    old[60:70].copy_(new[60:70])
    assert_same(ops.dequantize(old), rounded(expected, "float8_blockwise"))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if has_row_scales(f)])
def test_rows_copied_among_zeros_share_the_scales_of_their_blocks(fmt):
    """Zero rows have no scale, whatever that of the same rows of the source is."""
    size = fit(fmt, 100)
    source = ops.quantize(weight(size, 80), fmt)
    expected = torch.zeros(size, 80)
    expected[35:45] = value(source)[35:45]
    whole, plain = ops.quantize(expected, fmt), source.new_zeros(size, 80)
    plain[35:45].copy_(source[35:45])  # not its first rows: no shard
    assert not is_quantized(plain) and torch.equal(plain, expected)
    for new in (source.clone().zero_(), copied_rows(source).zero_()):
        new[35:45].copy_(source[35:45])
        assert torch.equal(bits(ops.scale_inv(new)), bits(ops.scale_inv(whole)))
        assert torch.equal(bits(ops.codes(new)), bits(ops.codes(whole)))
        if has_two_images(fmt):
            for plane in (ops.columnwise_codes, ops.columnwise_scale_inv):
                assert torch.equal(bits(plane(new)), bits(plane(whole)))


@formats
def test_random_programs_of_copies_writes_and_flushes(fmt):
    """Four tensors of one shape, with and without master, and plain twins of them."""
    rng, size = random.Random(fmt), fit(fmt, ROWS)
    for program in range(25):
        tensors = [
            ops.quantize(weight(size, COLS, seed=i), fmt, keep_master=i % 2 == 0) for i in range(3)
        ]
        # Delayed scaling's new shard waits for the flush that its peers take part in.
        make = copied_rows if fmt != "float8_delayed" else torch.clone
        tensors.append(make(tensors[program % 2]))
        twins = [value(t) for t in tensors]
        trace = []
        for _ in range(12):
            a, b = rng.randrange(4), rng.randrange(4)
            first = rng.choice((0, 0, 60, 128))
            rows = rng.choice((size - first, 10))
            factor = rng.choice((0.5, 3.0, 2.0**9))
            step = rng.choice(("write", "copy", "copy rows", "flush", "clone", "move rows"))
            trace.append((step, a, b, first, rows, factor))
            q, twin = tensors[a], twins[a]
            if step == "write":
                for t in (q, twin):
                    t[first : first + rows].mul_(factor)
            elif step == "copy":
                q.copy_(tensors[b])
                twin.copy_(twins[b])
            elif step == "copy rows":
                for t, s in ((q, tensors[b]), (twin, twins[b])):
                    t[first : first + rows].copy_(s[first : first + rows])
            elif step == "move rows":
                for t, s in ((q, tensors[b]), (twin, twins[b].clone())):
                    t[:10].copy_(s[20:30])
            elif step == "flush":
                ops.codes(q)
            elif step == "clone":
                tensors[a] = q.clone()
            ops.codes(tensors[a])  # flushes
            codes_show = ops.dequantize(quantized_alike(twins[a], tensors[a]))
            if not TensorState(tensors[a]).storage_bytes()["master"]:
                # A flush may round now. What was rounded before stays as it is, which rounding again
                # need not do: NVFP4 blocks far below the largest have coarse scales.
                if not torch.equal(value(tensors[a]), twins[a]):
                    twins[a] = codes_show
                codes_show = twins[a]
            assert_same(tensors[a], twins[a], trace)
            assert_same(ops.dequantize(tensors[a]), codes_show, trace)


# -------------------------------------------------------------------------- clone and to(...)


@formats
@keep_or_not
def test_clone_keeps_everything_but_storage(fmt, keep_master):
    q = ops.quantize(weight(fit(fmt, ROWS), COLS), fmt, keep_master=keep_master)
    q.mul_(1.1)
    copied = q.clone()
    assert is_quantized(copied) and copied.dtype == q.dtype
    assert_same(copied, q)
    assert_same_state(copied, q)
    copied.zero_()
    assert value(q).any() and not value(copied).any()
    assert is_quantized(q[:, :5].contiguous()) or not is_quantized(q[:, :5].clone())
    for window in WINDOWS.values():
        assert_same(window(q).clone(), value(window(q)))
        assert_same(window(q).contiguous(), value(window(q)))


@formats
@keep_or_not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrower_dtypes_move_nominal_and_master_together(fmt, keep_master, dtype):
    values = weight(fit(fmt, ROWS), COLS)
    q = ops.quantize(values, fmt, keep_master=keep_master)
    method = {torch.bfloat16: "bfloat16", torch.float16: "half"}[dtype]
    for narrow in (q.to(dtype), getattr(q, method)()):
        assert is_quantized(narrow) and narrow.dtype == dtype
        # The codes stay: the cast does not round them a second time.
        assert torch.equal(ops.codes(narrow).float(), ops.codes(q).float())
        assert_same(narrow, values.to(dtype) if keep_master else ops.dequantize(q).to(dtype))
        if keep_master:
            assert ops.master(narrow).dtype == dtype
        expected = value(narrow).add_(1)
        assert_same(narrow.add_(1), expected)
        assert_same(ops.dequantize(narrow), rounded(expected, fmt))


@formats
def test_between_narrow_dtypes_the_value_is_cast(fmt):
    """Without a master bfloat16 has rounded what the codes stand for: no codes show just that."""
    q = ops.quantize(weight(fit(fmt, ROWS), COLS, dtype=torch.bfloat16), fmt)
    half = q.half()
    assert is_quantized(half) and TensorState(half).storage_bytes()["pending"] == 2 * half.numel()
    expected = value(q).half()
    assert_same(half, expected)
    assert_same(ops.dequantize(half), ops.dequantize(quantized_alike(expected, half, False)))


@formats
def test_wider_dtypes_are_plain(fmt):
    q = ops.quantize(weight(fit(fmt, 20), 32, dtype=torch.bfloat16), fmt)
    for wide, dtype in (
        (q.float(), torch.float32),
        (q.double(), torch.float64),
        (q.int(), torch.int32),
    ):
        assert not is_quantized(wide) and wide.dtype == dtype
        assert_same(wide, ops.dequantize(q).to(dtype))
    assert q.to(torch.bfloat16) is q and q.cpu() is q and q.contiguous() is q
    assert is_quantized(q.to("cpu", copy=True))


@keep_or_not
def test_copies_to_the_meta_device_have_no_values(keep_master):
    q = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=keep_master)
    on_meta = torch.empty_like(q, device="meta")
    assert is_quantized(on_meta) and on_meta.is_meta and on_meta.shape == q.shape
    again = torch.empty_like(on_meta, device="cpu")
    assert is_quantized(again) and not again.is_meta
    again.copy_(q)
    assert_same(again, q)
    with pytest.raises(RuntimeError, match="cannot copy a quantized tensor out of the meta device"):
        on_meta.to("cpu")


@pytest.mark.xfail(
    strict=True, reason="BackendSelect sends _to_copy(device=meta) to the Meta kernel"
)
def test_to_meta_keeps_the_kind():
    assert is_quantized(ops.quantize(weight(20, 32), "float8_blockwise").to("meta"))


def test_cat_stack_and_mixed_lists():
    c = weight(5, 32, seed=5)
    for formats in itertools.pairwise(FORMATS):
        a, b = (ops.quantize(weight(32, 32, seed=i), f) for i, f in enumerate(formats))
        assert_same(torch.cat([a, b, c]), torch.cat([value(a), value(b), c]))
        assert_same(torch.cat([a[:, :3], b], 1), torch.cat([value(a)[:, :3], value(b)], 1))
        assert_same(torch.stack([a, b]), torch.stack([value(a), value(b)]))


@pytest.mark.parametrize("keep_master", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_cat_of_consecutive_rows_keeps_codes_scales_and_master(format, keep_master):
    q = ops.quantize(weight(320, 33), format, keep_master=keep_master)
    rows = q[32:256]
    again = torch.cat(rows.split(56))
    assert is_quantized(again) and again.shape == rows.shape
    assert_same(again, rows)
    planes = [ops.codes, ops.scale_inv]
    if format == "mxfp8_1x32":
        planes += [ops.columnwise_codes]
    for plane in planes:
        assert torch.equal(plane(again).view(torch.uint8), plane(rows).view(torch.uint8))


def test_cat_of_other_rows_is_plain():
    q = ops.quantize(weight(300, 32), "float8_blockwise")
    first, second, third = q.split(100)
    other = ops.quantize(weight(300, 32, seed=1), "float8_blockwise")[100:200]
    for pieces in ([first, third], [second, first], [first, other], [first, second.contiguous() + 0]):
        assert not is_quantized(torch.cat(pieces))
        assert_same(torch.cat(pieces), torch.cat([value(p) if is_quantized(p) else p for p in pieces]))
