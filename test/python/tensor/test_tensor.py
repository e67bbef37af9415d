"""What a quantized tensor is: type, factories, printing, odd sizes, odd values. Views are in test_views.py;
copies and clones in test_copies.py, pickles in test_deepcopies_and_pickles.py."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BLOCK,
    FORMATS,
    ONE_ROW,
    assert_same,
    code_cols,
    fit,
    grid_bytes,
    has_row_scales,
    is_quantized,
    ops,
    rounded,
    round_up,
    row_bytes,
    scale_shape,
    shown,
    value,
    weight,
)
from models.weights import is_dirty

from qshard._runtime import hooks
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

keep_or_not = pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])
formats = pytest.mark.parametrize("fmt", FORMATS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

FP8_MAX = 448.0


@formats
@keep_or_not
@dtypes
def test_it_is_a_tensor(fmt, keep_master, dtype):
    rows = fit(fmt, 150)
    values = weight(rows, 140, dtype=dtype)
    q = ops.quantize(values, fmt, keep_master=keep_master)
    assert type(q) is torch.Tensor and type(torch.nn.Parameter(q)) is torch.nn.Parameter
    assert q.dtype == dtype and q.device.type == "cpu" and q.layout == torch.strided
    assert q.shape == (rows, 140) and q.stride() == (140, 1) and q.is_contiguous() and q.is_leaf
    assert q.is_floating_point() and not q.is_sparse and not q.is_meta
    assert (q.nbytes, q.element_size()) == (values.nbytes, values.element_size())
    assert ops.is_quantized(q) and not ops.is_quantized(values)
    assert ops.format(q) == fmt
    assert_same(q, values if keep_master else rounded(values, fmt))

    codes, scale_inv = ops.codes(q), ops.scale_inv(q)
    assert codes.dtype == (torch.uint8 if info_of(fmt).code_bits == 4 else torch.float8_e4m3fn)
    assert codes.shape == (rows, code_cols(fmt, 140))
    row_scales = {"mxfp8": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}
    row_scales["nvfp4_1x16"], row_scales["mxfp8_1x32"] = row_scales["nvfp4"], row_scales["mxfp8"]
    assert scale_inv.dtype == row_scales.get(fmt, torch.float32)
    assert scale_inv.shape == scale_shape(fmt, rows, 140)
    assert_same(ops.dequantize(q), shown(q).to(dtype))
    for wanted in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert_same(ops.dequantize(q, dtype=wanted), shown(q).to(wanted))

    master = ops.master(q)
    if not keep_master:
        assert master is None
        return
    assert_same(master, values)
    master.mul_(2)  # an alias: the tensor sees the write
    assert_same(q, values * 2)
    assert_same(ops.dequantize(q), rounded(values * 2, fmt))


@formats
@keep_or_not
def test_storage_is_the_master_or_the_codes(fmt, keep_master):
    rows = fit(fmt, 150)
    q = ops.quantize(weight(rows, 140), fmt, keep_master=keep_master)
    image, master = rows * row_bytes(fmt, 140), rows * 140 * 4 if keep_master else 0
    grid = grid_bytes(fmt, rows, 140)
    planes = TensorState(q).storage_bytes()
    assert planes["image"] == image and planes["master"] == master and planes["grid"] == grid
    codes = image + round_up(grid, 16)
    assert planes["storage"] == master + codes
    assert q.untyped_storage().nbytes() == (master if keep_master else codes)
    q.mul_(1.5)
    assert TensorState(q).storage_bytes()["pending"] == (0 if keep_master else rows * 140 * 4)
    ops.flush([q])
    assert TensorState(q).storage_bytes()["pending"] == 0
    assert q[3:9].t().untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


# ----------------------------------------------------------------------------------- factories


# What a factory makes of a tensor, or of its plain twin.
NEW = {
    "new_zeros": lambda t: t.new_zeros(t.shape),
    "new_empty": lambda t: t.new_empty(t.shape),
    "empty_like": torch.empty_like,
    "new_zeros of few rows": lambda t: t.new_zeros(32, 140),
    "new_zeros of other columns": lambda t: t.new_zeros(32, 3),
    "new_zeros of other dimensions": lambda t: t.new_zeros(4, 32, 6),
    "new_zeros of a scalar": lambda t: t.new_zeros(()),
    "new_zeros in bfloat16": lambda t: t.new_zeros(32, 140, dtype=torch.bfloat16),
    "new_zeros in float64": lambda t: t.new_zeros(3, 4, dtype=torch.float64),
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 2.0),
    "rand_like": torch.rand_like,
    "empty_like in int64": lambda t: torch.empty_like(t, dtype=torch.int64),
    "empty_like of t()": lambda t: torch.empty_like(t.t()),
    "empty_like of rows": lambda t: torch.empty_like(t[7:33]),
    "new_ones": lambda t: t.new_ones(3, 4),
    "new_full": lambda t: t.new_full((3, 4), 1.0),
    "new_tensor": lambda t: t.new_tensor([1.0]),
    "new": lambda t: t.new(3, 4),
}


@pytest.mark.pairwise
@formats
@keep_or_not
@pytest.mark.parametrize("name", NEW)
def test_factories_make_plain_tensors(fmt, keep_master, name):
    """What is written into them are values, of which nothing is rounded."""
    q = ops.quantize(weight(fit(fmt, 150), 140), fmt, keep_master=keep_master)
    torch.manual_seed(0)
    made = NEW[name](q)
    torch.manual_seed(0)
    twin = NEW[name](value(q))
    assert type(made) is torch.Tensor and not is_quantized(made)
    assert (made.dtype, made.shape, made.stride()) == (twin.dtype, twin.shape, twin.stride())
    if "empty" not in name and name != "new":
        assert torch.equal(made, twin)
    made.data_ptr()
    values = weight(*made.shape, 1)[..., 0].to(made.dtype)
    made.copy_(values)
    assert not is_quantized(made) and torch.equal(made, values)
    if made.dim() == 2 and made.is_floating_point():
        x = torch.eye(made.shape[1], dtype=made.dtype)
        assert torch.equal(F.linear(x, made), F.linear(x, values))
        assert torch.equal(made.mul_(3), values * 3)


def test_factories_keep_dtype_and_memory_format():
    q = ops.quantize(weight(6, 4, 3, 3), "float8_blockwise")
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.zeros_like(q.to(dtype)).dtype == q.to(dtype).new_zeros(2, 4, 3, 3).dtype == dtype
    last = torch.empty_like(q, memory_format=torch.channels_last)
    assert last.is_contiguous(memory_format=torch.channels_last) and not is_quantized(last)


ROWS_OF = {
    "all": lambda q: slice(None),
    "the first": lambda q: slice(0, 32),
    "some": lambda q: slice(32, 96),
    "the last": lambda q: slice(q.size(0) - 32, None),
}


@pytest.mark.pairwise
@formats
@keep_or_not
@pytest.mark.parametrize("extra", [0, 32])
@pytest.mark.parametrize("rows", ROWS_OF)
@pytest.mark.parametrize("factory", ["new_zeros", "new_empty", "empty_like"])
def test_rows_copied_into_a_new_tensor_make_it_a_shard(fmt, keep_master, factory, rows, extra):
    """What trainers do by hand that FSDP2 does. `extra` rows after them are padding, where these are the
    last of the chunks that FSDP2 makes: what else has more is a cache, filled a few rows at a time."""
    size = fit(fmt, 150)
    q = ops.quantize(weight(size, 140), fmt, keep_master=keep_master)
    chunk = q[ROWS_OF[rows](q)]
    first, count = chunk.storage_offset() // 140, chunk.size(0)
    extra = min(extra, size - count)
    if factory == "empty_like":
        new = torch.empty_like(q[: count + extra])
    else:
        new = getattr(q, factory)(count + extra, 140)
    before = value(chunk)
    assert new[:count].copy_(chunk).shape == chunk.shape
    ends = first + count == size and first % (count + extra) == 0
    assert is_quantized(new) == (extra == 0 or ends)
    assert_same(new[:count], before)
    if not is_quantized(new):
        return
    assert type(new) is torch.Tensor and ops.format(new) == fmt
    assert TensorState(new).keeps_master() == keep_master and not is_dirty(new)
    # Rows of the same logical tensor.
    assert TensorState(new).pack()[2][:5] == [count + extra, 140, size, size, first]
    assert torch.equal(ops.codes(new[:count]).float(), ops.codes(chunk).float())
    assert not value(new[count:]).any()
    values = torch.zeros(size, 140)
    values[first:] = weight(size - first, 140, seed=1)
    live = new[:count]
    live.copy_(values[first : first + count])
    if keep_master:
        assert_same(live, values[first : first + count])
    values[first + count :] = 0
    assert_same(ops.dequantize(live), rounded(values, fmt)[first : first + count])
    assert_same(chunk, before)


# Copies after which what new_zeros made of `q` is plain; what they return is kept.
NO_SHARD = {
    "not from row 0": lambda new, q: new[3:20].copy_(q[3:20]),
    "fewer rows": lambda new, q: new[:20].copy_(q[:20]),
    "columns": lambda new, q: new[:, :64].copy_(q[:, :64]),
    "transposed": lambda new, q: new.view(140, 150).t().copy_(q),
    "every second row": lambda new, q: new[:75].copy_(q[::2]),
    "broadcast": lambda new, q: new.copy_(q[149:]),
    "written before": lambda new, q: new.add_(1).copy_(q),
    "zeroed before": lambda new, q: new.zero_().copy_(q),
    "a row written before": lambda new, q: (new[5].fill_(1), new.copy_(q)),
    "read into before": lambda new, q: (torch.mul(q, 2, out=new), new.copy_(q)),
    "a Parameter": lambda new, q: (p := torch.nn.Parameter(new), p.data.copy_(q)),
    "an alias": lambda new, q: (new.detach(), new.copy_(q)),
    "a view": lambda new, q: (new[3:], new.copy_(q)),
    "an array": lambda new, q: (new.numpy(), new.copy_(q)),
}
# Sources of another format, kind, dtype or tensor than the one that new_zeros was asked of.
OTHER_SOURCES = {
    "format": lambda q, keep: ops.quantize(value(q), "mxfp8", keep_master=keep),
    "kind": lambda q, keep: blockwise(value(q), not keep),
    "dtype": lambda q, keep: q.bfloat16(),
    "tensor": lambda q, keep: blockwise(value(q)[:75], keep),
    "matrices": lambda q, keep: blockwise(value(q).view(2, 75, 140), keep)[0],
}


def blockwise(values, keep_master):
    return ops.quantize(values, "float8_blockwise", keep_master=keep_master)


@keep_or_not
@pytest.mark.parametrize("how", NO_SHARD)
def test_other_copies_into_a_new_tensor_are_of_values(how, keep_master):
    q = blockwise(weight(150, 140), keep_master)
    new, twin = q.new_zeros(150, 140), torch.zeros(150, 140)
    kept = NO_SHARD[how](new, q)
    NO_SHARD[how](twin, value(q))
    assert not is_quantized(new) and torch.equal(new, twin)
    del kept
    assert torch.equal(new.copy_(q), value(q))
    assert not is_quantized(new) or how == "a Parameter"  # .data moves no counter of its tensor's


@keep_or_not
@pytest.mark.parametrize("other", OTHER_SOURCES)
def test_copies_of_others_into_a_new_tensor_are_of_values(other, keep_master):
    q = blockwise(weight(150, 140), keep_master)
    source = OTHER_SOURCES[other](q, keep_master)
    for new in (q.new_zeros(150, 140), torch.empty_like(q)):
        new[: len(source)].copy_(source)
        assert not is_quantized(new)
        assert torch.equal(new[: len(source)], value(source).float())


@pytest.mark.parametrize(
    "name",
    "xavier_uniform_ kaiming_normal_ orthogonal_ trunc_normal_ eye_ sparse_ zeros_ dirac_".split(),
)
def test_initialisers_write_as_on_a_plain_tensor(name):
    shape = (6, 4, 3) if name == "dirac_" else (20, 32)
    args = (0.1,) if name == "sparse_" else ()
    q = ops.quantize(weight(*shape), "float8_blockwise", keep_master=True)
    twin = value(q)
    for t in (q, twin):
        torch.manual_seed(5)
        getattr(torch.nn.init, name)(t, *args)
    assert_same(q, twin)


# ------------------------------------------------------------------------------------- printing


@keep_or_not
def test_printing_shows_values(keep_master, capsys):
    q = ops.quantize(weight(20, 16), "float8_blockwise", keep_master=keep_master)
    for t in (q, q[3], q[3, 4], q.t(), q[:0], q.view(4, 5, 16), torch.nn.Parameter(q)):
        plain = value(t)
        assert t.tolist() == plain.tolist()
        text = repr(t)
        print(t)
        assert str(t) == text and capsys.readouterr().out in (f"{t}\n", f"{text}\n")
        numbers = re.findall(r"-?\d\.\d+(?:e[+-]\d+)?", text)
        assert numbers == re.findall(r"-?\d\.\d+(?:e[+-]\d+)?", repr(plain))
    assert q[3, 4].item() == float(q[3, 4]) == value(q)[3, 4].item()
    assert [row.tolist() for row in q] == value(q).tolist()
    assert len(q) == 20 and (q == q).all()


def test_nan_and_inf():
    values = weight(320, 140)
    values[3, 5], values[140, 139], values[319, 0] = float("inf"), float("nan"), -float("inf")
    for fmt in FORMATS:
        got = ops.dequantize(ops.quantize(values, fmt))
        assert got[140, 139].isnan()
        if has_row_scales(fmt):
            # Only E8M0 reaches infinity. NaN is a scale there: its block is lost, and no other.
            assert got[3, 5] == (float("inf") if info_of(fmt).gemm.scale_mode == "1x32" else 6 * FP8_MAX)
            cols, rows = BLOCK[fmt], 1 if fmt in ONE_ROW else BLOCK[fmt]
            around = got[140 // rows * rows :, 139 // cols * cols :][:rows, :cols]
            assert around.isnan().all() and got.isnan().sum() == around.numel()
            continue
        # A block with an infinite amax has scale 1: what does not fit saturates or turns NaN, as
        # the cast itself does; other blocks keep their values.
        expected = values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        assert_same(got[3, 6:100], expected[3, 6:100])
        if fmt == "float8_blockwise":
            assert_same(got[:128, 128:], rounded(values[:128, 128:], fmt))
    kept = ops.quantize(values, "float8_blockwise", keep_master=True)
    assert_same(kept, values)
    kept.nan_to_num_(0.0, 1.0, -1.0)
    assert_same(
        ops.dequantize(kept), rounded(values.nan_to_num(0.0, 1.0, -1.0), "float8_blockwise")
    )


@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (0, 0), (3, 0, 8), (0, 4, 8), (1, 1)], ids=str)
@formats
@keep_or_not
def test_sizes_of_zero_and_one(fmt, keep_master, shape):
    shape = (*shape[:-2], fit(fmt, shape[-2]), shape[-1])
    values = torch.full(shape, 1.5)
    q = ops.quantize(values, fmt, keep_master=keep_master)
    assert q.shape == shape and ops.codes(q).shape == (*shape[:-1], code_cols(fmt, shape[-1]))
    # NVFP4's scale of the tensor is a little off 1.5 / (6 * 448).
    exact = rounded(values, fmt) if info_of(fmt).code_bits == 4 else values
    torch.testing.assert_close(exact, values, rtol=2**-16, atol=0)
    assert_same(q, values if keep_master else exact)
    assert_same(ops.dequantize(q), exact)
    q.mul_(2).add_(1)
    ops.flush([q])
    assert_same(q, values * 2 + 1 if keep_master else rounded(exact * 2 + 1, fmt))
    q.copy_(values)
    q.zero_()
    for t in (q.clone(), q.t() if len(shape) == 2 else q, q.view(-1), torch.empty_like(q), q[:0]):
        assert_same(t, value(t))
    assert q.sum() == 0 and torch.cat([q, q]).shape[0] == 2 * shape[0]
    repr(q), q.tolist()
    torch.optim.AdamW([torch.nn.Parameter(q)]).step()


def test_linear_without_rows_or_columns():
    for n, k, batch in ((0, 16, 3), (5, 0, 3), (5, 16, 0)):
        q = ops.quantize(torch.ones(n, k), "float8_blockwise")
        x = torch.ones(batch, k, requires_grad=True)
        y = F.linear(x, q.requires_grad_())
        assert_same(y, F.linear(x.detach(), torch.ones(n, k)))
        y.sum().backward()
        assert x.grad.shape == x.shape and q.grad.shape == q.shape


# -------------------------------------------------------------------------- whether it is quantized


def test_our_python_asks_for_the_key_alone():
    """torch's function for it makes a set of keys, in 25 times as long."""
    asked = hooks.holds_codes
    q, plain = ops.quantize(weight(20, 32), "float8_blockwise"), torch.ones(2)
    called = []
    sys.setprofile(lambda _, event, arg: event == "c_call" and called.append(arg.__name__))
    try:
        answers = asked(q), asked(plain)
    finally:
        sys.setprofile(None)
    assert answers == (True, False)
    assert called.count("has_key") == 2 and "_dispatch_keys" not in called
    compiled = torch.compile(lambda t: t + asked(t), backend="eager", fullgraph=True)
    assert_same(compiled(plain), plain)


# ------------------------------------------------------------------------------------ impostors


def test_tensors_that_only_carry_the_key_are_refused():
    """The code of Inductor's cpp_wrapper reinterprets tensors with their key set; what it makes of ours has
    no buffer."""
    q = ops.quantize(weight(20, 32), "float8_blockwise")
    impostor = torch.ops.inductor._reinterpret_tensor(q, (4, 8), (8, 1), 0)
    assert torch._C._dispatch_keys(impostor).has(torch._C.DispatchKey.PrivateUse3)
    assert not ops.is_quantized(impostor)
    for call in (
        lambda: impostor + 1,
        lambda: impostor.mul_(2),
        lambda: impostor.clone(),
        lambda: impostor.detach(),
        lambda: impostor[0],
        lambda: impostor.t(),
        lambda: impostor.unsqueeze(0),
        lambda: impostor.to(torch.bfloat16),
        lambda: torch.empty_like(impostor),
        lambda: impostor.new_zeros(3, 3),
        lambda: q.copy_(impostor.expand(20, 8)),
        lambda: q[:4, :8].copy_(impostor),
        lambda: torch.zeros(4, 8).copy_(impostor),
        lambda: torch.zeros(3, 8) @ impostor.t(),
        lambda: torch.mm(torch.zeros(3, 4), impostor),
        lambda: F.linear(torch.zeros(3, 8), impostor),
        lambda: torch._foreach_add_([q, impostor], 1.0),
        lambda: torch.add(torch.zeros(4, 8), 1, out=impostor),
        lambda: ops.codes(impostor),
        lambda: ops.flush([impostor]),
        lambda: ops.quantize(impostor, "float8_blockwise"),
        lambda: TensorState(impostor).pack(),
        lambda: repr(impostor),
    ):
        with pytest.raises(RuntimeError, match="is not a quantized tensor; a compiler"):
            call()
    assert_same(q, rounded(weight(20, 32), "float8_blockwise"))
