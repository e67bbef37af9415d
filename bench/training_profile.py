"""One training step as the profiler sees it: kernels by kind, collectives in bytes."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import Kernel, events_of, synchronize, trace

# The first that matches a kernel's name decides.
KINDS = [
    ("NCCL", r"^nccl"),
    ("attention", r"attn|attention|flash|fmha|sdpa"),
    ("optimizer", r"FusedAdam"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|splitK|aten::mm|aten::addmm"),
    ("copies, of FSDP2 too", r"Memcpy|Memset|CopyFunctor|split_with_sizes|chunk_cat|CatArray"),
    ("embedding, loss", r"embedding|[Ee]mbed|softmax|SoftMax|nll_loss"),
    ("elementwise, norms, sums", r"elementwise|triton|reduce|norm|Norm|GammaBeta"),
]


ITEM_SIZES = {"unsigned char": 1, "c10::BFloat16": 2, "c10::Half": 2, "float": 4}


@dataclass
class Profile:
    kernels: int
    nccl_kernels: int
    ms: dict[str, float]  # device time by kind
    attention: list[str]  # functions, so that a switch of torch's kernel is seen
    span_ms: float  # from the first kernel to the end of the last
    busy_ms: float  # of the span, while a kernel other than NCCL's ran
    gaps: int  # in what is left, where NCCL is waited for, or the host


def kind_of(kernel: Kernel) -> str:
    if kernel.is_ours:
        for part in ("transpose", "amax", "dequantize", "quantize"):
            if part in kernel.function:
                return f"qshard {part}"
        return "qshard, other"
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel.name)), "other")


def busy_and_gaps(kernels: list[Kernel]) -> tuple[float, float, int]:
    """(span, busy, gaps) of `Profile`; kernels of all streams, in order of start."""
    others = [kernel for kernel in kernels if kind_of(kernel) != "NCCL"]
    busy, gaps, end = 0.0, 0, others[0].start
    for kernel in others:
        gaps += kernel.start > end
        busy += max(0.0, kernel.start + kernel.us - max(kernel.start, end))
        end = max(end, kernel.start + kernel.us)
    return (end - others[0].start) / 1e3, busy / 1e3, gaps


def profile_step(step, device: str, file: Path | None = None) -> Profile | None:
    """Profiles a step on rank 0; a collective call. file: for Chrome's trace."""
    if dist.get_rank() != 0:
        step()
        return None
    kernels = trace(step, device, file)
    ms, attention = Counter(), {}
    for kernel in kernels:
        kind = kind_of(kernel)
        ms[kind] += kernel.us / 1e3
        if kind == "attention":
            attention[kernel.function[:60]] = None
    nccl = sum(kind_of(kernel) == "NCCL" for kernel in kernels)
    return Profile(len(kernels), nccl, dict(ms), list(attention), *busy_and_gaps(kernels))


def gathered_activations(step) -> int:
    """Bytes that this rank has after the all-gathers of a step other than FSDP2's; a collective call.
    Those of one rank's group count nothing."""
    synchronize()
    # Shapes are the host's to note: of the device nothing is asked.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profiler:
        step()
        synchronize()
    events = events_of(profiler)
    fsdp = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events
            if e.get("cat") == "user_annotation" and e["name"].startswith("FSDP::all_gather")]
    total = 0
    for event in events:
        if event.get("cat") != "cpu_op":
            continue
        tid, ts = event["tid"], event["ts"]
        if not any(tid == t and first <= ts <= last for t, first, last in fsdp):
            total += gathered_bytes(event["name"], event.get("args", {}))
    return total


def gathered_bytes(name: str, event: dict) -> int:
    """Bytes of what an operator gathers, from the shapes and types that the profiler noted."""
    if name == "c10d::_allgather_base_":  # (output, input, ...)
        output, given = map(math.prod, event["Input Dims"][:2])
        return output * ITEM_SIZES[event["Input type"][0]] if output > given else 0
    if name.startswith("_c10d_functional::all_gather_into_tensor"):  # (input, ranks, ...)
        ranks = int(event["Concrete Inputs"][1])
        size = math.prod(event["Input Dims"][0]) * ITEM_SIZES[event["Input type"][0]]
        return ranks * size if ranks > 1 else 0
    return 0
