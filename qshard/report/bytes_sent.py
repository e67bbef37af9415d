"""What a forward and backward send of each parameter, by what FSDP2, FSDP1 and DDP know of themselves.

Bytes that leave a rank: of what it puts into a collective all but its own part, as by rings and by
all-to-all; twice that for an all-reduce, which is a reduce-scatter and an all-gather.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from qshard._runtime.classes import TensorState
from qshard._runtime.hooks import holds_codes, local_of
from qshard.gradients import DDPHook, QuantizedReduceScatter, ddp_message_bytes, message_bytes
from qshard.modules.fsdp2 import groups_of_state


@dataclass
class Traffic:
    """Bytes of one parameter: those of its group, in proportion to its size."""

    ranks: int = 1  # over which it is sharded
    gathered: int = 0  # received by one unshard
    gathered_as: str = ""
    reduced: int = 0  # put into the first collective of its gradient
    weights_sent: int = 0
    gradients_sent: int = 0


def of_fsdp2(
    model: nn.Module, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> dict[int, Traffic]:
    """By the parameters' ids, sharded and gathered. The dtypes stand for those of FSDP2's policy."""
    found = {}
    for group, is_gathered_again in _groups(model):
        mesh, params = group.mesh_info, group.fsdp_params
        policy = params[0].mp_policy  # those of a group have one
        shards = getattr(mesh, "shard_mesh_size", 1)  # replicate()'s have replicas only
        replicas = getattr(mesh, "replicate_mesh_size", 1)
        to, reduce_to = param_dtype or policy.param_dtype, reduce_dtype or policy.reduce_dtype
        rows = [Traffic(ranks=shards) for _ in params]
        if shards > 1:
            again = group.post_forward_mesh_info.shard_mesh_size if is_gathered_again else None
            _count_weights(rows, params, shards, again, to)
        trained = [(row, p) for row, p in zip(rows, params) if p.sharded_param.requires_grad]
        if trained:
            dtype = reduce_to or _gradient_dtype(trained[0][1], to)  # all have the same
            _count_gradients(group, trained, shards, replicas, dtype)
        for row, param in zip(rows, params):
            for each in (param.sharded_param, getattr(param, "_unsharded_param", None)):
                found[id(each)] = row
    return found


def _count_weights(rows, params, shards, ranks_again, dtype):
    """`ranks_again`: over which backward gathers them once more, if it does."""
    for row, param in zip(rows, params):
        local = local_of(param.sharded_param)
        if holds_codes(local):
            row.gathered = shards * TensorState(local).storage_bytes()["sent"]
            row.gathered_as = "codes"
        else:
            of = dtype or local.dtype
            row.gathered = shards * param.padded_sharded_param_size.numel() * of.itemsize
            row.gathered_as = name_of(of)
        row.weights_sent = row.gathered // shards * (shards - 1)
        if ranks_again is not None:
            row.weights_sent += row.gathered // ranks_again * (ranks_again - 1)


def _gradient_dtype(param, param_dtype):
    # Later torch reduces in the dtype of accumulated gradients; the property is there after the first
    # forward.
    follows = hasattr(type(param), "unsharded_grad_dtype")
    default = param.sharded_grad_dtype if follows else param_dtype
    return default or local_of(param.sharded_param).dtype


def _count_gradients(group, trained, shards, replicas, dtype):
    numels = [param.padded_sharded_param_size.numel() for _, param in trained]
    shard = sum(numels) * dtype.itemsize
    comm = group._reduce_scatter_comm
    if shards == 1:
        reduced, sent = (shard, 0) if replicas > 1 else (0, 0)
    elif isinstance(comm, QuantizedReduceScatter):
        message = message_bytes(comm.format, sum(numels))
        reduced, sent = shards * message, (shards - 1) * message
    else:
        reduced, sent = shards * shard, (shards - 1) * shard
    sent += all_reduce_sent(shard, replicas)
    for (row, _), of_reduced, of_sent in zip(trained, split(reduced, numels), split(sent, numels)):
        row.reduced, row.gradients_sent = of_reduced, of_sent


def _groups(model) -> Iterator[tuple[object, bool]]:
    """FSDP2's groups of parameters, and whether backward gathers their weights again."""
    inner, seen = inner_modules(model, FSDPModule), set()
    for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
        state = module._get_fsdp_state()
        # The first forward tells roots, whose weights stay gathered after it unless one said otherwise.
        is_root = state._is_root if state._is_root is not None else id(module) not in inner
        stays = state._auto_reshard_after_forward and is_root
        for group in groups_of_state(state):
            if id(group) not in seen:
                seen.add(id(group))
                again = group.post_forward_mesh_info is not None and group.unshard_in_backward
                yield group, again and not stays


def of_ddp(model: nn.Module) -> dict[int, Traffic]:
    """By the parameters' ids. For communication hooks that are not ours, what DDP would send without."""
    found = {}
    for ddp in (m for m in model.modules() if isinstance(m, DistributedDataParallel)):
        ranks = ddp.process_group.size()
        params = [
            param
            for name, param in ddp.module.named_parameters()
            if param.requires_grad and name not in ddp.parameters_to_ignore
        ]
        if ranks == 1 or not params:
            continue
        hook = next((hook for hook, _ in ddp._comm_hooks if isinstance(hook, DDPHook)), None)
        known = ddp._get_ddp_logging_data()
        buckets = list(map(int, (known.get("rebuilt_bucket_sizes") or known["bucket_sizes"]).split(",")))
        if hook is not None:
            numels = _bucket_numels(hook, params, buckets)
            buckets = [ranks * ddp_message_bytes(hook.format, numel, ranks) for numel in numels]
        reduced = sum(buckets)
        sent = sum(all_reduce_sent(nbytes, ranks) for nbytes in buckets)
        numels = [p.numel() for p in params]
        for param, *sizes in zip(params, split(reduced, numels), split(sent, numels)):
            found[id(param)] = Traffic(reduced=sizes[0], gradients_sent=sizes[1])
    return found


def _bucket_numels(hook, params, buckets):
    """Each bucket is of one dtype, and DDP says its bytes. With several dtypes the hook knows buckets after
    a step; before, one bucket for each."""
    dtypes = [param.dtype for param in params]
    if len(set(dtypes)) == 1:
        return [nbytes // dtypes[0].itemsize for nbytes in buckets]
    if len(hook.numels) == len(buckets):
        return list(hook.numels.values())
    return [sum(p.numel() for p in params if p.dtype == dtype) for dtype in set(dtypes)]


def of_unit(module: nn.Module, is_inner: bool, gathered: int, reduced: int) -> tuple[int, int]:
    """Bytes of weights and of gradients of a unit of FSDP1."""
    handle, flat = module._handle, module._handle.flat_param
    ranks, strategy = handle.world_size, handle._sharding_strategy.name
    is_root = module._is_root if module._is_root is not None else not is_inner
    is_gathered_again = strategy in ("FULL_SHARD", "HYBRID_SHARD") and not is_root
    weights = gathered * (ranks - 1) // ranks * (2 if is_gathered_again else 1)
    if strategy == "NO_SHARD":
        nbytes = flat.requires_grad * flat.numel() * handle._reduce_dtype.itemsize
        return weights, all_reduce_sent(nbytes, module.process_group.size())
    gradients = reduced * (ranks - 1) // ranks
    if "HYBRID" in strategy:
        gradients += all_reduce_sent(reduced // ranks, module._inter_node_pg.size())
    return weights, gradients


def inner_modules(model: nn.Module, kind: type) -> set[int]:
    """Ids of modules of a kind that are within another one."""
    modules = [m for m in model.modules() if isinstance(m, kind)]
    return {id(m) for outer in modules for m in outer.modules() if m is not outer}


def all_reduce_sent(nbytes: int, ranks: int) -> int:
    return 2 * nbytes * (ranks - 1) // ranks


def split(total: int, sizes: list[int]) -> list[int]:
    """Parts of `total` in proportion to `sizes`, which add up to it."""
    ends = [0, *accumulate(sizes)]
    return [total * end // max(ends[-1], 1) - total * begin // max(ends[-1], 1)
            for begin, end in pairwise(ends)]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
