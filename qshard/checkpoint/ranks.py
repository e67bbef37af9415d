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


class Ranks:
    """All ranks of the world if some tensor is a DTensor, else this process alone."""

    def __init__(self, tensors, function):
        self.function, self._raised = function, None
        meshes = [t.device_mesh for t in tensors if isinstance(t, DTensor)]
        self.is_alone = not meshes
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.size = 1 if self.is_alone else dist.get_world_size()
        self.device = torch.device("cpu")
        if meshes and meshes[0].device_type != "cpu":
            self.device = torch.device(meshes[0].device_type, torch.accelerator.current_device_index())

    def all(self, value):
        """`value` of every rank, in their order."""
        if self.is_alone:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def agreeing(self):
        """What one rank meets inside is raised on all. All come here, and communicate nothing inside but
        by `gather`, which begins with agreeing: who has left by an error is met there."""
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
            where = "" if self.is_alone else f" (rank {rank})"
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
                    operations.append(dist.P2POp(dist.irecv, received[rank], rank))
                elif self.rank == rank:
                    operations.append(dist.P2POp(dist.isend, flat.to(self.device), writer))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        if self.rank != writer:
            return None
        received[writer] = flat.to(self.device)
        empty = flat.new_empty(0).to(self.device)
        return [received[rank] if count else empty for rank, count in sources.items()]


def _bytes(piece):
    return piece.detach().contiguous().reshape(-1).view(torch.uint8)
