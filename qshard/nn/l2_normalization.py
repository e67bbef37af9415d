"""L2 normalization of queries and keys."""

import torch

from qshard.nn.base import Initialized


class L2Normalization(Initialized, torch.nn.Module):
    """x / sqrt(sum(x^2) + eps) over the last dimension, computed in fp32. seq_length and
    micro_batch_size change nothing here."""

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ):
        super().__init__()
        self.eps = eps

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Any shape, the same out, in the input's dtype."""
        x = input.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)).to(input.dtype)
