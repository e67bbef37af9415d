"""The ranks that write, read or send together: what they agree on, and how their parts of planes come together, on one rank or
on all of them. Making an exchange is local work, which may find no memory; run() communicates."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
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


GATHERED_IN_PLACE = 2**16  # bytes of a rank's part: smaller ones cost more as collectives than as copies
_groups: dict[tuple, dist.ProcessGroup] = {}  # by the world's group and the ranks


def _ranks_of(meshes):
    """The ranks of the meshes that these were sliced from: each holds a part, or a copy of one, and
    writes into the same directory."""
    roots = (mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh for mesh in meshes)
    return tuple(sorted({rank for root in roots for rank in root.mesh.flatten().tolist()}))


def _group_of(ranks, meshes):
    """A process group of these ranks, which alone make it; None stands for the world's. A mesh that has one lends it."""
    if len(ranks) == dist.get_world_size():
        return None
    for mesh in meshes:
        if mesh.ndim == 1 and tuple(sorted(mesh.mesh.tolist())) == ranks == tuple(mesh.mesh.tolist()):
            return mesh.get_group()
    key = dist.group.WORLD, ranks
    if key not in _groups:
        for old in [known for known in _groups if known[0] is not dist.group.WORLD]:
            del _groups[old]
        _groups[key] = _new_group(ranks)
    return _groups[key]


def _new_group(ranks):
    """torch names a group that its ranks alone make after the number of groups that a rank knows, and ranks that know other
    numbers would wait for ever. This one is named after its ranks, of which a world makes it once."""
    torch_names = distributed_c10d._process_group_name
    name = distributed_c10d.GroupName(f"qshard.checkpoint {'_'.join(map(str, ranks))}")
    distributed_c10d._process_group_name = lambda *_, **__: name
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        distributed_c10d._process_group_name = torch_names


def _gathers_as_one(ranks):
    """all_gather_into_tensor calls inside are one collective. Gloo's reads a GPU's memory as the host's, and the process
    ends: there each call stays its own (allgather_coalesced of torch/csrc/distributed/c10d/ProcessGroupGloo.cpp)."""
    backend = (ranks.group or dist.group.WORLD)._get_backend(ranks.device)
    if ranks.device.type == "cpu" or backend.supports_coalescing:
        return dist._coalescing_manager(group=ranks.group)
    return contextlib.nullcontext()


@dataclass
class Agreement:
    """own: what this rank tells the others. everywhere: what every rank told, in their order, once they have agreed."""

    own: object = None
    everywhere: tuple = ()

    def tell(self, value):
        self.own = value


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
        self.group = _group_of(self.in_world, meshes) if meshes else None
        self.device = torch.device("cpu")
        if meshes and meshes[0].device_type != "cpu":
            self.device = torch.device(meshes[0].device_type, torch.accelerator.current_device_index())

    @classmethod
    def of_model(cls, model, function):
        """By all tensors of a model's state_dict."""
        tensors = model.state_dict(keep_vars=True).values()
        return cls([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)], function)

    def all(self, value):
        """`value` of every rank, in their order."""
        if self.is_alone:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum(self, values):
        """Sums over the ranks of int64 numbers, which wrap around."""
        total = torch.tensor(values, dtype=torch.int64, device=self.device)
        if not self.is_alone:
            dist.all_reduce(total, group=self.group)
        return total.tolist()

    @contextlib.contextmanager
    def agreeing(self):
        """What one rank meets inside is raised on all; what each tells is known to all afterwards. All come here, and
        communicate nothing inside but after an inner one: there the others meet a rank that has left by an error."""
        agreement, error = Agreement(), None
        try:
            yield agreement
        except Exception as met:
            if met is self._raised:  # by an inner one
                raise
            error = met
        told = None if error else agreement.own
        errors, agreement.everywhere = zip(*self.all((error and (type(error).__name__, str(error)), told)))
        for rank, met in enumerate(errors):
            if met is None:
                continue
            kind = _ERRORS.get(met[0], OSError if met[0].endswith("OSError") else ValueError)
            where = "" if self.is_alone else f" (rank {self.in_world[rank]})"
            text = met[1].removeprefix(f"{self.function}: ")
            self._raised = kind(f"{self.function}: {text}{where}")
            raise self._raised from error

    def message(self, operation, tensor, rank):
        """For dist.batch_isend_irecv."""
        return dist.P2POp(operation, tensor, self.in_world[rank], group=self.group)


def check_same(everywhere) -> None:
    """Raises ValueError for an argument that is another one on some rank. everywhere: {name: value} of each."""
    for name, value in everywhere[0].items():
        other = next((rank for rank in everywhere if rank[name] != value), None)
        if other is not None:
            raise ValueError(f"{name} is {value!r} on one rank and {other[name]!r} on another; all ranks give the same")


class ToOne:
    """Pieces come to one rank, in one message from each other rank that has what it lacks."""

    def __init__(self, planes, ranks, to):
        self.planes, self.ranks, self.to = planes, ranks, to
        self.sources = [_sources(plane, to) for plane in planes]
        self.counts = {}  # bytes by sender
        for plane, sources in zip(planes, self.sources):
            for box, rank in sources.items():
                if rank != to:
                    self.counts[rank] = self.counts.get(rank, 0) + plane.nbytes(box)
        self.counts = {rank: count for rank, count in sorted(self.counts.items()) if count}
        self.own = {}  # bytes by number of the plane
        if ranks.rank == to or ranks.rank in self.counts:
            for i, (plane, sources) in enumerate(zip(planes, self.sources)):
                if ranks.rank in sources.values():
                    self.own[i] = _bytes(plane.local, ranks)
        self.message = _joined(self.own.values()) if ranks.rank in self.counts else None

    @property
    def sent(self):
        """Bytes that this rank sends, by plane."""
        is_sender = self.ranks.rank in self.counts
        return [len(self.own[i]) if is_sender and i in self.own else 0 for i in range(len(self.planes))]

    def run(self):
        """Each plane's {box: flat bytes} on the rank; None elsewhere."""
        ranks, received, operations = self.ranks, {}, []
        for rank, count in self.counts.items():
            if ranks.rank == self.to:
                received[rank] = torch.empty(count, dtype=torch.uint8, device=ranks.device)
                operations.append(ranks.message(dist.irecv, received[rank], rank))
            elif ranks.rank == rank:
                operations.append(ranks.message(dist.isend, self.message, self.to))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        if ranks.rank != self.to:
            return None
        pieces, read = [], dict.fromkeys(received, 0)
        for i, (plane, sources) in enumerate(zip(self.planes, self.sources)):
            of_boxes = {}
            for box, rank in sources.items():
                count = plane.nbytes(box)
                if rank == self.to:
                    of_boxes[box] = self.own[i]
                elif not count:
                    of_boxes[box] = torch.empty(0, dtype=torch.uint8, device=ranks.device)
                else:
                    of_boxes[box] = received[rank][read[rank] : read[rank] + count]
                    read[rank] += count
            pieces.append(of_boxes)
        return pieces


class ToAll:
    """Pieces come to all ranks. Equal parts that are large are gathered where they stay; the others travel in one
    message. Ranks that hold the same send an equal part of it each; what all ranks hold is not sent."""

    def __init__(self, planes, ranks):
        self.planes, self.ranks = planes, ranks
        self.wholes = {}  # of what is gathered where it stays, by number of the plane
        lengths, self.places = [0] * ranks.size, []  # places: {box: [(rank, first byte, count)]}
        for i, plane in enumerate(planes):
            places = {}
            if self._stays(plane):
                nbytes = plane.nbytes(plane.boxes[0]) * ranks.size
                self.wholes[i] = torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)
            for box, of_box in plane.boxes.holders.items() if i not in self.wholes else ():
                if len(of_box) < ranks.size:
                    nbytes, places[box] = plane.nbytes(box), []
                    ends = [nbytes * (i + 1) // len(of_box) for i in range(len(of_box))]
                    for rank, begin, end in zip(of_box, [0, *ends], ends):
                        places[box].append((rank, lengths[rank], end - begin))
                        lengths[rank] += end - begin
            self.places.append(places)
        self.length = max(lengths)
        self.own = []
        for i, (plane, places) in enumerate(zip(planes, self.places)):
            box = plane.boxes[ranks.rank]
            begin = sum(count for rank, _, count in places.get(box, ()) if rank < ranks.rank)
            count = sum(count for rank, _, count in places.get(box, ()) if rank == ranks.rank)
            is_whole = i in self.wholes or box in plane.boxes.holders and box not in places
            flat = _bytes(plane.local, ranks) if is_whole or count else None
            self.own.append(flat if is_whole or flat is None else flat[begin : begin + count])
        self.message = None
        if self.length:
            self.message = torch.empty(self.length, dtype=torch.uint8, device=ranks.device)
            sent = [
                flat
                for flat, plane, places in zip(self.own, planes, self.places)
                if flat is not None and plane.boxes[ranks.rank] in places
            ]
            if sent:
                torch.cat(sent, out=self.message[: sum(map(len, sent))])

    def _stays(self, plane):
        return self.ranks.size > 1 and plane.boxes.is_even and plane.nbytes(plane.boxes[0]) >= GATHERED_IN_PLACE

    @property
    def sent(self):
        """Bytes that this rank's part of a ring sends, by plane; padding belongs to the largest of a message."""
        others, counts = self.ranks.size - 1, []
        for places in self.places:
            of_rank = [n for parts in places.values() for rank, _, n in parts if rank == self.ranks.rank]
            counts.append(others * sum(of_rank))
        counts[counts.index(max(counts))] += others * self.length - sum(counts)
        for i in self.wholes:
            counts[i] += others * len(self.own[i])
        return counts

    def run(self):
        """Each plane's {box: flat bytes}."""
        ranks, gathered = self.ranks, None
        if self.wholes:
            with _gathers_as_one(ranks):
                for i, whole in self.wholes.items():
                    dist.all_gather_into_tensor(whole, self.own[i], group=ranks.group)
        if self.length:
            gathered = torch.empty(self.length * ranks.size, dtype=torch.uint8, device=ranks.device)
            dist.all_gather_into_tensor(gathered, self.message, group=ranks.group)
        pieces = []
        for i, (flat, places, plane) in enumerate(zip(self.own, self.places, self.planes)):
            if i in self.wholes:
                pieces.append({tuple((0, size) for size in plane.shape): self.wholes[i]})
            else:
                pieces.append({box: self._piece(box, flat, places, gathered) for box in plane.boxes.holders})
        return pieces

    def _piece(self, box, own, places, gathered):
        if box not in places:
            return own
        begins = [(rank * self.length + first, count) for rank, first, count in places[box]]
        return _joined([gathered[begin : begin + count] for begin, count in begins])


def _sources(plane, to):
    """{box: the rank that it comes from}: the receiver or the nearest that holds it."""
    return {
        box: min(ranks, key=lambda rank: (abs(rank - to), rank)) for box, ranks in plane.boxes.holders.items()
    }


def _joined(pieces):
    pieces = list(pieces)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _bytes(tensor, ranks):
    """Flat, on the device of the ranks' messages."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat if ranks.is_alone else flat.to(ranks.device)
