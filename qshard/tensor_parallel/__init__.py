"""Tensor parallelism: the styles of parallelize_module whose gathers of activations move codes, and what
qshard.nn's modules share with them."""

from qshard.tensor_parallel.styles import ColwiseParallel, PrepareModuleInput, RowwiseParallel

__all__ = ["ColwiseParallel", "PrepareModuleInput", "RowwiseParallel"]
