"""Reads pickles of quantized tensors, and torch.load's legacy format.

Pickles name these functions as functions of `qshard.serialization`. Files may come from strangers: what they
claim is checked against the bytes they hold.
"""

import functools
import sys
import threading
from importlib.machinery import ModuleSpec

import torch

from qshard._runtime.classes import SavedTensor
from qshard._runtime.patches import add_finder, call, wrap


def rebuild_tensor(
    data, pending, layout, format, size, stride, storage_offset, dtype, state, requires_grad
):
    """Unpickles a quantized tensor. Ordinary checkpoints do not hold any.

    data, pending, layout, format, state: as TensorState.pack() gives them; files from before formats of
    two row images lack the last entry of `layout`.
    """
    for integer in (*layout, *size, *stride, storage_offset):
        if type(integer) is not int or not -(2**63) <= integer < 2**63:
            raise ValueError(
                "qshard: layout, sizes, strides and storage_offset of a saved quantized tensor "
                "must be integers of 64 bits"
            )
    if type(dtype) is not torch.dtype or type(requires_grad) is not bool:
        raise TypeError(
            "qshard: a saved quantized tensor needs a torch.dtype and a bool for requires_grad, "
            f"got {type(dtype).__name__} and {type(requires_grad).__name__}"
        )
    saved = SavedTensor(data, pending, layout, format, size, stride, storage_offset, dtype, state)
    tensor = _read_later(saved) if _is_read_later() else saved.read()
    return tensor.requires_grad_(requires_grad)


def rebuild_shared(
    tensor_type,
    master,
    codes,
    pending,
    layout,
    format,
    state,
    size,
    stride,
    storage_offset,
    dtype,
    requires_grad,
):
    """A tensor, or Parameter, over planes that another process shares. Not a file format."""
    saved = SavedTensor(codes, pending, layout, format, size, stride, storage_offset, dtype, state)
    tensor = saved.over_shared_planes(master)
    if tensor_type is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


for function in (rebuild_tensor, rebuild_shared):
    function.__module__ = "qshard.serialization"  # the name in pickles


# ------------------------------------------------------------------------- the legacy format

# torch.save(..., _use_new_zipfile_serialization=False) writes the bytes of all storages after the pickle,
# and torch.load fills them when the pickle has been read. A plain tensor shares its storage's memory; ours
# takes planes out of it, and so is filled after that, by a wrapper of torch's reader.


class _LegacyReads(threading.local):
    """For each file that this thread reads, the innermost last, its tensors to fill."""

    def __init__(self):
        self.files = []


_legacy_reads = _LegacyReads()
_legacy_code, _zip_code = (
    getattr(getattr(torch.serialization, name, None), "__code__", None)
    for name in ("_legacy_load", "_load")
)


def _is_read_later():
    """Whether the innermost of torch's readers, which called this, reads the legacy format."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _zip_code:
        if frame.f_code is _legacy_code:
            return True
        frame = frame.f_back
    return False


def _read_later(saved):
    if not _legacy_reads.files:  # unpickling imported this module: the wrapper came too late
        raise RuntimeError(
            "qshard: torch.load reads quantized tensors from a file in the legacy format "
            "(_use_new_zipfile_serialization=False) only if qshard was loaded before; `import qshard` first"
        )
    tensor = saved.read_later()
    _legacy_reads.files[-1].append((tensor.detach(), saved))
    return tensor


@wrap("torch.serialization:_legacy_load")
def _fill_after_legacy_load(stock):
    @functools.wraps(stock)
    def _legacy_load(*args, **kwargs):
        tensors = []
        _legacy_reads.files.append(tensors)
        try:
            result = stock(*args, **kwargs)
            for tensor, saved in tensors:
                saved.read_into(tensor)
            return result
        finally:
            _legacy_reads.files.pop()

    return _legacy_load


# Files written before `qshard.serialization` was there have another name.
call(
    "torch.serialization:add_safe_globals",
    [rebuild_tensor, (rebuild_tensor, "_qshard_checkpoint.rebuild_tensor")],
)


class _PackageOfTheLibrary:
    """Stands in for the `qshard` package where that is not installed: pickle imports the parent of
    a module before it looks the module up. The last finder, so that an installed package is
    found."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "qshard":
            return None
        return ModuleSpec("qshard", self, origin="libqshard.so", is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def missing(name):
            raise AttributeError(
                f"qshard.{name}: only the library is loaded, the Python package is not installed"
            )

        module.__doc__ = "The part of qshard that its library brings."
        module.serialization = sys.modules["qshard.serialization"]
        module._runtime = sys.modules["qshard._runtime"]
        module.__getattr__ = missing


add_finder("sys:meta_path[-1]", _PackageOfTheLibrary())
