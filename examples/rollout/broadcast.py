"""Trains on all ranks but the last, which receives the weights' codes by broadcast after every step.

torchrun --nproc-per-node 3 examples/rollout/broadcast.py
"""

import torch
import torch.distributed as dist
from rollout import OPTIONS, Receiver, Trainer, arguments, group_of_trainers, show
from tqdm import trange

from qshard.checkpoint import digests, quantized_tensors, verify


def send(trainer, group):
    """One sync: rank 0 has the tensors, one after the other, and sends each on as it comes."""
    known = digests(trainer.model, **OPTIONS)
    with quantized_tensors(trainer.model, dst=0, **OPTIONS) as stream:
        if dist.get_rank() == 0:
            dist.broadcast_object_list([known], src=0, group=group)
        for name, tensor in stream:
            dist.broadcast_object_list([(name, tensor.dtype, tensor.shape)], src=0, group=group)
            dist.broadcast(tensor.contiguous().reshape(-1).view(torch.uint8), src=0, group=group)
        if dist.get_rank() == 0:
            dist.broadcast_object_list([None], src=0, group=group)
    return stream.sent()


def receive(group):
    """The digests, and then pairs of the sync's tensors."""
    known = [None]
    dist.broadcast_object_list(known, src=0, group=group)
    yield known[0]
    while True:
        about = [None]
        dist.broadcast_object_list(about, src=0, group=group)
        if about[0] is None:
            return
        name, dtype, shape = about[0]
        tensor = torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0, group=group)
        yield name, tensor


def main(argv=None):
    args = arguments(__doc__, argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mesh, group = group_of_trainers(last), dist.new_group([0, last])
    trainer = Trainer(args, mesh) if rank < last else None
    ignored = [trainer.ignored() if trainer else None]
    dist.broadcast_object_list(ignored, src=0)
    receiver = None if trainer else Receiver(args, ignored[0])
    lines = []
    for step in trange(args.steps, disable=rank != 0):
        loss, own = [None], torch.empty(4, 32, 256)
        if trainer:
            loss = [trainer.step(step)]
            send(trainer, group)
            own = trainer.logits()
        else:
            incoming = receive(group)
            known, tensors = next(incoming), dict(incoming)
            verify(tensors.items(), known)
            receiver.load(tensors.items())
        if rank in (0, last):
            dist.broadcast_object_list(loss, src=0, group=group)
            dist.broadcast(own, src=0, group=group)
        if receiver:
            lines.append(show(step, loss[0], own, receiver.logits()))
            print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
