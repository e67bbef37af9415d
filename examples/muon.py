"""Muon for matrices and for stacks of matrices, such as the weights of experts.

torch.optim.Muon takes matrices alone. This one takes stacks, too: it orthogonalizes each matrix of a stack by itself,
all in one batched product. Parameters may be plain or quantized, and may be DTensors. A stack that FSDP2 has cut
along its first dimension has whole matrices on each rank, so its step sends nothing. A matrix is gathered.

    from muon import Muon

    matrices = [p for p in model.parameters() if p.ndim in (2, 3)]
    optimizer = Muon(matrices, lr=0.02)
"""

import math

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # torch.optim.Muon's
EPS = 1e-7


def orthogonalized(update: torch.Tensor, steps: int) -> torch.Tensor:
    """About U V^T of each matrix U S V^T, by Newton-Schulz iterations in bf16."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16()
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def has_whole_matrices(dtensor: DTensor) -> bool:
    """Whether no rank holds a part of a matrix."""
    stacks = dtensor.ndim == 3
    return all(p.is_replicate() or (stacks and p.is_shard(0)) for p in dtensor.placements)


def orthogonalized_everywhere(update: torch.Tensor, steps: int) -> torch.Tensor:
    if not isinstance(update, DTensor):
        return orthogonalized(update, steps)
    mesh, placements = update.device_mesh, update.placements
    if has_whole_matrices(update):
        local = orthogonalized(update.to_local(), steps)
        facts = dict(run_check=False, shape=update.shape, stride=update.stride())
        return DTensor.from_local(local.contiguous(), mesh, placements, **facts)
    whole = orthogonalized(update.full_tensor(), steps)  # each rank does it, and keeps its rows
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


class Muon(torch.optim.Optimizer):
    """Arguments as of torch.optim.Muon."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_steps=5):
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps
        )
        super().__init__(params, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim not in (2, 3):
                    raise ValueError(
                        f"Muon takes matrices and stacks of matrices, got a parameter of shape {tuple(param.shape)}; "
                        "give it to another optimizer, such as AdamW"
                    )

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)
        return loss

    def update(self, param, group):
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param.grad)
        grad, momentum = param.grad, state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = orthogonalized_everywhere(update, group["ns_steps"])
        rows, columns = param.shape[-2:]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))
