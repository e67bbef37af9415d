"""The ranks that write or read one checkpoint together."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_ERRORS = {
    error.__name__: error
    for error in (
        FileExistsError,
        FileNotFoundError,
        ModuleNotFoundError,
        NotImplementedError,
        PermissionError,
        RuntimeError,
        TypeError,
        torch.OutOfMemoryError,
    )
}


_groups: dict[tuple, dist.ProcessGroup] = {}  # by the world's group and the ranks


def _ranks_of(meshes):
    """The ranks of the meshes that these were sliced from: each holds a part, or a copy of one, and
    writes into the same directory."""
    roots = (mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh for mesh in meshes)
    return tuple(sorted({rank for root in roots for rank in root.mesh.flatten().tolist()}))


def _group_of(ranks):
    """A process group of these ranks, which alone make it; None stands for the world's."""
    if len(ranks) == dist.get_world_size():
        return None
    key = dist.group.WORLD, ranks
    if key not in _groups:
        for old in [known for known in _groups if known[0] is not dist.group.WORLD]:
            del _groups[old]
        _groups[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _groups[key]


class Ranks:
    """The ranks of the meshes of DTensors among the tensors, which may be a part of the world; without
    a DTensor, this process alone. `rank` and `size` count among them."""

    def __init__(self, tensors, function):
        self.function, self._raised = function, None
        meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor)}.values()
        meshes = list(meshes)
        self.is_alone = not meshes
        self.in_world = _ranks_of(meshes) if meshes else (0,)
        own = dist.get_rank() if meshes else 0
        if own not in self.in_world:
            raise ValueError(f"{function}: the model is on a mesh of other ranks than this one, {own}")
        self.rank = self.in_world.index(own)
        self.size = len(self.in_world)
        self.group = _group_of(self.in_world) if meshes else None
        self.device = torch.device("cpu")
        if meshes and meshes[0].device_type != "cpu":
            self.device = torch.device(meshes[0].device_type, torch.accelerator.current_device_index())

    def all(self, value):
        """`value` of every rank, in their order."""
        if self.is_alone:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextlib.contextmanager
    def agreeing(self):
        """What one rank meets inside is raised on all. All come here, and communicate nothing inside but
        by `gather`, which begins with agreeing: there the others meet a rank that has left by an error."""
        error = None
        try:
            yield
        except Exception as met:
            if met is self._raised:  # by an inner one
                raise
            error = met
        errors = self.all(error and (type(error).__name__, str(error)))
        for rank, met in enumerate(errors):
            if met is None:
                continue
            kind = _ERRORS.get(met[0], OSError if met[0].endswith("OSError") else ValueError)
            where = "" if self.is_alone else f" (rank {self.in_world[rank]})"
            text = met[1].removeprefix(f"{self.function}: ")
            self._raised = kind(f"{self.function}: {text}{where}")
            raise self._raised from error

    def gather(self, piece, sources, writer):
        """The pieces of `sources`, {rank: bytes}, on `writer`: flat uint8, in their order; None
        elsewhere. All ranks call it; those that are no sources give any piece."""
        if list(sources) == [writer]:
            return [_bytes(piece)] if self.rank == writer else None
        received, operations = {}, []
        with self.agreeing():  # before anybody waits for a piece
            flat = _bytes(piece) if self.rank == writer or self.rank in sources else None
            for rank, count in sources.items():
                if count == 0 or rank == writer:
                    continue
                if self.rank == writer:
                    received[rank] = torch.empty(count, dtype=torch.uint8, device=self.device)
                    operations.append(self._message(dist.irecv, received[rank], rank))
                elif self.rank == rank:
                    operations.append(self._message(dist.isend, flat.to(self.device), writer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        if self.rank != writer:
            return None
        received[writer] = flat.to(self.device)
        empty = flat.new_empty(0).to(self.device)
        return [received[rank] if count else empty for rank, count in sources.items()]

    def _message(self, operation, tensor, rank):
        return dist.P2POp(operation, tensor, self.in_world[rank], group=self.group)


def _bytes(piece):
    return piece.detach().contiguous().reshape(-1).view(torch.uint8)
