"""Ranges of weights that flat parameters cut anywhere, many a call: amaxes, codes and values."""

from typing import NamedTuple

import torch

ops = torch.ops.qshard


class Range(NamedTuple):
    """Elements of a weight (rows, cols) of a format, from `start` on."""

    format: str
    rows: int
    cols: int
    start: int


def _of(ranges):
    return [r.format for r in ranges], [number for r in ranges for number in r[1:]]


def amax_of_ranges(values, ranges):
    """float32: the largest |x| of each range by grid entry of its weight, range after range."""
    return ops._amax_of_ranges(values, *_of(ranges))


def scale_inv_of_ranges(amax, ranges):
    """What codes are multiplied by, if whole weights are scaled by `amax`, of amax_of_ranges."""
    return ops._scale_inv_of_ranges(amax, *_of(ranges))


def quantize_ranges(values, ranges, amaxes, codes):
    """Writes `codes`, uint8, of each range, by the amaxes of its weight."""
    ops._quantize_ranges(values, *_of(ranges), amaxes, codes)


def dequantize_ranges(codes, ranges, scales, values):
    """The reverse: writes `values`."""
    ops._dequantize_ranges(codes, *_of(ranges), scales, values)
