"""Writes that overlap what they read, fail, or write no elements, and copies that wait for a value.
Found by random programs (random_programs.py)."""

import pytest
import torch
from helpers import assert_same, assert_unchanged, is_quantized, ops, state, value, weight
from models.weights import is_dirty
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from qshard._runtime.classes import TensorState

keep_or_not = pytest.mark.parametrize("keep_master", [False, True], ids=["no master", "master"])


def make(keep_master, rows=20, cols=32, fmt="float8_blockwise"):
    return ops.quantize(weight(rows, cols), fmt, keep_master=keep_master)


def make_shard(keep_master, rows=20):
    """Rows of a bigger tensor: only a collective could flush it."""
    whole = dict(logical_rows=200, row_offset=100)
    return ops.quantize(weight(rows, 32), "float8_blockwise", keep_master=keep_master, **whole)


# ------------------------------------------------------------------------- overlapping sources

OVERLAPS = {
    "the first row": lambda t: t.copy_(t[:1]),
    "shifted rows": lambda t: t[1:].copy_(t[:-1]),
    "the first column": lambda t: t.copy_(t[:, :1]),
    "shifted columns": lambda t: t[:, 1:].copy_(t[:, :-1]),
    "add_ the first row": lambda t: t.add_(t[:1]),
    "itself": lambda t: t.copy_(t),
    "a view of all": lambda t: t.copy_(t.view(t.shape)),
    "a row itself": lambda t: (row := t.as_strided((1, 9), (7, 1), 3)).copy_(row),
    "one row by other strides": lambda t: t[:1].copy_(t.as_strided((1, 32), (9, 1))),
    "expanded, itself": lambda t: (rows := t[:1].expand(4, -1)).copy_(rows),
    "disjoint rows": lambda t: t[:4].copy_(t[4:8]),
    "a row below": lambda t: t[:4].copy_(t[5:6]),
}


def outcome(write, tensor):
    try:
        write(tensor)
    except RuntimeError as error:
        return str(error)
    return None


@keep_or_not
@pytest.mark.parametrize("written", [False, True], ids=["flushed", "written"])
@pytest.mark.parametrize("name", OVERLAPS)
def test_sources_that_overlap_are_refused_as_torch_does(name, written, keep_master):
    q = make(keep_master)
    if written:
        q.mul_(1.5)
    plain = value(q).clone()
    expected = outcome(OVERLAPS[name], plain)
    assert outcome(OVERLAPS[name], q) == expected
    assert_same(value(q), plain)


# -------------------------------------------------------------------------- writes that fail

FAILS = {
    "mul_ of an expanded row": lambda t: t[:1].expand(4, -1).mul_(2),
    "add_ of another shape": lambda t: t.add_(torch.ones(3, 5)),
    "masked_fill_ of another shape": lambda t: t.masked_fill_(torch.ones(3, 5).bool(), 1.0),
    "bitwise_or_ of floats": lambda t: t.bitwise_or_(1),
}


@keep_or_not
@pytest.mark.parametrize("name", FAILS)
def test_what_failed_before_it_wrote_is_not_written(name, keep_master):
    """Else ranks would meet in a flush that their peers, without rows or errors, do not enter."""
    q = make(keep_master)
    ops.flush([q])
    before = state(q)
    with pytest.raises((RuntimeError, NotImplementedError)):
        FAILS[name](q)
    assert_unchanged(q, before)
    assert not is_dirty(q)


def test_a_list_that_fails_half_way_is_written():
    q = make(True)
    ops.flush([q])
    with pytest.raises(RuntimeError):
        torch._foreach_add_([q, q], [torch.ones(20, 32), torch.ones(3, 5)])
    assert is_dirty(q)


def freed(q):
    """What FSDP leaves of a gathered weight."""
    gathered = ops._post_all_gather(q, ops._pre_all_gather(q, "").clone(), torch.float32)
    gathered.untyped_storage().resize_(0)
    return gathered


def zeros(tensors):
    return [torch.zeros(20, 32) for _ in tensors]


def fused_adamw(tensors):
    lists = [zeros(tensors) for _ in range(3)]
    steps = [torch.ones(()) for _ in tensors]
    flags = dict(weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
    torch._fused_adamw_(tensors, *lists, [], steps, lr=0.1, beta1=0.9, beta2=0.99, **flags)


LISTS = {
    "_foreach_mul_": lambda ts: torch._foreach_mul_(ts, 2.0),
    "_foreach_add_": lambda ts: torch._foreach_add_(ts, zeros(ts)),
    "_foreach_copy_": lambda ts: torch._foreach_copy_(ts, zeros(ts)),
    "_foreach_zero_": lambda ts: torch._foreach_zero_(ts),
    "_foreach_norm": lambda ts: torch._foreach_norm(ts),
    "_fused_adamw_": fused_adamw,
    "stack out=": lambda ts: torch.stack(ts[1:], out=ts[0].view(1, 20, 32).expand(len(ts) - 1, -1, -1)),
}


@pytest.mark.parametrize("fmt", ["float8_blockwise", "mxfp8"])
@pytest.mark.parametrize("position", [0, 3, 7])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_which_one_was_freed_leaves_the_others_as_they_were(name, position, fmt):
    codes, master = make(False, fmt=fmt), make(True, fmt=fmt)
    gathered = ops._post_all_gather(codes, ops._pre_all_gather(codes, "").clone(), torch.float32)
    written = [make(keep_master, fmt=fmt).mul_(2) for keep_master in (False, True)]
    shards = [q.new_zeros(20, 32).copy_(q) for q in (codes, master)]
    others = [codes, master, gathered, *written, *shards]

    def memory():
        return [(TensorState(q).storage_bytes(), is_dirty(q), q._version) for q in others]

    before, planes = memory(), [state(q) for q in others]
    with pytest.raises(RuntimeError, match="was freed"):
        LISTS[name]([*others[:position], freed(make(False, fmt=fmt)), *others[position:]])
    assert memory() == before
    for q, was in zip(others, planes):
        assert_unchanged(q, was)


# ------------------------------------------------------------------- copies that wait for a value


def image_copy(tensor):
    """A copy that has codes alone, and takes its value before that of the original changes."""
    copied = tensor.to(tensor.device, non_blocking=True, copy=True)
    assert TensorState(copied).storage_bytes()["master"] == 0
    return copied


NOTHING = {
    "rows": lambda t: t[5:5].mul_(2),
    "columns": lambda t: t[:, 3:3].fill_(2),
    "copy_": lambda t: t[5:5].copy_(torch.ones(0, 32)),
    "out=": lambda t: torch.mul(t[5:5], 2, out=t[5:5]),
    "a list": lambda t: torch._foreach_mul_([t[5:5], t[3:3]], 2),
}


@keep_or_not
@pytest.mark.parametrize("name", NOTHING)
def test_writes_of_no_elements_leave_copies_readable(name, keep_master):
    q = make_shard(keep_master)
    before, copied = value(q).clone(), image_copy(q)
    NOTHING[name](q)
    assert_same(value(copied), before)
    assert_same(value(q), before)


@keep_or_not
@pytest.mark.parametrize("fmt", ["float8_delayed", "float8_blockwise_fp32_scale", "nvfp4"])
@pytest.mark.parametrize("name", NOTHING)
def test_writes_of_no_elements_round_nothing_again(name, fmt, keep_master):
    values = weight(20, 32)
    values[0] = 37.3 * values.abs().max()
    whole = ops.quantize(values, fmt, keep_master=keep_master)
    part = whole.new_zeros(10, 32).copy_(whole[10:])  # codes by an amax of other rows
    before, shown = value(part).clone(), ops.dequantize(part)
    NOTHING[name](part)
    assert is_dirty(part)  # as on its peers
    assert_same(ops.dequantize(part), shown)
    assert_same(value(part), before)  # which reading codes has not rounded


@keep_or_not
def test_copies_have_a_pending_write_of_their_own(keep_master):
    q = make_shard(keep_master)
    q.mul_(1.5)
    before, copied = value(q).clone(), image_copy(q)
    q.mul_(2)
    assert_same(value(copied), before)
    copied.mul_(3)
    assert_same(value(q), before * 2)


@keep_or_not
def test_copies_of_a_written_shard_show_codes_of_their_own(keep_master):
    """A copy waits for no other rank, as other copies do."""
    q = make_shard(keep_master)
    q.mul_(1.5)
    assert_same(ops.dequantize(image_copy(q)), ops.dequantize(q.clone()))
    with pytest.raises(RuntimeError, match="flush"):
        ops.codes(q)


@keep_or_not
def test_rows_put_together_again_are_a_copy(keep_master):
    whole = make(keep_master)
    again = torch.cat([whole[:4], whole[4:]])
    assert is_quantized(again)
    assert_same(ops.dequantize(again.mul_(2)), ops.dequantize(whole.clone().mul_(2)))
    shard = whole.new_zeros(10, 32).copy_(whole[10:])
    TensorState(shard).set_reduction_group("")  # adopted: other rows are elsewhere
    again = torch.cat([shard[:4], shard[4:]])
    assert is_quantized(again)
    assert_same(ops.dequantize(again.mul_(2)), ops.dequantize(shard.clone().mul_(2)))
    # A rank without rows cannot tell that its pieces do not follow one another.
    for pieces in ([shard, shard], [shard[:0], shard[:0]]):
        again, expected = torch.cat(pieces), torch.cat([value(p) for p in pieces])
        assert not is_quantized(again)
        assert_same(again, expected)
    shard.mul_(2)
    with pytest.raises(RuntimeError, match="flush"):
        ops.dequantize(shard)


def test_codes_of_a_pending_write_are_not_its_value():
    """Read alone, a shard shows codes, and keeps its value for the flush of all ranks."""
    q = make_shard(False).clone().mul_(1.1)
    before = value(q).clone()
    ops.dequantize(q)
    assert_same(value(q), before)
    assert_same(value(q.clone().zero_().copy_(q)), before)
    assert_same(value(torch.cat([q[:4], q[4:]])), before)
    assert_same(value(q.new_zeros(20, 32).copy_(q)), before)


@keep_or_not
@pytest.mark.parametrize("fmt", ["nvfp4", "float8_blockwise_fp32_scale"])
def test_a_narrower_source_gives_its_narrow_values(fmt, keep_master):
    q = make(keep_master, fmt=fmt)
    narrow = q.to(torch.bfloat16)
    q.copy_(narrow)
    assert_same(value(q), value(narrow).float())


# ------------------------------------------------------------------------------ without elements


def test_rows_that_are_not_there_are_read():
    shard = make_shard(True)
    empty = shard.new_empty(0, 32).copy_(shard[:0])
    assert is_quantized(empty)
    empty.add_(1)
    assert ops.dequantize(empty).shape == (0, 32) and ops.codes(empty).shape[0] == 0


@keep_or_not
def test_new_empty_of_a_scalar_is_plain(keep_master):
    scalar = make(keep_master)[3, 4]
    for new in (scalar.new_empty(()), scalar.new_empty(scalar.shape)):
        assert not is_quantized(new)
        assert new.copy_(scalar) == value(scalar)


@pytest.mark.parametrize("first", [0, 5])
def test_empty_windows_are_staged(first):
    """As async saves stage the shard of a rank without rows: it lies in padding. What has no values needs
    no codes."""
    q = make(True)
    padded = q.new_zeros(1, 32)
    padded[:0].copy_(q[20:])
    assert is_quantized(padded)
    for empty in (q[first:first], padded[:0]):
        staged = StateDictStager().stage({"weight": empty})["weight"]
        assert (staged.shape, staged.dtype, staged.device) == (empty.shape, empty.dtype, empty.device)
        assert empty.copy_(staged) is empty
