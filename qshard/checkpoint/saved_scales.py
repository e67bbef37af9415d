"""Scales of weights without a master, saved beside their values.

What such a weight stands for is code x scale. A quantizer that sees these values alone may choose
another scale: stochastic rounding can take a block's largest value down, NVFP4's smallest scales
are coarse, and its tensor scale is rounded. In the scales that they came from, the values are exact.
"""

import torch
from torch.distributed.tensor import DTensor

from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import holds_codes, local_of
from qshard.checkpoint.layouts import block_of
from qshard.checkpoint.model import Entry
from qshard.checkpoint.ranks import Ranks
from qshard.checkpoint.shard_regions import Boxes, boxes_of, in_blocks, own_boxes
from qshard.formats import info_of
from qshard.model.state_buffers import copy_values

ops = torch.ops.qshard
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the values of codes 0 to 7
_FUNCTION = "qshard.QuantizationState"


def has_own_scales(weight: torch.Tensor) -> bool:
    """Whether a weight's scales are to be saved: it keeps no master. A format with a columnwise image, whose
    scales span rows, does without: powers of two bring its values back."""
    local = local_of(weight)
    return (
        holds_codes(local)
        and not local.is_meta
        and not TensorState(local).keeps_master()
        and info_of(ops.format(local)).columnwise is None
    )


def ranks_of(models) -> Ranks:
    """The ranks that save or load together, by all parameters of the models: a rank's part of the models may
    have no weight with scales."""
    return Ranks([p for model in models for p in model.parameters()], _FUNCTION)


def places_of(weights: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, Boxes]:
    """Which ranks have which part of the weights. A collective; raises NotImplementedError, on all ranks,
    for what is no matrix or not in the model of every rank, and for parts with scale blocks of their own."""
    entries = [Entry(name, name, weight) for name, weight in weights.items()]
    with ranks.agreeing() as models:
        for name, weight in weights.items():
            if weight.dim() != 2:
                raise NotImplementedError(
                    f"{name} has shape {tuple(weight.shape)}; scales=True takes matrices"
                )
        models.tell(own_boxes(entries))
    with ranks.agreeing():
        boxes = boxes_of(entries, models.everywhere, ranks)
        for name, of_weight in boxes.items():
            if not of_weight.is_aligned:
                raise NotImplementedError(
                    f"{name} is cut by tensor parallelism inside scale blocks, and its parts have blocks of "
                    "their own; leave out scales=True: the model's state_dict holds the weight's values"
                )
    return boxes


def planes(
    weights: dict[str, torch.Tensor], ranks: Ranks, boxes: dict[str, Boxes]
) -> dict[str, torch.Tensor]:
    """Copies of the scales of flushed weights, as <name>_scale_inv and <name>_tensor_scale_inv:
    uint8 (rows, blocks) sharded as the weight, or fp32, whole on every rank. One collective if
    there are fp32 scales, 4 bytes each, of which a rank shows those of its own part."""
    result, grids = {}, {}
    for name, weight in weights.items():
        local = local_of(weight)
        for part, plane in _meta_planes(weight).items():
            own = getattr(ops, part)(local)
            if plane.dtype == torch.float32:
                grids[f"{name}_{part}"] = name, plane, own.cpu()
            else:
                result[f"{name}_{part}"] = _like(weight, own.contiguous().view(torch.uint8).clone(), plane)
    if grids:
        everywhere = ranks.all({key: own for key, (_, _, own) in grids.items()})
        for key, (name, plane, _) in grids.items():
            pieces = [of_rank[key] for of_rank in everywhere]
            whole = _whole_grid(weights[name], plane, pieces, boxes[name].held)
            result[key] = whole.to(local_of(weights[name]).device)
    return result


def _whole_grid(weight, plane, pieces, held):
    block = _grid_block(weight, plane)
    whole = torch.ones(plane.shape)
    for rank, piece in enumerate(pieces):
        box = in_blocks(held[rank], block)
        if all(count for _, count in box):
            _at(whole, box).copy_(piece)
    return whole


def _grid_block(weight, plane):
    """Rows and columns with one fp32 scale."""
    scale = info_of(ops.format(local_of(weight))).scale
    if plane.numel() == 1:
        return tuple(weight.shape)
    return tuple(of or size for of, size in zip((scale.block_rows, scale.block_cols), weight.shape))


def _at(plane, box):
    (row, rows), (column, columns) = box
    return plane[row : row + rows, column : column + columns]


def shapes(weight: torch.Tensor) -> dict[str, torch.Size]:
    """Shapes of `planes`, whole, of a weight that may have been written."""
    return {name: plane.shape for name, plane in _meta_planes(weight).items()}


def _meta_planes(weight):
    """The scales of a whole weight, by the names of their accessors, on meta."""
    format = ops.format(local_of(weight))
    whole = ops.quantize(torch.empty(weight.shape, device="meta"), format)
    result = {"scale_inv": ops.scale_inv(whole)}
    if info_of(format).outer_scale is not None:
        result["tensor_scale_inv"] = ops.tensor_scale_inv(whole)
    return result


def _like(weight, local, plane):
    if not isinstance(weight, DTensor):
        return local
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=plane.shape, stride=plane.stride()
    )


class Restore:
    """Codes of a weight's values in given scales. Made before anything is changed, then called."""

    def __init__(self, name, weight, given, boxes, rank):
        self.name, self.local = name, local_of(weight)
        held, matrix = boxes.held[rank], boxes.matrices[rank]
        self.rows, self.row_offset = matrix[0][1], held[0][0] - matrix[0][0]
        planes = _meta_planes(weight)
        scale, plane = given["scale_inv"], planes["scale_inv"]
        if isinstance(scale, DTensor):
            scale = scale.to_local()
        elif plane.dtype != torch.float32:
            columns = block_of(ops.format(self.local))[1]
            scale = _at(scale, in_blocks(held, (1, columns)))
        elif plane.numel() > 1:
            scale = _at(scale, in_blocks(matrix, _grid_block(weight, plane)))
        self.scale = scale.contiguous().to(self.local.device).view(plane.dtype)
        tensor_scale = given.get("tensor_scale_inv")
        self.tensor_scale = None if tensor_scale is None else tensor_scale.to(self.local.device)

    def is_finite(self):
        """A block with a NaN has no codes to bring back: it is quantized again, to NaN."""
        planes = (self.scale.float(), self.tensor_scale)
        return all(bool(p.isfinite().all()) for p in planes if p is not None)

    def check(self):
        """Raises ValueError if the weight's values, pending or not, are not exact in them."""
        values = _values(self.local)
        if not torch.equal(ops.dequantize(self._quantized(values)), values):
            raise ValueError(
                f"{self.name} has values that are not those of its scales; load the model's "
                "state_dict first, of the same step"
            )

    def __call__(self):
        """Quantizes once more what check() did: kept, all of it would be a second model."""
        copy_values(self.local, self._quantized(_values(self.local)))

    def _quantized(self, values):
        ones = torch.ones_like(values, dtype=torch.float64)
        factors = ops.dequantize(self._of(ones), dtype=torch.float32)  # what codes are multiplied by
        multiples = values.double() / factors
        return self._of(torch.where(factors == 0, multiples.new_zeros(()).copysign(values), multiples))

    def _of(self, multiples):
        """The tensor whose codes stand for `multiples`, float64 (rows, columns)."""
        return ops.from_planes(
            _codes_of(ops.format(self.local), multiples),
            self.scale,
            ops.format(self.local),
            tensor_scale_inv=self.tensor_scale,
            dtype=self.local.dtype,
            columns=multiples.shape[1],
            logical_rows=self.rows,
            row_offset=self.row_offset,
        )


def _codes_of(format, multiples):
    is_e2m1 = info_of(format).code_dtype is torch.float4_e2m1fn_x2
    return _e2m1(multiples) if is_e2m1 else _e4m3(multiples)


def _values(local):
    """Plain; what was written and not yet flushed, too. Adding 0 would lose signs of zeros."""
    return local.detach() * 1


def _e4m3(multiples):
    return multiples.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _e2m1(multiples):
    midpoints = multiples.new_tensor(_E2M1_MIDPOINTS)
    codes = torch.bucketize(multiples.abs(), midpoints).to(torch.uint8)
    codes |= multiples.signbit().to(torch.uint8) << 3
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
