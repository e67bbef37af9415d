"""Trains on all ranks; rank 0 puts the weights' codes into shared memory after every step, where a process of its own
reads them as its parameters.

torchrun --nproc-per-node 2 examples/rollout/shared_memory.py
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rollout import OPTIONS, Receiver, Trainer, arguments, group_of_trainers, show
from tqdm import trange

from qshard.checkpoint import digests, quantized_tensors, verify


def receive(args, ignored, pipe):
    """The receiver's process: its parameters lie in memory that the trainer writes, while this one waits."""
    receiver, tensors = Receiver(args, ignored), pipe.recv()
    receiver.load(tensors.items())
    while (known := pipe.recv()) is not None:
        verify(tensors.items(), known)
        pipe.send(receiver.logits())


def put(trainer, shared):
    """One sync: tensors of rank 0 go to the memory of their names."""
    with quantized_tensors(trainer.model, dst=0, **OPTIONS) as stream:
        for name, tensor in stream:
            if name not in shared:
                shared[name] = torch.empty_like(tensor).share_memory_()
            shared[name].copy_(tensor)
    return digests(trainer.model, **OPTIONS)


def main(argv=None):
    args = arguments(__doc__, argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, lines, shared = dist.get_rank(), [], {}
    trainer = Trainer(args, group_of_trainers(dist.get_world_size()))
    ignored, pipe, process = trainer.ignored(), None, None
    for step in trange(args.steps, disable=rank != 0):
        loss, known, own = trainer.step(step), put(trainer, shared), trainer.logits()
        if rank == 0:
            if process is None:
                context = mp.get_context("spawn")
                pipe, remote = context.Pipe()
                process = context.Process(target=receive, args=(args, ignored, remote), daemon=True)
                process.start()
                pipe.send(shared)
            pipe.send(known)
            lines.append(show(step, loss, own, pipe.recv()))
            print(lines[-1], flush=True)
        dist.barrier()
    if rank == 0:
        pipe.send(None)
        process.join()
    return lines


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
