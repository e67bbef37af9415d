"""Muons as users of FSDP2 write them: they send momentum, and write the local tensors of parameters."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

COEFFICIENTS = 3.4445, -4.7750, 2.0315


def orthogonalized(matrix):
    return newton_schulz(matrix, COEFFICIENTS, 5, 1e-7).to(matrix.dtype)


def group_of(param):
    """The ranks that hold its rows; None for a plain parameter."""
    if not isinstance(param, DTensor):
        return None
    (dim,) = [i for i, placement in enumerate(param.placements) if placement.is_shard()]
    return param.device_mesh.get_group(dim)


def rows_by_rank(rows, ranks):
    each = -(-rows // ranks)
    return [max(0, min(each, rows - rank * each)) for rank in range(ranks)]


class LocalMuon(torch.optim.Optimizer):
    """momentum_buffer is a plain local tensor."""

    def __init__(self, params, lr=1e-2, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            updates = [self.momentum_of(param, group) for param in group["params"]]
            for param, update in zip(group["params"], self.orthogonalized(group["params"], updates)):
                local = param.to_local() if isinstance(param, DTensor) else param
                local.mul_(1 - 0.1 * group["lr"])
                local.add_(update, alpha=-group["lr"])

    def momentum_of(self, param, group):
        state = self.state[param]
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(grad))
        momentum.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"])


class GatheringMuon(LocalMuon):
    """Each rank gathers each matrix, orthogonalizes it, and keeps its rows."""

    def orthogonalized(self, params, updates):
        for param, update in zip(params, updates):
            group = group_of(param)
            if group is None:
                yield orthogonalized(update)
                continue
            rows, columns = param.shape
            by_rank = rows_by_rank(rows, group.size())
            padded = update.new_zeros(by_rank[0], columns)
            padded[: len(update)] = update
            whole = update.new_empty(by_rank[0] * group.size(), columns)
            dist.all_gather_into_tensor(whole, padded, group=group)
            yield orthogonalized(whole[:rows]).split(by_rank)[group.rank()]


class ExchangingMuon(LocalMuon):
    """Each rank orthogonalizes one of as many matrices as there are ranks: two all-to-alls."""

    def orthogonalized(self, params, updates):
        group = group_of(params[0])
        if group is None:
            return map(orthogonalized, updates)
        ranks, rank, results = group.size(), group.rank(), []
        for first in range(0, len(params), ranks):
            those, mine = params[first : first + ranks], updates[first : first + ranks]
            sizes = [update.numel() for update in mine] + [0] * (ranks - len(mine))
            theirs = []  # numbers that this rank gets of its matrix, from each rank
            if rank < len(those):
                rows, columns = those[rank].shape
                theirs = [part * columns for part in rows_by_rank(rows, ranks)]
            theirs = theirs or [0] * ranks
            whole = mine[0].new_empty(sum(theirs))
            sent = torch.cat([update.flatten() for update in mine])
            dist.all_to_all_single(whole, sent, theirs, sizes, group=group)
            if rank < len(those):
                whole = orthogonalized(whole.view(those[rank].shape)).flatten()
            back = torch.empty_like(sent)
            dist.all_to_all_single(back, whole, sizes, theirs, group=group)
            parts = back.split(sizes[: len(mine)])
            results += [part.view_as(update) for part, update in zip(parts, mine)]
        return results
