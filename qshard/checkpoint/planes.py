"""The planes of a unit: which part of them a rank holds, and the tensors that readers get of the whole ones."""

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from qshard.checkpoint import experts
from qshard.checkpoint.engines import packed_exponents
from qshard.checkpoint.shard_regions import Held, in_blocks
from qshard.formats import info_of

ops = torch.ops.qshard


@dataclass(frozen=True)
class Plane:
    """Codes, scales or values of one matrix, or a plain tensor. local: this rank's part. boxes: ranks' parts of `shape`;
    those that overlap, as of scales of blocks of several ranks, hold the same. block: the matrix's rows and
    columns for each element."""

    local: torch.Tensor
    boxes: Held
    shape: tuple[int, ...]
    block: tuple[int, int] = (1, 1)

    def nbytes(self, box):
        return torch.Size(count for _, count in box).numel() * self.local.dtype.itemsize

    def whole(self, pieces):
        """The tensor of `pieces`, {box: flat bytes}."""
        dtype = self.local.dtype
        if len(pieces) == 1:
            (piece,) = pieces.values()
            return _typed(piece, dtype).reshape(self.shape)
        if self.boxes.is_even:
            return torch.cat(list(pieces.values())).view(dtype).reshape(self.shape)
        tensor = torch.empty(self.shape, dtype=dtype, device=next(iter(pieces.values())).device)
        for box, piece in pieces.items():
            sizes = torch.Size(count for _, count in box)
            if sizes.numel():
                at = tuple(slice(first, first + count) for first, count in box)
                tensor[at] = _typed(piece, dtype).reshape(sizes)
        return tensor


def _typed(flat, dtype):
    """Bytes as a dtype, which wants them at a multiple of its size."""
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


@torch.no_grad()
def planes_of(unit, plan) -> list[Plane]:
    """What ranks send each other of a unit, in an order that is equal on all."""
    result = []
    for entry in unit.entries:
        boxes, shape = plan.boxes[entry.key].held, entry.shape
        if not entry.is_quantized:
            result.append(Plane(entry.local.detach().to(plan.plain_dtype(entry)), boxes, shape))
        elif unit.is_requantized:
            result.append(Plane(entry.value, boxes, shape))
        else:
            result += _quantized(entry, boxes, plan.scheme)
    return result


def _quantized(entry, boxes, scheme):
    shape = entry.shape

    def plane(part, block):
        """One element per block."""
        counts = tuple(-(-size // of_one) for size, of_one in zip(shape, block))
        return Plane(part, boxes.in_blocks(block), counts, block)

    is_transposed = entry.part and entry.part.is_transposed
    codes, scale = _transposed(entry, scheme) if is_transposed else (ops.codes(entry.local), ops.scale_inv(entry.local))
    planes = [plane(codes, (1, scheme.codes_per_byte)), plane(scale, scheme.block_within(*shape))]
    if info_of(entry.format).outer_scale is not None:
        planes.append(plane(ops.tensor_scale_inv(entry.matrix), tuple(shape)))
    return planes


def _transposed(entry, scheme):
    """Codes and scales of rows of the transpose of an expert's matrix."""
    part, matrix = entry.part, entry.matrix
    codes = experts.transposed_codes(ops.codes(matrix), entry.format, matrix.shape[-1])
    scale = experts.transposed_scales(ops.scale_inv(matrix), entry.format, matrix.shape[-1])
    if matrix.dim() == 2 and scheme.block[0] is not None:
        columns = entry.box[0][2]  # the stack's columns are rows of the transpose
        first, count = part.box(entry.box[0])[0]
        (first, count), (start, _) = in_blocks([(part.first + first, count), columns], scheme.block[:1] * 2)
        scale = scale.narrow(0, first - start if count else 0, count)
    # A clone has a last stride of 1; what is contiguous may have another one where a dimension has one element.
    return part.rows_of(codes, entry.box[0]), scale.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def tensors_of(unit, plan, wholes, exact=None) -> dict[str, torch.Tensor]:
    """{name: tensor} as readers get them, of the whole tensors of `planes_of`. `exact` gets the tensor scales of which
    readers get rounded reciprocals, by the weights' names."""
    if unit.is_plain:
        (name,) = unit.tensors
        return {name: wholes[0] if len(wholes) == 1 else torch.cat(wholes)}
    if unit.is_requantized:
        matrices = _quantized_together(unit, plan, wholes)
    else:
        per_entry = len(wholes) // len(unit.entries)
        matrices = [wholes[i * per_entry : (i + 1) * per_entry] for i in range(len(unit.entries))]
    if unit.fused:
        planes = [torch.cat(parts) for parts in zip(*matrices)]
        if unit.experts:
            planes = [plane.unflatten(0, (unit.experts, -1)) for plane in planes]
        return _of_matrix(unit.tensors, planes, plan)
    result, specs = {}, iter(unit.tensors.items())
    for entry, planes in zip(unit.entries, matrices):
        result |= _of_matrix(dict(itertools.islice(specs, len(planes))), planes, plan, exact, entry.name)
    return result


def _of_matrix(specs, planes, plan, exact=None, weight=None):
    """specs: {name: (dtype, shape)} of the codes, scales and maybe a tensor scale that the planes are, of a matrix or of a
    stack."""
    scheme, result = plan.scheme, {}
    for i, ((name, (dtype, shape)), plane) in enumerate(zip(specs.items(), planes)):
        if i == 1 and scheme.is_ue8m0:
            plane = plane.to(torch.float8_e8m0fnu)
        if i == 1 and plan.packs_exponents:
            result[name] = packed_exponents(plane, shape[-2])
            continue
        if i == 2 and scheme.divides:
            if exact is not None:
                exact[weight] = plane.item().hex()
            plane = plane.reciprocal()
        plane = plane.contiguous()
        plane = plane.view(dtype) if plane.dtype.itemsize == dtype.itemsize else plane
        result[name] = plane.reshape(shape)
    return result


def _quantized_together(unit, plan, values):
    """Planes of weights as one matrix, which has one tensor scale. Blocks end where a weight does."""
    padded, windows, end = [], [], 0
    for value in values:
        padding = -value.shape[0] % 16 if len(values) > 1 else 0
        padded.append(nn.functional.pad(value.float(), (0, 0, 0, padding)))
        windows.append((end, end + value.shape[0]))
        end += value.shape[0] + padding
    format = unit.entries[0].format.partition("[")[0]
    whole = ops.quantize(torch.cat(padded), format)
    planes = [ops.codes(whole), ops.scale_inv(whole)]
    outer = [ops.tensor_scale_inv(whole)] if plan.scheme.tensor_scale else []
    if len(windows) == 1:
        return [planes + outer]
    return [[plane[a:b] for plane in planes] + outer for a, b in windows]
