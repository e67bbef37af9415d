"""Operators that show what a quantized tensor is made of. They read the local tensor of a DTensor."""

import torch
from torch import Tensor

from qshard._runtime.hooks import local_of

_ops = torch.ops.qshard


def _local(tensor, function):
    """What an accessor reads: of a DTensor the part on this rank."""
    local = local_of(tensor)
    if local is tensor or function == "is_quantized" or _ops.is_quantized(local):
        return local
    raise TypeError(f"qshard::{function}: expected a quantized tensor, got a DTensor of plain values")


def is_quantized(self: Tensor) -> bool:
    """Whether a tensor is quantized, or the local tensor of a DTensor."""
    return _ops.is_quantized(_local(self, "is_quantized"))


def format(self: Tensor) -> str:
    """Name of a quantized tensor's format, with its options. Raises TypeError for a plain tensor."""
    return _ops.format(_local(self, "format"))


def codes(self: Tensor) -> Tensor:
    """The codes: an alias of the row image, with the strides of its rows.

    float8_e4m3fn of the tensor's shape; nvfp4: uint8 of half the columns, rounded up, two E2M1 codes a byte,
    the first in the low nibble. Flushes what is pending if that needs no other rank. With a master, which is
    the value, in-place operators on this or another plane count as a write of the tensor: its codes are made
    of the master again. `from_planes` takes codes in. Raises TypeError for a
    plain tensor, ValueError for a view that is no window of rows and columns, RuntimeError for a written
    shard whose flush needs other ranks.
    """
    return _ops.codes(_local(self, "codes"))


def scale_inv(self: Tensor) -> Tensor:
    """What codes are multiplied by; an alias, of whole rows only.

    float32 (ceil(rows / 128), ceil(columns / 128)) of float8_blockwise, (1, 1) of the per-tensor formats;
    mxfp8: float8_e8m0fnu (rows, ceil(columns / 32)); nvfp4: float8_e4m3fn (rows, ceil(columns / 16)), to be
    multiplied by `tensor_scale_inv` too. Errors: as `codes`.
    """
    return _ops.scale_inv(_local(self, "scale_inv"))


def tensor_scale_inv(self: Tensor) -> Tensor:
    """The fp32 scale of an nvfp4 tensor, (1, 1), or one for each matrix; an alias. Raises ValueError for
    formats that have none. Other errors: as `codes`."""
    return _ops.tensor_scale_inv(_local(self, "tensor_scale_inv"))


def columnwise_codes(self: Tensor) -> Tensor:
    """The second codes of a format with two row images (`mxfp8_1x32`), quantized in 32x1 blocks, which
    dgrad contracts over rows: float8_e4m3fn of the tensor's shape, an alias. Raises ValueError for other
    formats. Other errors: as `codes`."""
    return _ops.columnwise_codes(_local(self, "columnwise_codes"))


def columnwise_scale_inv(self: Tensor) -> Tensor:
    """The scales of `columnwise_codes`: float8_e8m0fnu (rows / 32, columns), a copy. Raises ValueError for
    windows that are not whole blocks of 32 rows. Other errors: as `codes`."""
    return _ops.columnwise_scale_inv(_local(self, "columnwise_scale_inv"))


def row_image(self: Tensor) -> Tensor:
    """The rows as bytes, to be sent or picked: uint8 (rows, bytes of a row), an alias. A row holds its codes,
    zeros to a multiple of 16 bytes, one E8M0 byte for each block, and zeros to a multiple of 16:
    up to 1.03 bytes an element. `from_row_image` takes any selection of such rows in.

    Only where rows stand for themselves alone: `float8_1x128`, `float8_1xK` and `mxfp8_1x32[rowwise]`, the
    formats that `format_info` has as `row_format` of the activations of weights. Raises ValueError for other
    formats. Other errors, and what a write of the bytes does: as `codes`.
    """
    return _ops.row_image(_local(self, "row_image"))


def master(self: Tensor) -> Tensor | None:
    """The value kept beside the codes, or None without one: a plain tensor of the same shape, strides and
    dtype; an alias. In-place operators on it count as writes of the quantized tensor. Raises TypeError for
    a plain tensor."""
    return _ops.master(_local(self, "master"))
