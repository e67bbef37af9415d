"""A process group of which one rank, the first, runs: what a rank does by itself can be timed on one GPU,
without a link. The others are taken to send what it sends, and to add nothing to sums."""

import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

BACKEND = "one_rank"


class OneRankGroup(dist.ProcessGroup):
    """Its collectives are copies on the current stream, or nothing."""

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self):  # noqa: N802, torch's name
        return BACKEND

    def allreduce(self, tensors, opts=None):
        return _done(tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        return _done(tensors)

    def broadcast(self, tensors, opts=None):
        return _done(tensors)

    def barrier(self, opts=None):
        return _done([])

    def allgather(self, outputs, inputs, opts=None):
        for parts, input in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(input)
        return _done(outputs)

    def _allgather_base(self, output, input, opts=None):
        for part in output.view(-1).chunk(self.size()):
            part.copy_(input.reshape(-1))
        return _done([output])

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input)
        return _done(outputs)

    def scatter(self, outputs, inputs, opts=None):
        outputs[0].copy_(inputs[0][0])
        return _done(outputs)

    def reduce_scatter(self, outputs, inputs, opts=None):
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[0])
        return _done(outputs)

    def _reduce_scatter_base(self, output, input, opts=None):
        output.view(-1).copy_(input.reshape(-1)[: output.numel()])
        return _done([output])

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        for output, input in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input)
        return _done(outputs)

    def alltoall_base(self, output, input, output_splits, input_splits, opts=None):
        output.copy_(input)
        return _done([output])


def _done(tensors):
    future = Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


def init_process_group(ranks: int):
    """The default group of this process, of so many ranks."""
    devices = ["cpu", "cuda"]
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: OneRankGroup(rank, size), devices=devices
    )
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
