"""An allocation that fails is an error of the operator, and leaves the tensors as they were."""

import ctypes
import resource

import pytest
import torch
from forked import outcome
from helpers import assert_same, assert_unchanged, ops, state, value, weight

ROWS, COLS = 8192, 2048  # a value of 64 MB: malloc gives no freed memory to what is above 32
LEFT = 1 << 20  # bytes that may still be allocated
M_MMAP_THRESHOLD = -3  # as malloc.h has it


def quantized(fmt, keep_master):
    return ops.quantize(weight(ROWS, COLS), fmt, keep_master=keep_master, logical_rows=ROWS)


def device_copy(q):
    """What FSDP2 moves of an offloaded shard: its codes, while the value stays with the original."""
    return q.to("cpu", non_blocking=True, copy=True)


# What needs memory for a value or for codes: of the tensor, and of a copy that is linked to it.
NEEDS_MEMORY = {
    "a write of the original": lambda q, copied: q.mul_(2),
    "a write of the copy": lambda q, copied: copied.mul_(2),
    "a read of the copy": lambda q, copied: copied * 1,
    "a sum": lambda q, copied: q + q,
    "out=": lambda q, copied: torch.mul(q, 2, out=q),
}


def return_freed_memory():
    """Gives the system what was freed, and maps each large tensor on its own from here on."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)


def fill_heap():
    """Tensors that take all memory from which malloc could still serve a large allocation: tests that ran
    before in this process may have left freed memory in the middle of its heap, which counts as used."""
    filling, numel = [], ROWS * COLS * 4
    while numel > LEFT:
        try:
            filling.append(torch.empty(numel, dtype=torch.uint8))
        except RuntimeError:
            numel //= 2
    return filling


def run(fmt, keep_master, name):
    return_freed_memory()
    q = quantized(fmt, keep_master)
    ops.flush([q])
    copied = device_copy(q)
    before, values = state(q), value(q)
    return_freed_memory()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LEFT, hard))
    try:
        filling = fill_heap()
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            NEEDS_MEMORY[name](q, copied)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    del filling
    assert_unchanged(q, before)
    assert_same(copied, values)
    assert_same(NEEDS_MEMORY[name](q, copied), values if "read" in name else values * 2)
    return "unchanged"


@pytest.mark.pairwise
@pytest.mark.parametrize("name", NEEDS_MEMORY)
@pytest.mark.parametrize("keep_master", [True, False], ids=["master", "no-master"])
@pytest.mark.parametrize("fmt", ["float8_tensorwise", "mxfp8"])
def test_what_finds_no_memory_changes_nothing(fmt, keep_master, name):
    answer = outcome(lambda: run(fmt, keep_master, name))
    assert answer == ("returned", repr("unchanged")), answer
