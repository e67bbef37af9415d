"""Memory for the tensors of fuzz_operators.py: each ends where a page begins that may not be
touched, so that one byte read or written behind it ends the process."""

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE = 0
M_PERTURB = -6  # of malloc.h: new memory is filled with the complement of this byte
CANARY = 0xA5
PAGE = mmap.PAGESIZE
ARENA = 64 * PAGE  # bytes before a guard page: the largest tensor
COUNT = 48  # of them; more tensors of a call lie in ordinary memory


def fill_new_memory(byte):
    """From now on malloc's memory, and with it what at::empty gives, is filled with a byte."""
    assert _libc.mallopt(M_PERTURB, byte ^ 0xFF) == 1


class Memory:
    """Arenas in front of guard pages. Those of one call are taken again by the next. Without
    `guards`: ordinary memory."""

    def __init__(self, guards=True):
        self.taken = []  # (address, bytes) of this call's tensors
        self.ends = self.guarded() if guards else []

    def guarded(self):
        step = ARENA + PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _libc.mmap(None, COUNT * step, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert start not in (None, ctypes.c_void_p(-1).value), "mmap failed"
        ends = [start + i * step + ARENA for i in range(COUNT)]
        for end in ends:
            assert _libc.mprotect(end, PAGE, PROT_NONE) == 0
        return ends

    def reset(self):
        self.taken.clear()

    def copy(self, tensor):
        """A contiguous copy whose last byte is the last before a guard page. What is empty or too
        large goes to ordinary memory."""
        if not 0 < tensor.nbytes <= ARENA - PAGE or len(self.taken) == len(self.ends):
            return tensor.clone()
        address = self.ends[len(self.taken)] - tensor.nbytes
        self.taken.append((address, tensor.nbytes))
        ctypes.memset(address - PAGE, CANARY, PAGE)
        buffer = (ctypes.c_uint8 * tensor.nbytes).from_address(address)
        there = torch.frombuffer(buffer, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    def is_whole(self):
        """Whether the page of bytes before each tensor is what it was."""
        expected = bytes([CANARY]) * PAGE
        return all(ctypes.string_at(address - PAGE, PAGE) == expected for address, _ in self.taken)
