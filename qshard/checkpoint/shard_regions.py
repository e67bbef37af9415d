"""Which ranks hold which part of a tensor: boxes of rows and columns, whatever the meshes are."""

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from qshard._runtime.hooks import local_of
from qshard._runtime.placement import chunk, is_strided, roles
from qshard.checkpoint.layouts import block_of
from qshard.model.quantize import is_quantized

ops = torch.ops.qshard


class Boxes:
    """The boxes of one tensor, equal on all ranks. A box is ((first, count), ...), one pair per dimension.

    held: {rank: box}. matrices: {rank: the box of the logical matrix that the rank's rows are of},
    in whose first element scale blocks begin: the whole, or what tensor parallelism left of it."""

    def __init__(self, tensor, held, matrices):
        self.shape = tuple(tensor.shape)
        self.held, self.matrices = held, matrices
        self.is_aligned = True
        if is_quantized(tensor):
            block = block_of(ops.format(local_of(tensor)))
            self.is_aligned = all(
                first % size == 0
                for box in matrices.values()
                for (first, _), size in zip(box[-2:], block)
            )

    def of_part(self, part, tensor):
        """Those of a matrix in a stack, which one rank has as a whole, or several."""
        held = {rank: part.box(box) for rank, box in self.held.items()}
        boxes = Boxes(tensor, held, held)
        boxes.shape = part.rows, self.shape[-1]
        boxes.is_aligned = part.first % block_of(ops.format(local_of(tensor)))[0] == 0
        return boxes


def boxes_of(entries, ranks):
    """{key: Boxes}. A collective. Raises, on all ranks, NotImplementedError by name."""
    stacks = {entry.part.key: entry for entry in entries if entry.part}  # once, and not for each matrix
    sources = [entry for entry in entries if not entry.part]
    sources += [replace(entry, key=key, part=None) for key, entry in stacks.items()]
    with ranks.agreeing():
        own = {entry.key: _own(entry) for entry in sources}
    everywhere = ranks.all(own)
    with ranks.agreeing():
        result = _together(sources, everywhere, ranks)
    for entry in entries:
        if entry.part:
            of_stack = result[entry.part.key]
            entry.box[:] = of_stack.held[ranks.rank], of_stack.matrices[ranks.rank]
            result[entry.key] = of_stack.of_part(entry.part, entry.tensor)
    return result


def _together(entries, everywhere, ranks):
    result = {}
    for entry in entries:
        if any(entry.key not in of_rank for of_rank in everywhere):
            raise NotImplementedError(f"{entry.key} is not in the model of every rank")
        found = [of_rank[entry.key] for of_rank in everywhere]
        boxes = Boxes(entry.tensor, *(dict(enumerate(part)) for part in zip(*found)))
        sizes = [torch.Size(n for _, n in box).numel() for box in set(boxes.held.values())]
        if sum(sizes) != entry.tensor.numel():
            raise NotImplementedError(
                f"{entry.key} of shape {boxes.shape} is not whole on these {ranks.size} ranks"
            )
        result[entry.key] = boxes
    return result


def _own(entry):
    """(box, that of the logical matrix) of this rank."""
    tensor, local = entry.tensor, entry.local
    whole = tuple((0, size) for size in tensor.shape)
    if not isinstance(tensor, DTensor):
        return whole, whole
    mesh, placements = tensor.device_mesh, tensor.placements
    if entry.is_quantized:
        rows_dim, first_dims, _ = roles(mesh, placements, ops._tensor_groups(local), entry.key)
        later = [] if rows_dim is None else [rows_dim]
    else:
        cuts = [i for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1]
        if any(not placements[i].is_shard() and not is_strided(placements[i]) for i in cuts):
            raise NotImplementedError(f"{entry.key} is placed as {placements}, which has partial sums")
        # Tensor parallelism cuts before FSDP2 does.
        later = [i for i in cuts if is_strided(placements[i])]
        first_dims = [i for i in cuts if i not in later]
    matrix = _cut(whole, mesh, placements, first_dims)
    box = _cut(matrix, mesh, placements, later)
    if tuple(count for _, count in box) != tuple(local.shape):
        raise NotImplementedError(
            f"{entry.key} is placed as {placements}, and this rank holds {tuple(local.shape)} of it"
        )
    return box, matrix


def _cut(box, mesh, placements, dims):
    box = list(box)
    for i in dims:
        dim = placements[i].dim
        offset, count = chunk(box[dim][1], mesh.size(i), mesh.get_local_rank(i))
        box[dim] = box[dim][0] + offset, count
    return tuple(box)


def in_blocks(box, block):
    """The box of the blocks that it touches, counted in blocks. A block may be the whole of nothing."""
    return tuple(
        (first // size, -(-(first + count) // size) - first // size) if count else (0, 0)
        for (first, count), size in zip(box, block)
    )
