"""What the tests of the tensor share."""

import contextlib
import io
import pickle

import torch

from qshard._runtime.classes import Process, TensorState
from qshard.formats import info_of

ops = torch.ops.qshard
_INFO = {name: info_of(name) for name in ops.formats()}
# Scales that are no powers of two are tested where they matter.
FORMATS = tuple(name for name in _INFO if not name.endswith("_fp32_scale"))
# Columns of a block, and rows too but for those of one row. Not of scales of whole rows.
BLOCK = {name: _INFO[name].scale.block_cols for name in FORMATS if _INFO[name].scale.block_cols}
ONE_ROW = tuple(name for name in FORMATS if _INFO[name].scale.block_rows == 1)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


# ------------------------------------------------------------------------ hooks on saved tensors


def are_codes_of(tensor, *weights):
    """Whether it lies in the memory of a weight's codes or scales: what hooks on saved tensors are given in
    place of a quantized weight."""
    quantized = [weight.detach() for weight in weights if ops.is_quantized(weight)]
    planes = [plane(weight) for weight in quantized for plane in (ops.codes, ops.scale_inv)]
    memory = {plane.untyped_storage().data_ptr() for plane in planes}
    return ops.is_quantized(tensor) or tensor.untyped_storage().data_ptr() in memory


# -------------------------------------------------------------------------------- fallbacks


@contextlib.contextmanager
def all_fallbacks():
    """As qshard.trace_fallbacks, with those that only write."""
    counts = {}
    Process.set_fallback_tracing(True)
    try:
        yield counts
    finally:
        counts.update(Process.traced_fallbacks(False))
        Process.set_fallback_tracing(False)


# ------------------------------------------------------- sizes, computed from the shape alone


def ceil_div(a, b):
    return -(-a // b)


def round_up(a, b):
    return ceil_div(a, b) * b


def has_two_images(fmt):
    """`fmt`: of a format, or what tests call models of several."""
    return fmt.partition("[")[0] in _INFO and info_of(fmt).columnwise is not None


def fit(fmt, rows):
    """The rows of a matrix, rounded up to what the format can have."""
    return round_up(rows, info_of(fmt).columnwise.block_rows) if has_two_images(fmt) else rows


def shares_input_codes(fmt):
    """Whether linears read the same codes of one input, where FP8 GEMMs run: delayed scaling has a scale for each."""
    return info_of(fmt).gemm.kind == "packed" and info_of(fmt).amax_history is None


def has_row_scales(fmt):
    return info_of(fmt).scale.place == "rows"


def code_cols(fmt, cols):
    """Bytes of a row's codes."""
    return ceil_div(cols * info_of(fmt).code_bits, 8)


def scale_shape(fmt, rows, cols):
    """Shape of scale_inv of one matrix."""
    scale = info_of(fmt).scale
    if scale.spans_matrix:
        return 1, 1
    of_rows = rows if has_row_scales(fmt) else ceil_div(rows, scale.block_rows)
    return of_rows, ceil_div(cols, scale.block_cols) if scale.block_cols else 1


def row_bytes(fmt, cols):
    if has_two_images(fmt):
        return 2 * row_bytes("mxfp8", cols)
    scales = ceil_div(cols, BLOCK[fmt]) if has_row_scales(fmt) else 0
    return round_up(round_up(code_cols(fmt, cols), 16) + scales, 16)


def grid_scale(fmt):
    """The level of scales that lies in the grid, if one does."""
    levels = (info_of(fmt).scale, info_of(fmt).outer_scale)
    return next((level for level in levels if level and level.place == "grid"), None)


def grid_bytes(fmt, rows, cols):
    """The replicated scales of one matrix."""
    level = grid_scale(fmt)
    if level is None:
        return 0
    of_rows = ceil_div(rows, level.block_rows) if level.block_rows else 1
    return 4 * of_rows * (ceil_div(cols, level.block_cols) if level.block_cols else 1)


def shown(q):
    """codes x scales of a matrix, from the accessors, in fp32."""
    fmt, (rows, cols) = ops.format(q), q.shape
    codes, scales = ops.codes(q), ops.scale_inv(q).float()
    if info_of(fmt).code_bits == 4:
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, :cols]
        values, scales = E2M1[nibbles.long()], scales * ops.tensor_scale_inv(q)
    else:
        values = codes.float()
    if fmt in BLOCK:
        scales = scales.repeat_interleave(BLOCK[fmt], 1)[:, :cols]
    if fmt == "float8_blockwise":
        scales = scales.repeat_interleave(BLOCK[fmt], 0)[:rows]
    return values * scales


def shown_to_dgrad(q):
    """The values that dgrad multiplies by, in fp32: those of the columnwise image, if there is one."""
    if not has_two_images(ops.format(q)):
        return ops.dequantize(q, dtype=torch.float32)
    scales = ops.columnwise_scale_inv(q).float().repeat_interleave(32, -2)
    return torch.where(scales.isnan(), scales, ops.columnwise_codes(q).float() * scales)


# --------------------------------------------------------------------------------- values


def is_quantized(value):
    return isinstance(value, torch.Tensor) and ops.is_quantized(value)


def value(tensor):
    """A plain copy of a tensor's value: the master, a pending update, or the dequantized codes."""
    tensor = tensor.detach()
    return TensorState(tensor).export_view().clone() if is_quantized(tensor) else tensor.clone()


def rounded(values, fmt):
    """What quantizing `values` leaves of them."""
    return ops.dequantize(ops.quantize(values.contiguous(), fmt))


def quantized_alike(value, weight, keep_master=True):
    """A whole value quantized on one device as `weight` is, with or without a master: where scales
    are those of an earlier step, with these."""
    fmt = ops.format(weight)
    whole = ops.quantize(value, fmt, keep_master=keep_master and has_two_images(fmt))
    state, known = TensorState(whole).scaling_state(), TensorState(weight.detach()).scaling_state()
    for name in state:
        state[name].copy_(known[name])
    if state:
        whole.copy_(value)
    return whole


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
    is due: after an error within a list of tensors it is not known which were written."""
    q = q.detach()
    data, pending, (*layout, _dirty, images, _adopted), fmt, state = TensorState(q).pack()
    geometry = (tuple(q.shape), q.stride(), q.storage_offset(), q.dtype, layout, images, fmt)
    return geometry, data, torch.empty(0) if pending is None else pending, *state


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


# ------------------------------------------------------------------------------ saved values


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def loaded_as_weights(q):
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def pickled(model):
    return pickle.loads(pickle.dumps(model))
