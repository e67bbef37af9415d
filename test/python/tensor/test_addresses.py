"""Where a master is kept, a tensor is an ordinary strided tensor to code that looks at its memory, and
what writes there without a word is seen by its version counter, or by the gradient that its optimizer
stepped with."""

import copy
import ctypes
import gc

import pytest
import torch
from helpers import FORMATS, assert_same, bits, fit, is_quantized, ops, quantized_alike, value, weight
from models.weights import is_dirty
from torch.nn import Parameter

from qshard._runtime.classes import TensorState

formats = pytest.mark.parametrize("fmt", FORMATS)


def make(fmt="float8_blockwise", rows=129, cols=47, dtype=torch.float32):
    return ops.quantize(weight(fit(fmt, rows), cols, dtype=dtype), fmt, keep_master=True)


def write_behind(tensor, factor=2.0):
    """Multiplies fp32 values in place as a kernel that is given an address does."""
    count = tensor.untyped_storage().nbytes() // 4
    floats = (ctypes.c_float * count).from_address(tensor.untyped_storage().data_ptr())
    for i in range(count):
        floats[i] *= factor


def assert_codes_are_of_the_value(q):
    assert_same(ops.dequantize(q.detach()), ops.dequantize(quantized_alike(value(q), q.detach())))


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_that_of_a_plain_tensor(fmt, dtype):
    q = make(fmt, dtype=dtype)
    plain = value(q)
    for view in (q, q[3:9], q.t(), q[:, 5], q[::2, 1:7], q.view(-1)[7:]):
        twin = plain.as_strided(view.shape, view.stride(), view.storage_offset())
        assert view.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
        offset = view.storage_offset() * plain.element_size()
        assert view.data_ptr() == q.data_ptr() + offset
        assert torch.equal(torch.from_dlpack(view), twin)
        if dtype == torch.float32:
            assert torch.equal(torch.from_numpy(view.numpy()), twin)
    assert q.data_ptr() == q.untyped_storage().data_ptr() == ops.master(q).data_ptr()
    assert q.storage().size() == q.numel()
    for other in (q.clone(), torch.empty_like(q).copy_(q), q.new_zeros(q.shape).copy_(q), q.detach()):
        assert is_quantized(other) and other.untyped_storage().nbytes() == q.numel() * q.itemsize


def test_without_a_master_there_is_no_address():
    q = ops.quantize(weight(40, 32), "nvfp4")
    with pytest.raises(RuntimeError, match="nvfp4 are codes and scales"):
        q.data_ptr()


@formats
def test_a_moved_version_counter_is_a_write(fmt):
    """Inductor's code writes to memory and bumps the tensor's counter, or a view's."""
    for of in (lambda q: q, lambda q: q[2:5], lambda q: q.t(), lambda q: q.detach(), ops.master):
        q = make(fmt)
        before = value(q)
        ops.codes(q)
        write_behind(q)
        torch.autograd.graph.increment_version(of(q))
        assert_same(q, before * 2)
        assert_codes_are_of_the_value(q)


NEW = {
    "empty_like": torch.empty_like,  # of which torch's Python goes on with a tensor of its own
    "new_empty": lambda q: q.new_empty(q.shape),
    "new_zeros": lambda q: q.new_zeros(q.shape),
    "clone": torch.clone,
    "to": lambda q: q.to(torch.float32, copy=True),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("of", ["itself", "a view", "a view, alone", "an alias, alone"])
@pytest.mark.parametrize("name", NEW)
def test_a_moved_version_counter_of_a_new_tensor_is_a_write(name, of):
    q = make()
    new = NEW[name](q)
    new.copy_(q)
    ops.flush([new])
    if of == "a view":
        torch.autograd.graph.increment_version(new[2:5])
    elif of == "an alias, alone":
        alias, new = ops.master(new), new.detach()
        gc.collect()
        torch.autograd.graph.increment_version(alias)
    else:
        new = new if of == "itself" else new[:]
        torch.autograd.graph.increment_version(new)
    assert is_dirty(new)


@pytest.mark.parametrize("of", [lambda q: q, lambda q: q[2:5], ops.master], ids=["itself", "view", "master"])
def test_a_counter_of_a_copy_that_was_given_codes_first(of):
    shard = ops.quantize(weight(20, 32), "float8_blockwise", keep_master=True, logical_rows=200)
    copied = shard.to("cpu", non_blocking=True, copy=True)
    assert not TensorState(copied).storage_bytes()["master"]
    of(copied)
    before = value(copied).clone()
    ops.dequantize(copied)
    write_behind(copied)
    torch.autograd.graph.increment_version(of(copied))
    assert_same(copied, before * 2)
    assert_codes_are_of_the_value(copied)


def test_a_counter_of_a_tensor_whose_memory_another_took():
    """The buffer goes on without the tensor that it was made with."""
    q, other = make(), make()
    rest = q[3:]
    q.set_(other)
    ops.flush([q, rest])
    assert not any(map(is_dirty, (q, rest, other)))
    torch.autograd.graph.increment_version(q)
    torch.autograd.graph.increment_version(rest)
    assert all(map(is_dirty, (q, rest, other)))


def test_a_counter_of_a_tensor_that_took_the_data_over():
    q, other = make(), make()
    other.data = q
    write_behind(other)
    torch.autograd.graph.increment_version(other)
    assert_codes_are_of_the_value(q)


def test_copies_of_bytes_are_no_new_values():
    """The bump that follows copy_ says nothing that copy_ did not."""
    q = make()
    shard = q.new_zeros(40, 47)
    shard[:40].copy_(q[-40:])
    assert not TensorState(shard).pack()[2][6]
    q.copy_(make())
    assert not TensorState(q).pack()[2][6]
    write_behind(q)
    torch.autograd.graph.increment_version(q)
    torch.autograd.graph.increment_version(q)
    assert TensorState(q).pack()[2][6]


@formats
def test_after_a_step_what_has_a_gradient_was_written(fmt):
    """Kernels of other libraries move no counter at all."""

    class RawSGD(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    write_behind(p, 0.5)

    stepped, left = Parameter(make(fmt, 33, 16)), Parameter(make(fmt, 33, 16))
    before = value(stepped)
    optimizer = RawSGD([stepped, left])
    stepped.grad = torch.ones_like(before)
    optimizer.step()
    assert_same(stepped, before * 0.5)
    assert_codes_are_of_the_value(stepped)
    assert_codes_are_of_the_value(left)


def test_other_raw_writes_are_marked():
    q = make()
    codes = bits(ops.codes(q)).clone()
    write_behind(q, 3.0)
    assert torch.equal(bits(ops.codes(q)), codes)  # no version counter moved
    ops._mark_written(q)
    assert_codes_are_of_the_value(q)


def test_memory_goes_with_the_tensor():
    q = make(rows=1024, cols=1024)
    view = q[5:7]
    numpy = view.numpy()
    expected = value(view)
    del q, view
    gc.collect()
    assert torch.equal(torch.from_numpy(numpy), expected)  # an alias keeps it, as of plain tensors


def test_likes_and_copies_of_windows_are_tensors_of_their_own():
    q = make()
    before, x = value(q), torch.ones(3, 47)
    like = torch.empty_like(q[:55])
    assert not is_quantized(like)
    rows = torch.empty_like(q[:55]).copy_(q[:55])
    assert is_quantized(rows)
    for new in (like, rows):
        new.fill_(2.0)
        assert torch.equal(value(new), torch.full((55, 47), 2.0))
        assert torch.equal(torch.nn.functional.linear(x, new), torch.full((3, 55), 94.0))
        new.mul_(3)
        assert torch.equal(torch.nn.functional.linear(x, new), torch.full((3, 55), 282.0))
    assert torch.equal(ops.dequantize(rows), torch.full((55, 47), 6.0))
    assert_same(q, before)
    dense = q[::2].to(copy=True)
    assert dense.is_contiguous() and dense.untyped_storage().nbytes() == dense.numel() * 4
    assert_same(dense, value(q)[::2])
    padded = torch.nn.functional.pad(q[3:9], (0, 0, 0, 2))
    assert_same(padded, torch.nn.functional.pad(value(q)[3:9], (0, 0, 0, 2)))
    for make_like in (torch.zeros_like, torch.clone, torch.empty_like):
        assert make_like(q.t()).stride() == make_like(value(q).t()).stride()


def test_a_non_blocking_copy_is_a_copy():
    q = make()
    before = value(q)
    copy = q.to("cpu", non_blocking=True, copy=True)
    q.mul_(5)
    assert_same(copy, before)
    write_behind(q)
    del q
    assert_same(copy, before)
