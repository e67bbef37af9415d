"""Steps of random programs that write a tensor by other names than its own: .data, values of a
state_dict, raw memory, inference mode, what FSDP2 gathered, and windows of columns. See program_steps.py."""

import copy
import ctypes

import torch
import torch.nn.functional as F
from helpers import is_quantized, ops
from models.weights import local
from program_steps import step
from program_tensor_steps import (
    MAKERS,
    WRITES,
    Codes,
    draw_make,
    draw_write,
    keep_made,
    made,
    random_like,
    through,
)
from program_values import plain_value, rounded_like
from torch import nn

import qshard
from qshard._runtime.classes import TensorState

SIMPLE_WRITES = ("mul_", "add_", "fill_", "zero_", "copy_", "clamp_", "lerp_", "masked_fill_")


def draw_layer(d, needs_address=False):
    """The number of a layer. `needs_address`: whose weight's memory holds its value."""
    layers = [
        i
        for i, layer in enumerate(d.setup.layers)
        if not needs_address or layer.keep_master or not layer.format
    ]
    return d.choice(layers) if layers else None


# -------------------------------------------------------------------------- .data and aliases


@step(2, draw_write)
def data_write(subject, target, view, op, number, seed):
    """Through .data, which no version counter follows."""
    WRITES[op](through(subject.variable(target).data, view), number, seed)


@step(1, lambda d: {"to": d.target(), "source": d.target(), "flushes": d.chance(0.5)})
def data_copy(subject, to, source, flushes):
    """As online and target networks are copied; what has another shape is filled."""
    to, source = subject.variable(to).data, subject.variable(source).data
    if flushes:
        if subject.quantized:
            qshard.flush(subject.model)
        yield
    to.copy_(source) if to.shape == source.shape and not subject.setup.sharded else to.fill_(0.5)


def draw_state_write(d):
    return {
        "layer": draw_layer(d),
        "op": d.choice(SIMPLE_WRITES),
        "number": d.number(),
        "seed": d.seed(),
    }


@step(1.5, draw_state_write)
@torch.no_grad()
def write_state_dict(subject, layer, op, number, seed):
    """A value of state_dict() is an alias of the parameter."""
    value = local(subject.model.state_dict()[f"layers.{layer}.weight"]).detach()
    WRITES[op](value, number, seed)


# ----------------------------------------------------------------------------------- raw memory


class DeviceBytes:
    """Memory of a GPU, for torch.as_tensor."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": "|u1",
            "version": 2,
        }


def memory_of(tensor):
    """A plain tensor over the memory of a dense one: writes to it move no version counter of that."""
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.is_cuda:
        flat = torch.as_tensor(DeviceBytes(tensor.data_ptr(), count), device=tensor.device)
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * count).from_address(tensor.data_ptr()), dtype=torch.uint8)
    return flat.view(tensor.dtype).view(tensor.shape)


def draw_raw_write(d):
    layer = draw_layer(d, needs_address=True)
    if layer is None:
        return None
    return {"layer": layer, "op": d.choice(SIMPLE_WRITES), "number": d.number(), "seed": d.seed()}


@step(1.5, draw_raw_write)
@torch.no_grad()
def raw_write(subject, layer, op, number, seed):
    """At its address, and then said."""
    weight = subject.tensor(f"w{layer}")
    WRITES[op](memory_of(weight), number, seed)
    if is_quantized(weight):
        qshard.mark_written(weight)


class RawOptimizer(torch.optim.Optimizer):
    """Writes memory after one of torch's own kernels, in one step()."""

    def __init__(self, params, fused):
        super().__init__(params, {})
        self.fused = fused

    @torch.no_grad()
    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params]
        if self.fused:
            zeros = [[torch.zeros_like(p.grad) for p in params] for _ in range(2)]
            steps = [torch.ones((), device=local(p).device) for p in params]
            numbers = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
            torch._fused_adamw_(params, grads, *zeros, [], steps, **numbers, amsgrad=False, maximize=False)
        else:
            torch._foreach_add_(params, grads, alpha=-0.01)
        for param in params:
            memory_of(local(param).detach()).mul_(-1.5)


def draw_raw_step(d):
    every = all(layer.keep_master or not layer.format for layer in d.setup.layers)
    return {"seed": d.seed(), "fused": d.chance(0.5)} if every else None


@step(1, draw_raw_step)
def raw_step(subject, seed, fused):
    """An optimizer that writes raw memory after a kernel of torch: a gradient says so."""
    for i, param in enumerate(subject.params.values()):
        param.grad = torch.zeros_like(param)
        local(param.grad).copy_(random_like(local(param), seed + i))
    RawOptimizer(list(subject.params.values()), fused).step()
    yield
    for param in subject.params.values():
        param.grad = None


# ------------------------------------------------------------------------------- inference mode


@step(1.5, draw_write)
def write_in_inference(subject, target, view, op, number, seed):
    with torch.inference_mode():
        WRITES[op](through(subject.tensor(target), view), number, seed)


@step(1, lambda d: draw_make(d, MAKERS), reads=True)
def make_in_inference(subject, target, view, by, into):
    """Tensors without a version counter. Documented: plain ones that a quantized tensor makes are tensors
    as those made elsewhere, which may be written anywhere, and so are the twin's then."""
    with torch.inference_mode():
        tensor = made(subject, target, view, by)
    if subject.quantized:
        subject.twin.makes_inference_tensors = tensor.is_inference()
    elif not subject.makes_inference_tensors:
        memory = tensor.untyped_storage().clone()
        tensor = tensor.new_empty([]).set_(
            memory, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    keep_made(subject, into, tensor, by)


def codes_of(tensor):
    """The codes of a tensor that shares its scales with no other: exactly those of its value."""
    if not is_quantized(tensor):
        return Codes(tensor)
    exact = rounded_like(plain_value(tensor), tensor) if TensorState(tensor).keeps_master() else None
    return Codes(plain_value(tensor), ops.dequantize(tensor), exact)


def draw_inference_copy(d):
    if d.setup.sharded:
        return None
    return {
        "layer": draw_layer(d),
        "op": d.choice(("mul_", "fill_", "lerp_", "copy_")),
        "number": d.number(),
        "seed": d.seed(),
        "into": d.new_register(),
    }


@step(1, draw_inference_copy, reads=True)
def copy_in_inference(subject, layer, op, number, seed, into):
    """A module that is copied in inference mode; values of its state_dict are written."""
    holder = nn.Module()
    holder.weight = nn.Parameter(subject.tensor(f"w{layer}"))
    with torch.inference_mode():
        copied = copy.deepcopy(holder)
        WRITES[op](copied.state_dict()["weight"], number, seed)
        weight = copied.weight.detach()
        codes = codes_of(weight)
    subject.keep(into, weight)
    return codes


# ------------------------------------------------------------------------------ inside unshard


def draw_gathered_write(d):
    if not d.setup.sharded:
        return None
    return {
        "layer": draw_layer(d),
        "op": d.choice(SIMPLE_WRITES),
        "number": d.number(),
        "seed": d.seed(),
        "reads": d.chance(0.6),
    }


@step(1.5, draw_gathered_write, reads=True)
@torch.no_grad()
def write_gathered(subject, layer, op, number, seed, reads):
    """What is written inside unshard() is gone with reshard(); it must leave the shard alone."""
    for module in subject.fsdp_modules():
        module.reshard()
    yield
    for module in subject.fsdp_modules():
        module.unshard()
    yield
    weight = subject.model.layers[layer].weight.detach()
    generator = torch.Generator().manual_seed(seed)  # ranks may gather the same weight
    if op == "copy_":
        weight.copy_(torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype))
    elif op in ("masked_fill_", "lerp_"):
        weight[: weight.shape[0] // 2].mul_(number)
    else:
        WRITES[op](weight, number, seed)
    codes = Codes(weight.clone() if not is_quantized(weight) else plain_value(weight))
    if reads and is_quantized(weight):
        codes.shown = ops.dequantize(weight)
        # The value that was written upon is what the codes show, not the twin's: rounded twice, it
        # may be further from that than zero is.
        codes.exact = rounded_like(codes.values, weight)
        x = torch.ones(2, weight.shape[1], dtype=weight.dtype, device=weight.device)
        F.linear(x, weight)
    for module in subject.fsdp_modules():
        module.reshard()
    yield codes


# ------------------------------------------------------------------- windows of a whole matrix


COPY_WINDOWS = {
    "columns": lambda t: t[:, : t.shape[1] // 2],
    "a block of columns": lambda t: t[:, :32],
    "last columns": lambda t: t[:, 32:],
    "every second column": lambda t: t[:, 1::2],
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[: t.shape[0] // 2],
    "every second row": lambda t: t[::2],
    "all": lambda t: t,
}
COPY_SOURCES = {
    "clone": lambda t: t.clone(),
    "new_zeros": lambda t: t.new_zeros(t.shape),
    "empty_like": lambda t: torch.empty_like(t).copy_(t),
    "zeros_like": torch.zeros_like,
    "plain": plain_value,
}


def draw_copy_window(d):
    return {
        "layer": draw_layer(d),
        "window": d.choice(COPY_WINDOWS),
        "source": d.choice(COPY_SOURCES),
        "number": d.number(),
    }


@step(2, draw_copy_window, reads=True)
@torch.no_grad()
def copy_window(subject, layer, window, source, number):
    """Windows of columns and strides from a tensor of the same shape, on shards of any size."""
    weight = subject.tensor(f"w{layer}")
    other = COPY_SOURCES[source](weight)
    yield
    weight.mul_(number)
    COPY_WINDOWS[window](weight).copy_(COPY_WINDOWS[window](other))


@step(1, lambda d: {**draw_copy_window(d), "into": d.new_register()}, reads=True)
@torch.no_grad()
def clone_window(subject, layer, window, source, number, into):
    """A window's copy is no share of the parameter: steps that follow are as without it."""
    copied = COPY_WINDOWS[window](subject.tensor(f"w{layer}")).clone()
    copied.mul_(number)
    subject.keep(into, copied)
    subject.shares.add(into)
