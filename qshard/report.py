"""What a model's parameters occupy and send, and which kernels ran."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from _qshard_hooks import is_quantized, local_of
from tabulate import tabulate
from torch import nn
from torch.distributed.tensor import DTensor

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


class Report(list):
    """A list of ParameterReport; prints as a table."""

    def __str__(self) -> str:
        total = ["total", "", ""] + [
            sum(getattr(row, field.name) for row in self)
            for field in fields(ParameterReport)
            if field.type in (int, "int")
        ]
        rows = [[getattr(row, f.name) for f in fields(ParameterReport)] for row in self]
        headers = ["parameter", "format", "shape", "image B", "master B", "grid B", "pending B",
                   "all-gather B"]
        gathered = total[-1]
        return "\n".join(
            [
                tabulate([*rows, total], headers=headers),
                "",
                f"all-gathered per forward: {gathered:,} B; per backward: {gathered:,} B with "
                "reshard_after_forward=True, else 0 B",
                "GEMM backends used so far:",
                ops.backend_report() or "  none",
            ]
        )


def report(model: nn.Module) -> Report:
    """Bytes of each parameter's shard on this rank by plane, and bytes gathered per unshard."""
    result = Report()
    for name, param in model.named_parameters():
        local = local_of(param)
        ranks = _sharding_ranks(param)
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
            padded = -(-param.shape[0] // ranks) * param.shape[1:].numel() if param.dim() else 0
            gathered = padded * ranks * local.element_size() if ranks > 1 else 0
        result.append(
            ParameterReport(
                name, format, tuple(param.shape), image, master, grid, pending, gathered
            )
        )
    return result


def _sharding_ranks(param) -> int:
    if not isinstance(param, DTensor):
        return 1
    ranks = 1
    for size, placement in zip(param.device_mesh.shape, param.placements):
        ranks *= size if placement.is_shard() else 1
    return ranks


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
