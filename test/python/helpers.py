"""What the tests of the tensor share."""

import torch

ops = torch.ops.qshard
FORMATS = ("float8_tensorwise", "float8_blockwise")


def is_quantized(value):
    return isinstance(value, torch.Tensor) and ops.is_quantized(value)


def value(tensor):
    """A plain copy of a tensor's value: the master, a pending update, or the dequantized codes."""
    tensor = tensor.detach()
    return ops._export_view(tensor).clone() if is_quantized(tensor) else tensor.clone()


def rounded(values, fmt):
    """What quantizing `values` leaves of them."""
    return ops.dequantize(ops.quantize(values.contiguous(), fmt))


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def assert_same(actual, expected, note=""):
    """Same shape, dtype and bits (NaNs may differ in theirs)."""
    actual, expected = value(actual), value(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), note
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} values differ {note}"


def state(q):
    """All that an error must leave alone: geometry, and the bytes of every plane. Not whether a flush
    is due: after an error within a list of tensors nobody knows which were written."""
    q = q.detach()
    data, pending, (*layout, _dirty), fmt = ops._pack(q)
    geometry = (tuple(q.shape), q.stride(), q.storage_offset(), q.dtype, layout, fmt)
    return geometry, data, torch.empty(0) if pending is None else pending


def assert_unchanged(q, before):
    geometry, *planes = state(q)
    assert geometry == before[0]
    for after, plane in zip(planes, before[1:]):
        assert torch.equal(bits(after), bits(plane)), "bytes changed"


def weight(*shape, seed=0, dtype=torch.float32):
    """Values of very different size from row to row, so that a wrong scale shows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    exponents = torch.randint(-4, 5, (*shape[:-1], 1), generator=generator)
    return (values * 2.0**exponents).to(dtype)
