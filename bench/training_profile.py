"""One training step as the profiler sees it: kernels by kind, collectives in bytes."""

import re
from collections import Counter
from dataclasses import dataclass

import torch.distributed as dist
from measuring import Kernel, trace

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


@dataclass
class Profile:
    kernels: int
    nccl_kernels: int
    ms: dict[str, float]  # device time by kind
    attention: list[str]  # functions, so that a switch of torch's kernel is seen


def kind_of(kernel: Kernel) -> str:
    if kernel.is_ours:
        for part in ("transpose", "amax", "dequantize", "quantize"):
            if part in kernel.function:
                return f"qshard {part}"
        return "qshard, other"
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel.name)), "other")


def profile_step(step, device: str) -> Profile | None:
    """Profiles a step on rank 0; a collective call."""
    if dist.get_rank() != 0:
        step()
        return None
    kernels = trace(step, device)
    ms, attention = Counter(), {}
    for kernel in kernels:
        kind = kind_of(kernel)
        ms[kind] += kernel.us / 1e3
        if kind == "attention":
            attention[kernel.function[:60]] = None
    nccl = sum(kind_of(kernel) == "NCCL" for kernel in kernels)
    return Profile(len(kernels), nccl, dict(ms), list(attention))
