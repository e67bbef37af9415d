"""Where the local tensor of a DTensor lies, and whom its rank agrees with: made once from the DTensor's
mesh and placements, the same way on every rank, and handed down.

Tensor parallelism cuts the full tensor into logical ones, in whose (0, 0) scale blocks are anchored; FSDP
cuts the rows of those. Both look alike in a DTensor, so dimensions of tensor parallelism are told by
their process groups. Where torch says that a dimension was cut after others (_StridedShard, which FSDP2
makes), no one has to.
"""

import copy
import itertools
from dataclasses import dataclass

import torch

from qshard._runtime.classes import Process, TensorState
from qshard._runtime.patches import wrap

ops = torch.ops.qshard


@dataclass(frozen=True)
class Placement:
    """Rows [row_offset, ...) of a logical tensor of logical_rows, or rows_of_each rows of each of its matrices
    from row_offset on. Its element (0, 0) is first_element of a full tensor with full_cols columns and
    full_matrix_rows rows of a matrix (0: as many as in the logical tensor). parts: shapes of the logical
    tensors there are, the same on all ranks. has_rows_elsewhere: of a logical tensor's ranks more than one
    has any. The groups are names: of the ranks that hold the other rows ('' if none), those with other parts
    of the full tensor, those with the same rows, and, of the parts, those with other columns of the same
    rows."""

    logical_rows: int
    row_offset: int
    rows_of_each: int
    first_element: int
    full_cols: int
    full_matrix_rows: int
    parts: tuple[tuple[int, ...], ...]
    has_rows_elsewhere: bool
    shard_group: str
    part_groups: tuple[str, ...]
    replica_groups: tuple[str, ...]
    column_groups: tuple[str, ...]

    @property
    def groups(self):
        """A number for qshard's operators, 0 for none."""
        return Process.number_of_groups(self.shard_group, self.part_groups, self.replica_groups, self.column_groups)

    def quantize(self, local, format, keep_master):
        """The local tensor as the share that it is; it waits for its flush."""
        return ops._quantize_share(
            local,
            format,
            keep_master=keep_master,
            logical_rows=self.logical_rows,
            row_offset=self.row_offset,
            rows_of_each=self.rows_of_each,
            first_element=self.first_element,
            full_cols=self.full_cols,
            full_matrix_rows=self.full_matrix_rows,
            groups=self.groups,
        )

    def check(self, format, keep_master, dtype):
        """Raises, on all ranks, what quantizing the part of any of them would raise."""
        for shape in self.parts:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            ops.quantize(empty, format, keep_master=keep_master)
            if self.rows_of_each:  # whether the format can be cut within matrices, by any number of rows
                ops._quantize_share(empty, format, keep_master=keep_master, logical_rows=shape[0] * shape[1],
                                    row_offset=0, rows_of_each=shape[1], first_element=0, full_cols=shape[2],
                                    full_matrix_rows=0, groups=0)


def group_names(mesh):
    """c10d names of a mesh's groups, dimension by dimension; '' for dimensions of one rank."""
    return [
        mesh.get_group(i).group_name if mesh.size(i) > 1 else "" for i in range(mesh.ndim)
    ]


def ranks_of(name):
    """The ranks of the group of a c10d name."""
    from torch.distributed import distributed_c10d

    group = distributed_c10d._resolve_process_group(name)
    return tuple(distributed_c10d.get_process_group_ranks(group))


def in_groups(names, groups):
    """For each name, whether it is that of a group among `groups`. Two meshes over the same ranks have
    groups of their own, and DTensor, whose caches hold meshes that compare equal, may name either."""
    known = set(groups)
    ranks = {ranks_of(name) for name in known}
    return [bool(name) and (name in known or ranks_of(name) in ranks) for name in names]


def chunk(size, ranks, rank):
    """torch.chunk's rule, which FSDP2 and DTensor share: (first, length) of a rank's part."""
    length = -(-size // ranks)
    first = min(length * rank, size)
    return first, min(length, size - first)


def is_strided(placement):
    return type(placement).__name__ == "_StridedShard"


def roles(mesh, placements, ndim, tensor_groups, name, is_quantized=False):
    """Dimensions of the mesh of a tensor of `ndim` dimensions: (the one that FSDP cuts or None, those that tensor
    parallelism cuts, replicas). `is_quantized`: tensor_groups are those that a quantized tensor knows, which are
    all but those that hand out the matrices of a stack."""
    names = group_names(mesh)
    cuts, replicas = [], []
    for i, placement in enumerate(placements):
        if mesh.size(i) == 1:
            continue
        if placement.is_replicate():
            replicas.append(i)
        elif placement.is_shard() or is_strided(placement):
            cuts.append(i)
        else:
            raise refusal(name, placements, "quantized values cannot be partial sums")
    is_tensor = in_groups(names, tensor_groups) if tensor_groups else [False] * mesh.ndim
    tensor = [i for i in cuts if is_tensor[i]]
    if not tensor and sum(map(is_strided, placements)) == 1:
        # What was cut last is FSDP's, though it be over one rank.
        tensor = [i for i in cuts if not is_strided(placements[i])]
    rest = [i for i in cuts if i not in tensor]
    if is_quantized:
        # FSDP2 puts its mesh before that of what was cut earlier (_fsdp_param.py: _init_sharded_param).
        rest = rest[:1]
        tensor = [i for i in cuts if i not in rest]
    if len(rest) > 1 or any(placements[i].dim > (ndim == 3) for i in rest):
        raise refusal(
            name,
            placements,
            "rows (Shard(0), or Shard(1) of a stack of matrices) are cut over one mesh dimension; say which mesh "
            "is tensor parallel by qshard.quantize_(model, recipe, tp_mesh=tp_mesh)",
        )
    if any(is_strided(placements[i]) for i in tensor):
        raise refusal(name, placements, "tensor parallelism has to cut before FSDP does")
    return (rest[0] if rest else None), tensor, replicas


def roles_of(weight, name):
    """roles() of a quantized DTensor."""
    groups = TensorState(weight._local_tensor).groups()
    return roles(weight.device_mesh, weight.placements, weight.dim(), groups, name, is_quantized=True)


def refusal(name, placements, why):
    return NotImplementedError(f"qshard: {name} is placed as {tuple(placements)}: {why}")


def groups_of(mesh, placements, shape, local):
    """The number of the groups that a quantized local tensor's rank agrees with.

    Its logical tensor was settled when it was quantized: what a rank quantized by itself stays a tensor
    of its own, and a mesh dimension that gives each rank such a tensor cuts none. Nothing else tells
    that dimension, as that of experts, from FSDP's."""
    logical_rows, is_part, is_share = TensorState(local).logical_tensor()
    placement = place(mesh, placements, shape, TensorState(local).groups(), is_quantized=True)
    # If one rank alone has any rows, it cannot tell by their number.
    is_cut = placement.logical_rows == logical_rows and (is_share or placement.has_rows_elsewhere)
    return Process.number_of_groups(
        placement.shard_group if is_cut else "",
        placement.part_groups if is_part else (),
        placement.replica_groups,
        placement.column_groups if is_part else (),
    )


def place(mesh, placements, shape, tensor_groups=(), name="a quantized parameter", is_quantized=False):
    """The Placement of a DTensor. `tensor_groups`: names of the groups that are tensor parallel; is_quantized: as
    in roles().

    Raises NotImplementedError, on all ranks, for what it cannot express."""
    is_stack = len(shape) == 3
    rows_dim, tensor_dims, replica_dims = roles(mesh, placements, len(shape), tensor_groups, name, is_quantized)
    names = group_names(mesh)
    first, sizes, lengths = [0] * len(shape), list(shape), [{size} for size in shape]
    for i in tensor_dims:  # in the mesh's order, as DTensor cuts
        dim, ranks = placements[i].dim, mesh.size(i)
        if len(shape) > 3 and dim > 0:
            raise refusal(name, placements, "a stack of more than three dimensions is cut by Shard(0) alone")
        parts = {chunk(size, ranks, rank)[1] for size in lengths[dim] for rank in range(ranks)}
        if 0 in parts:
            raise refusal(
                name,
                placements,
                f"tensor parallelism over {ranks} ranks would leave some of them nothing of a weight "
                f"of shape {tuple(shape)}",
            )
        lengths[dim] = parts
        offset, length = chunk(sizes[dim], ranks, mesh.get_local_rank(i))
        first[dim] += offset
        sizes[dim] = length
    rows_per_slice, full_rows_per_slice = (torch.Size(s[1:-1]).numel() for s in (sizes, shape))
    row_offset, rows_of_each, has_rows_elsewhere = 0, 0, False
    if rows_dim is not None:
        ranks, dim = mesh.size(rows_dim), placements[rows_dim].dim
        offset, length = chunk(sizes[dim], ranks, mesh.get_local_rank(rows_dim))
        has_rows_elsewhere = chunk(sizes[dim], ranks, 1)[1] > 0
        row_offset = offset * rows_per_slice if dim == 0 else offset
        if dim == 1 and ranks > 1:
            rows_of_each = length
            if any(size % ranks for size in lengths[1]):
                raise refusal(name, placements, f"Shard(1) over {ranks} ranks needs as many rows of each matrix on each")
    # Whole matrices have scales and state of their own, also those of a stack.
    of_full = [i for i in tensor_dims if len(shape) == 2 or placements[i].dim > 0]
    return Placement(
        logical_rows=sizes[0] * rows_per_slice,
        row_offset=row_offset,
        rows_of_each=rows_of_each,
        first_element=(first[0] * full_rows_per_slice + (first[1] if is_stack else 0)) * shape[-1] + first[-1],
        full_cols=shape[-1],
        full_matrix_rows=shape[1] if is_stack and sizes[1] != shape[1] else 0,
        parts=tuple(itertools.product(*map(sorted, lengths))),
        has_rows_elsewhere=has_rows_elsewhere,
        shard_group=names[rows_dim] if rows_dim is not None else "",
        part_groups=tuple(names[i] for i in of_full),
        replica_groups=tuple(names[i] for i in replica_dims),
        column_groups=tuple(names[i] for i in of_full if placements[i].dim == len(shape) - 1),
    )


def with_local(local, like):
    """A DTensor like another one, of another local tensor, of any dtype. (`DTensor.from_local` would
    take one that FSDP2 offloads to CPU to the mesh's device.)"""
    return type(like)(local, spec_of(local, like._spec), requires_grad=False)


def spec_of(local, spec):
    """The spec of a DTensor that has this local tensor, like one that is there, but for the dtype."""
    spec = copy.copy(spec)
    if local.dtype != spec.tensor_meta.dtype:  # FSDP2's mixed precision
        spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return spec


@wrap("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.shard_mesh")
def _slicing_meshes_once(stock):
    """FSDP2 gives our all-gather hooks the shards' part of its mesh. Where that is a slice, of HSDP's mesh, torch 2.11
    makes it anew for each gather, at 0.3 ms and more; parameters of one module share it here."""

    def shard_mesh(self):
        known = self.mesh_info.__dict__
        if "_qshard_shard_mesh" not in known:
            known["_qshard_shard_mesh"] = stock.fget(self)
        return known["_qshard_shard_mesh"]

    return property(shard_mesh)
