"""qshard.debug: the diagnosis of a write that some ranks made and others did not.

Whether ranks meet in a flush follows from what each of them knows was written. A write on some ranks
only cannot be known to the others, so the ranks that wrote would wait for the rest for ever. With
`is_on`, every gather and every optimizer step first compares what the ranks know, and all of them
raise one error.
"""

import os

import torch.distributed as dist

from qshard._runtime.classes import TensorState

# Equal on all ranks, as TORCH_DISTRIBUTED_DEBUG is: the comparison is a collective.
is_on = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def check_written(shards, names, has_grad):
    """Raises the same RuntimeError on every rank if the ranks of a parameter disagree on whether it
    was written, as one with a gradient is by an optimizer's step. A collective over the ranks of each
    shard's mesh; the lists are in the same order on all of them."""
    if not shards or not dist.is_initialized():
        return
    differences = []
    rank, world = dist.get_rank(), dist.get_world_size()
    states = TensorState.written_by_rank(shards, has_grad, rank, world).tolist()
    for name, by_rank in zip(names, states):
        wrote = [rank for rank, state in enumerate(by_rank) if state == 2]
        did_not = [rank for rank, state in enumerate(by_rank) if state == 1]
        if wrote and did_not:
            differences.append(
                f"{name} was written on {_ranks(wrote)} and not on {_ranks(did_not)}"
            )
    if differences:
        raise RuntimeError(
            f"qshard.debug: since its last flush {'; '.join(differences)}. Make such a write on all "
            "ranks, or call qshard.flush(model) on all ranks after it"
        )


def _ranks(ranks):
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def name_of_gathered(fsdp_param, shard):
    """The name that FSDP2 knows its parameter by, from the root of the sharded model."""
    name = getattr(fsdp_param, "_param_fqn", None)
    return name or f"a quantized parameter with shards of shape {tuple(shard.shape)}"


def names_in_optimizer(param_group, number):
    """Names of a group's parameters, which an optimizer made from named_parameters() knows."""
    names = param_group.get("param_names")
    count = len(param_group["params"])
    return names or [f"parameter {i} of the optimizer's group {number}" for i in range(count)]
