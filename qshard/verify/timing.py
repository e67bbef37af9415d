"""How long operators take on a GPU, beside a copy of their bytes and a GEMM in bfloat16."""

import functools
from collections.abc import Callable
from statistics import median

import torch

CALLS = 10
CACHE = 256 << 20  # bytes, five times the L2 cache of an H200
AHEAD = 2_000_000  # cycles for which the GPU waits, so that the host has launched a call before it begins


class Clock:
    """Times of one GPU: the median of several calls, each after its caches were filled with other bytes."""

    def __init__(self, device: torch.device):
        self.device = device
        self.other = torch.empty(CACHE, dtype=torch.uint8, device=device)

    def us(self, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """`before` runs before each call, and is not timed."""
        with torch.cuda.device(self.device):
            for _ in range(3):
                before()
                call()
            events = []
            for _ in range(CALLS):
                before()
                self.other.zero_()
                torch.cuda._sleep(AHEAD)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                events.append((start, end))
                torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in events) * 1e3

    @functools.lru_cache(maxsize=256)
    def us_of_copy(self, bytes: int) -> float:
        """The time of a copy that reads and writes so many in all."""
        source = torch.zeros(max(1, bytes // 2), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self.us(lambda: target.copy_(source))

    @functools.lru_cache(maxsize=64)
    def us_of_bf16(self, m: int, n: int, k: int) -> float:
        """The time of an (m, k) by (k, n) product."""
        a, b = (torch.randn(*shape, device=self.device).bfloat16() for shape in ((m, k), (n, k)))
        return self.us(lambda: a @ b.t())
