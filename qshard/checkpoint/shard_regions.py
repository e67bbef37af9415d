"""Which ranks hold which part of a tensor: boxes of rows and columns, whatever the meshes are."""

from dataclasses import replace
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from qshard._runtime.classes import TensorState
from qshard._runtime.placement import chunk, is_strided, roles_of
from qshard.checkpoint.layouts import block_of


class Held(dict):
    """{rank: its box} of one tensor."""

    def __init__(self, boxes):
        super().__init__(boxes)
        self._in_blocks = {}

    @cached_property
    def holders(self):
        """{box: the ranks that hold it}; boxes without elements only where there are no others."""
        holders = {}
        for rank, box in sorted(self.items()):
            holders.setdefault(box, []).append(rank)
        full = {box: ranks for box, ranks in holders.items() if all(count for _, count in box)}
        return full or {next(iter(holders)): sorted(self)}

    @cached_property
    def is_even(self):
        """Whether ranks hold equal numbers of whole rows, in the order of ranks: their bytes, one after the other, are those
        of the whole."""
        (first, count), *columns = self[0] or ((0, 0),)
        return first == 0 and all(box == ((rank * count, count), *columns) for rank, box in self.items())

    def in_blocks(self, block):
        """Those of the blocks that they touch. Rows that no rank has matter to no box."""
        if block not in self._in_blocks:
            touched = {rank: in_blocks(box, block) for rank, box in self.items()}
            self._in_blocks[block] = Held(
                {rank: box if all(n for _, n in box) else ((0, 0), (0, 0)) for rank, box in touched.items()}
            )
        return self._in_blocks[block]


class Boxes:
    """The boxes of one tensor, equal on all ranks. A box is ((first, count), ...), one pair per dimension.

    held: {rank: box}. matrices: {rank: the box of the logical matrix that the rank's rows are of},
    in whose first element scale blocks begin: the whole, or what tensor parallelism left of it. block: of the
    format of a quantized tensor."""

    def __init__(self, shape, held, matrices, block=None):
        self.shape, self.block = tuple(shape), block
        self.held, self.matrices = Held(held), matrices
        self.is_aligned = block is None or all(
            first % size == 0
            for box in set(matrices.values())
            for (first, _), size in zip(box[-2:], block)
        )

    def of_part(self, part):
        """Those of a matrix in a stack."""
        held, matrices = ({rank: part.box(box) for rank, box in of.items()} for of in (self.held, self.matrices))
        boxes = Boxes((part.rows, part.columns), held, matrices, self.block)
        rows = 2 if part.is_transposed else 1
        # Scale blocks begin where the logical matrix does, and in files where this part does.
        starts = {of_stack[rows][0] for rank, of_stack in self.matrices.items() if matrices[rank][0][1]}
        boxes.is_aligned = self.is_aligned and all((part.first - start) % self.block[0] == 0 for start in starts)
        return boxes


def own_boxes(entries):
    """{key: (box, that of the logical matrix)} of this rank, of tensors; those of a stack of experts once. Raises
    NotImplementedError by name."""
    result, known = {}, {}
    for entry in entries:
        key = entry.part.key if entry.part else entry.key
        if key not in result:
            entry = replace(entry, key=key, part=None) if entry.part else entry
            result[key] = _own(entry, known)
    return result


def boxes_of(entries, everywhere, ranks):
    """{key: Boxes} of all ranks' `own_boxes`. Raises NotImplementedError by name, maybe on some ranks only."""
    result, stacks, known = {}, {}, {}
    for entry in entries:
        part = entry.part
        key = part.key if part else entry.key
        of_tensor = stacks.get(key)
        if of_tensor is None:
            of_tensor = stacks[key] = _together(entry, key, everywhere, known)
        if part:
            entry.box[:] = of_tensor.held[ranks.rank], of_tensor.matrices[ranks.rank]
            of_tensor = of_tensor.of_part(part)
        result[entry.key] = of_tensor
    return result


def _together(entry, key, everywhere, known):
    """known: Boxes of tensors before; layers have them in common."""
    if any(key not in of_rank for of_rank in everywhere):
        raise NotImplementedError(f"{key} is not in the model of every rank")
    shape, found = tuple(entry.tensor.shape), tuple(of_rank[key] for of_rank in everywhere)
    block = block_of(entry.format) if entry.is_quantized else None
    boxes = known.get((shape, block, found))
    if boxes is None:
        boxes = known[shape, block, found] = Boxes(shape, *(dict(enumerate(part)) for part in zip(*found)), block)
        sizes = [torch.Size(n for _, n in box).numel() for box in set(boxes.held.values())]
        if sum(sizes) != entry.tensor.numel():
            raise NotImplementedError(f"{key} of shape {shape} is not whole on these {len(everywhere)} ranks")
    return boxes


def _own(entry, known):
    """(box, that of the logical matrix) of this rank. known: those of tensors before."""
    tensor, local = entry.tensor, entry.local
    whole = tuple((0, size) for size in tensor.shape)
    if not isinstance(tensor, DTensor):
        return whole, whole
    mesh, placements = tensor.device_mesh, tensor.placements
    groups = tuple(TensorState(local).groups()) if entry.is_quantized else None
    like = id(mesh), placements, whole, tuple(local.shape), groups
    if like in known:
        return known[like]
    if entry.is_quantized:
        rows_dim, first_dims, _ = roles_of(tensor, entry.key)
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
    known[like] = box, matrix
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
