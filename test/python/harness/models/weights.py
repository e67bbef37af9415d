"""Ways to look at weights, on one rank and on all."""

import contextlib

import torch
import torch.nn.functional as F
from dist_helpers import device
from helpers import quantized_alike
from torch.distributed.tensor import DTensor

import qshard
from qshard._runtime.classes import TensorState
from qshard.formats import info_of

ops = torch.ops.qshard


def local(tensor):
    """The local tensor of a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def quantized_parameters(model):
    return {n: p for n, p in model.named_parameters() if qshard.is_quantized(p)}


def is_dirty(param):
    """Whether a write awaits the flush that all ranks take part in."""
    layout = TensorState(local(param).detach()).pack()[2]
    return bool(layout[6])


def full_value(param):
    """The whole value that the shards' masters (or codes, without) stand for. (Adding 0 would lose
    the sign of zeros, which NVFP4 has many of.)"""
    value = param.detach().to(device())
    return (value.full_tensor() if isinstance(value, DTensor) else value) * 1


def full_tensor(part, like):
    """The full tensor of parts that lie as those of `like` do, or a copy where that is plain."""
    if not isinstance(like, DTensor):
        return part.clone()
    facts = dict(run_check=False, shape=like.shape, stride=like.stride())
    return DTensor.from_local(part, like.device_mesh, like.placements, **facts).full_tensor()


def image_bytes(weight):
    """Every byte of the row image behind an unflushed-write-free tensor, padding rows included."""
    codes = ops.codes(weight.detach())
    size = TensorState(weight).storage_bytes()["image"]
    return torch.empty(0, dtype=torch.uint8, device=codes.device).set_(
        codes.untyped_storage(), 0, (size,), (1,)
    )


def grid(weight):
    """The scales that span rows, which are not in the image."""
    weight = weight.detach()
    info = info_of(ops.format(weight))
    if info.scale.place == "grid":
        return ops.scale_inv(weight)
    return torch.empty(0) if info.outer_scale is None else ops.tensor_scale_inv(weight)


def mismatching_bytes(weight, value, keep_master=True):
    """Bytes of image and grid of a gathered weight that differ from quantizing `value` on one
    device; padding rows must be zero. `value` may be a quantized tensor itself."""
    if not ops.is_quantized(value):
        value = quantized_alike(value, weight, keep_master)
    got, want = image_bytes(weight), image_bytes(value)
    want = F.pad(want, (0, got.numel() - want.numel()))
    grids = [grid(t).view(torch.uint8) for t in (weight, value)]
    assert grids[0].shape == grids[1].shape, (grids[0].shape, grids[1].shape)
    return int((got != want).sum() + (grids[0] != grids[1]).sum())


@contextlib.contextmanager
def unsharded(model):
    """All of a model's weights gathered."""
    modules = [m for m in model.modules() if hasattr(m, "unshard")]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


def check_gathered(model, values=None):
    """Asserts that every gathered weight is the quantization of the current value, and returns how
    many weights that were. `values`: by name, instead of what the shards hold.

    Bit for bit, unless the value itself is made from the codes: quantizing it again gives the same
    numbers, but other bytes where a block's largest code was rounded up to 224 * 2^k.
    """
    sharded = quantized_parameters(model)
    exact = {n for n, p in sharded.items() if values is not None or TensorState(local(p)).keeps_master()}
    if values is None:
        values = {name: full_value(param) for name, param in sharded.items()}
    with unsharded(model):
        for name, weight in quantized_parameters(model).items():
            assert not isinstance(weight, DTensor), name
            if name in exact:
                keeps_master = TensorState(local(sharded[name])).keeps_master()
                wrong = mismatching_bytes(weight, values[name], keeps_master)
                assert wrong == 0, f"{name}: {wrong} mismatching bytes"
            shown = ops.dequantize(quantized_alike(values[name], weight))
            assert torch.equal(ops.dequantize(weight, dtype=shown.dtype), shown), name
    return len(values)


def local_values(model):
    """Name to a copy of this rank's rows of the value: the master, if one is kept."""
    return {name: local(param).detach() * 1 for name, param in model.named_parameters()}


def different(tensors, others):
    """Names whose tensors are not bit-identical."""
    assert tensors.keys() == others.keys()
    return [n for n in tensors if not torch.equal(tensors[n], others[n])]


def check_same(tensors, others):
    """Raises where tensors are not bit-identical, and says which, and by how much."""
    found = {n: (tensors[n].float() - others[n].float()).abs() for n in different(tensors, others)}
    assert not found, {n: f"{int((d != 0).sum())} of {d.numel()}, at most {d.max()}" for n, d in found.items()}
