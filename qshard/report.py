"""What a model's parameters occupy and send, and which kernels ran."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from _qshard_hooks import is_quantized, local_of
from _qshard_placement import group_names, in_groups, is_strided
from tabulate import tabulate
from torch import nn
from torch.distributed.tensor import DTensor

from qshard import clients
from qshard.gradients import reduction_formats

ops = torch.ops.qshard


@dataclass(frozen=True)
class ParameterReport:
    """One parameter on this rank; sizes in bytes."""

    name: str
    format: str
    shape: tuple[int, ...]
    image: int
    master: int
    grid: int
    pending: int
    gathered: int  # received and kept by one unshard, padding rows included
    reduced: int  # put into one reduction of the gradient over the shards, padding rows included
    ranks: int  # over which the parameter is sharded


@dataclass(frozen=True)
class Sent:
    """Bytes: of weights by one all-gather of all of them, of gradients by one reduction."""

    weights: int
    gradients: int


class Report(list):
    """A list of ParameterReport; prints as a table. `clients`: lines on what it is used with."""

    clients: tuple[str, ...] = ()

    def __str__(self) -> str:
        columns = {"image B": "image", "master B": "master", "grid B": "grid", "pending B": "pending",
                   "all-gather B": "gathered", "gradient B": "reduced"}
        rows = [[row.name, row.format, row.shape, *(getattr(row, c) for c in columns.values())]
                for row in self]
        sums = [sum(getattr(row, column) for row in self) for column in columns.values()]
        gathered = sums[-2]
        sent = self.sent()
        return "\n".join(
            [
                tabulate([*rows, ["total", "", "", *sums]],
                         headers=["parameter", "format", "shape", *columns]),
                "",
                f"all-gathered per forward: {gathered:,} B; per backward: {gathered:,} B with "
                "reshard_after_forward=True, else 0 B",
                f"sent to other ranks per step: weights {sent.weights:,} B for each time they are "
                f"all-gathered, gradients {sent.gradients:,} B",
                *self.clients,
                "GEMM backends used so far:",
                ops.backend_report() or "  none",
            ]
        )

    def sent(self) -> "Sent":
        """Bytes that leave this rank: of what it puts into a collective, all but its own part, as by
        NCCL's rings and by all-to-all."""
        weights, gradients = (
            sum(getattr(row, field) * (row.ranks - 1) // row.ranks for row in self)
            for field in ("gathered", "reduced")
        )
        return Sent(weights, gradients)


def report(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Report:
    """Bytes of each parameter's shard on this rank by plane, and bytes gathered per unshard and put into
    the reduction of its gradient. `param_dtype`, `reduce_dtype`: those of FSDP2's MixedPrecisionPolicy,
    in which plain weights, and gradients that `reduce_gradients_` does not quantize, travel. Says, too,
    whether the wrapper, the `optimizer` and the kind of checkpoint are ones that qshard is tested
    with."""
    result, formats = Report(), reduction_formats(model)
    result.clients = tuple(clients.lines(model, optimizer))
    for name, param in model.named_parameters():
        local = local_of(param)
        ranks = _sharding_ranks(param)
        padded = -(-param.shape[0] // ranks) * param.shape[1:].numel() if param.dim() else 0
        if is_quantized(local):
            planes = ops._storage_bytes(local)
            image, master, grid, pending = (
                planes[plane] for plane in ("image", "master", "grid", "pending")
            )
            sent, format = planes["sent"], ops.format(local)
            gathered = sent * ranks if ranks > 1 else 0
        else:
            image = local.numel() * local.element_size()
            master = grid = pending = 0
            format = str(local.dtype).removeprefix("torch.")
            sent_as = param_dtype or local.dtype
            gathered = padded * ranks * sent_as.itemsize if ranks > 1 else 0
        if ranks == 1 or not param.requires_grad:
            reduced = 0
        elif param in formats:
            reduced = ranks * ops._gradient_message_bytes(formats[param], padded)
        else:
            reduced = ranks * padded * (reduce_dtype or param_dtype or local.dtype).itemsize
        result.append(
            ParameterReport(
                name, format, tuple(param.shape), image, master, grid, pending, gathered, reduced,
                ranks,
            )
        )
    return result


def _sharding_ranks(param) -> int:
    if not isinstance(param, DTensor):
        return 1
    # What FSDP2 cut; of a tensor that tensor parallelism cut by rows before, torch says so.
    local = param._local_tensor
    tensor = ops._tensor_groups(local) if is_quantized(local) else ()
    is_tensor = in_groups(group_names(param.device_mesh), tensor)
    placements = list(zip(is_tensor, param.device_mesh.shape, param.placements))
    strided = [size for _, size, placement in placements if is_strided(placement)]
    cut = [size for other, size, p in placements if p.is_shard(0) and not other]
    return math.prod(strided or cut)


def backend_report() -> str:
    """What linears multiply on each device here, and then one line per GEMM path taken so far:
    format, direction, backend, count, and why if it is not a low-precision GEMM."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    lines = [line for i in devices for line in _device_lines(torch.device("cuda", i))]
    lines = lines or _device_lines(torch.device("cpu"))
    return "\n".join(lines) + "\n" + ops.backend_report()


# Compute capabilities that the GPU tests have run on; bench/results holds what they measured.
_TESTED_ON = {(9, 0)}


def _device_lines(device: torch.device) -> list[str]:
    name, note = str(device), ""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name += f" {torch.cuda.get_device_name(device)}, compute capability %d.%d" % capability
        if capability not in _TESTED_ON:
            note = " (written, but qshard's tests have not run on such a GPU)"
    formats_by_reason: dict[str, list[str]] = {}
    for format, reason in ops._why_dequantized(device).items():
        formats_by_reason.setdefault(reason, []).append(format)
    return [
        f"{name}: {', '.join(formats)}: "
        + (f"dequantized GEMM: {reason}" if reason else f"low-precision GEMM{note}")
        for reason, formats in formats_by_reason.items()
    ]


@contextmanager
def trace_fallbacks() -> Iterator[dict[str, int]]:
    """Counts the operators that ran by dequantizing; the dict is filled when the block ends.

    >>> with qshard.trace_fallbacks() as counts:
    ...     model(x)
    >>> counts
    {'aten::norm.ScalarOpt_dim': 1}
    """
    counts: dict[str, int] = {}
    ops._set_fallback_tracing(True)
    try:
        yield counts
    finally:
        counts.update(ops._traced_fallbacks())
        ops._set_fallback_tracing(False)
